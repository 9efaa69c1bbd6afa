"""The forward kernel for Hopper: items and their softmax as in mosaic_gpu_items, scores multiplied a tile ahead.

Each step issues two products together: this tile's weighted values, and the scores of the next, which may be the next
item's first (FlashAttention-3, arXiv 2407.08608, section 3.2). While one warpgroup waits for its values, its scores are
under way already; its turn ends with its values. What follows the last tile is multiplied in vain, so that no step is
special, and every item visits at least one tile. A tile of values and the next tile of keys share a barrier.
"""

import functools
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels._hopper import WARPGROUPS, drain, filled
from pallas_kernels.flash_attention.bounds import at_least_one, key_tiles
from pallas_kernels.flash_attention.mosaic_gpu_items import ITEMS, Forward, ForwardTiles, turns
from pallas_kernels.flash_attention.mosaic_gpu_tiles import Scores, accumulate, anew, visit


def forward_ahead(q, k, v, lo, hi, sinks=None, *, scores: Scores, tiles: ForwardTiles):
    """Attends within row bounds.

    Args:
        q: (B, T, N, H), T a multiple of 2 * block_q; 16 bit.
        k: (B, S, K, H), S a multiple of block_kv.
        v: as k.
        lo: (B or 1, T) int32, first key of each query.
        hi: last key.
        sinks: (N,) f32, score of a key without a value that every query of the head sees, or None.
        scores: from products to scores.
        tiles: sizes.

    Returns:
        (out (B, T, N, H), lse (B, N, T) f32): lse is the base-2 logarithm of the sum of exponentials of the scores, the
        sink's included, +inf where there is none.
    """
    call, width = Forward.of(q, k, lo, sinks, scores, tiles), q.shape[-1]
    block_q, block_kv, stages = tiles.block_q, tiles.block_kv, tiles.stages
    early = stages > 2  # tiles are there a step before they are needed: that is when a step waits for them
    ranges = at_least_one(key_tiles(lo, hi, call.rows, block_kv), call.keys // block_kv)

    def kernel(refs, scratch):
        q_ref, k_ref, v_ref, lo_ref, hi_ref, ranges_ref, work_ref, *sinks_ref, out_ref, lse_ref = refs
        buffers, (q_ready, first_ready, ready), (q_free, k_free, v_free), turn = scratch
        q_smem, k_smem, v_smem, lse_smem, lo_smem, hi_smem, weight_smem = buffers
        block, warpgroup = lax.axis_index("blocks"), lax.axis_index("warpgroup")
        mine = call.of_block(block)

        def item(n):
            return call.item(ranges_ref, work_ref, block, n)

        def slot_of(number):
            return lax.rem(number, jnp.int32(stages))

        leave_word, await_word = turns(turn, warpgroup)

        @pl.when(warpgroup < WARPGROUPS)
        def _compute():
            plgpu.set_max_registers(232, action="increase")
            of_row = plgpu.Layout.WGMMA.reduce(1)
            rows_of_mine = pl.ds(warpgroup * block_q, block_q)
            shape = (block_q, block_kv)

            def q_of(slot):
                return q_smem.at[slot, pl.ds(anew(warpgroup) * block_q, block_q)]

            def give_back(n):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(q_free.at[lax.rem(n, jnp.int32(ITEMS))])

            def first_scores(ref):
                plgpu.barrier_wait(q_ready.at[0])
                plgpu.barrier_wait(first_ready)
                plgpu.wgmma(ref, q_of(0), k_smem.at[0].transpose((1, 0)))
                return ref[...]

            def attend(n, carry):
                visited, score = carry
                row, head, first, q_slot, span = item(n)
                begin, visits = span[0], span[3] - span[0]
                my_q, my_lse = q_smem.at[q_slot, rows_of_mine], lse_smem.at[q_slot, rows_of_mine]
                lo_q = plgpu.load(lo_smem.at[q_slot, rows_of_mine], layout=of_row)
                hi_q = plgpu.load(hi_smem.at[q_slot, rows_of_mine], layout=of_row)
                top, total = call.start(sinks_ref, head)

                def give_back_before(index):
                    """In an item's first step: by then the results of the item before have left its slot."""
                    pl.when((index == begin) & (n > 0))(lambda: give_back(n - 1))

                def step(index, carry, masked: bool, last: bool = False):
                    score = carry[3]
                    done = visited + index - begin
                    slot, next_slot = slot_of(done), slot_of(done + 1)
                    more = n + 1 < mine
                    seen = functools.partial(call.seen, index, lo_q, hi_q) if masked else None
                    (acc, top, total), weight16 = call.soften(score, carry[:3], seen)
                    next_q = q_slot
                    if last:
                        give_back_before(index)
                        next_q = jnp.where(more, lax.rem(n + 1, jnp.int32(ITEMS)), q_slot)
                        pl.when(more)(lambda: plgpu.barrier_wait(q_ready.at[next_q]))
                    if not early:
                        plgpu.barrier_wait(ready.at[slot])
                    await_word()
                    next_k = k_smem.at[next_slot].transpose((1, 0))

                    def let_go():
                        """While the scores are multiplied: the other's turn, and the next step's tiles."""
                        leave_word()
                        plgpu.barrier_arrive(v_free.at[slot])
                        if not last:
                            give_back_before(index)
                        if early:
                            pl.when(more if last else True)(lambda: plgpu.barrier_wait(ready.at[next_slot]))

                    def products(refs):
                        acc_ref, out_ref = refs

                        def both(score_ref):
                            plgpu.wgmma(acc_ref, weight16, v_smem.at[slot])
                            plgpu.wgmma(score_ref, q_of(next_q), next_k)
                            plgpu.wgmma_wait(1)
                            let_go()
                            out_ref[...] = score_ref[...]

                        pl.run_scoped(both, plgpu.ACC(shape, jnp.float32))

                    if tiles.staged:
                        (acc,) = accumulate(
                            (acc,), weight_smem.at[warpgroup], lambda add: add(weight16, v_smem.at[slot])
                        )
                        let_go()

                        def scores_of(ref):
                            plgpu.wgmma(ref, q_of(next_q), next_k)
                            return ref[...]

                        score = pl.run_scoped(scores_of, plgpu.ACC(shape, jnp.float32))
                    else:
                        sums: Any = pl.run_state(products)((plgpu.ACC.init(acc), score))
                        acc, score = sums
                    plgpu.barrier_arrive(k_free.at[next_slot])
                    return acc, top, total, score

                last = span[3] - 1
                carry = (filled((block_q, width), 0.0), top, total, score)
                inner = (begin, *(jnp.minimum(at, last) for at in span[1:]))
                carry = visit(inner, step, carry)
                *carry, score = step(last, carry, masked=True, last=True)
                at = pl.ds(first + warpgroup * block_q, block_q)
                call.finish(carry, my_q, my_lse, out_ref.at[row, at, head], lse_ref.at[row, head, at])
                return visited + visits, score

            pl.when(warpgroup == 1)(leave_word)
            score = pl.run_scoped(first_scores, plgpu.ACC(shape, jnp.float32))
            plgpu.barrier_arrive(k_free.at[0])
            if early:
                plgpu.barrier_wait(ready.at[0])
            lax.fori_loop(0, mine, attend, (jnp.int32(0), score))
            pl.when(warpgroup == 0)(await_word)
            give_back(mine - 1)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == WARPGROUPS)
        def _feed():
            plgpu.set_max_registers(40, action="decrease")

            def load_k(number, at):
                slot = slot_of(number)
                pl.when(number >= stages)(lambda: plgpu.barrier_wait(k_free.at[slot]))

                def load(barrier):
                    plgpu.copy_gmem_to_smem(k_ref.at[at], k_smem.at[slot], barrier)

                pl.when(number == 0)(lambda: load(first_ready))
                pl.when(number > 0)(lambda: load(ready.at[slot_of(number - 1)]))

            def load_v(number, at):
                slot = slot_of(number)
                pl.when(number >= stages)(lambda: plgpu.barrier_wait(v_free.at[slot]))
                plgpu.copy_gmem_to_smem(v_ref.at[at], v_smem.at[slot], ready.at[slot])

            def feed(n, visited):
                wanted = item(n)
                begin, _, _, end = wanted.span
                kv_head = call.kv_head(wanted.head)

                def at(index):
                    return wanted.row, pl.ds(index * block_kv, block_kv), kv_head

                def load_both(index, _):
                    number = visited + index - begin
                    load_k(number, at(index))
                    load_v(number, at(index))

                # The item before the last gives its queries' slot back after the step that waits for these keys.
                load_k(visited, at(begin))
                pl.when(n >= ITEMS)(lambda: plgpu.barrier_wait(q_free.at[wanted.slot]))
                call.load_queries(wanted, (q_ref, lo_ref, hi_ref), (q_smem, lo_smem, hi_smem), q_ready)
                load_v(visited, at(begin))
                lax.fori_loop(begin + 1, end, load_both, None)
                return visited + end - begin

            visited = lax.fori_loop(0, mine, feed, jnp.int32(0))
            load_k(visited, (0, pl.ds(0, block_kv), 0))  # what the last step multiplies in vain
            drain(visited + 1, stages, k_free)
            drain(visited, stages, v_free)
            drain(mine, ITEMS, q_free)

    return call.launch(kernel, call.scratch(), q, k, v, lo, hi, sinks, ranges)
