"""The forward kernel for Hopper that scores a tile ahead: the next scores are multiplied right behind P @ V.

As `mosaic_gpu_forward`, but each step issues two products together: this tile's weighted values, and the scores of the
next, which may be the next item's first (FlashAttention-3, arXiv 2407.08608, section 3.2). While one warpgroup waits
for its values, its scores are under way already; its turn ends with its values. What follows the last tile is
multiplied in vain, so that no step is special, and every item visits at least one tile.
"""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _platform
from pallas_kernels._hopper import WARPGROUPS, drain, filled, launch, swizzled
from pallas_kernels.flash_attention.bounds import at_least_one, key_tiles, longest_first
from pallas_kernels.flash_attention.mosaic_gpu_forward import LOWEST, ForwardTiles
from pallas_kernels.flash_attention.mosaic_gpu_tiles import LOG2E, Scores, accumulate, anew, index_along, visit


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
    batch, tokens, heads, width = q.shape
    keys, kv_heads = k.shape[1], k.shape[2]
    block_q, block_kv, stages, q_slots = tiles.block_q, tiles.block_kv, tiles.stages, tiles.items
    rows = WARPGROUPS * block_q
    if tokens % rows or keys % block_kv:
        raise ValueError(f"T={tokens} must be a multiple of {rows} and S={keys} of {block_kv}; pad them")
    q_tiles = tokens // rows
    ranges = at_least_one(key_tiles(lo, hi, rows, block_kv), keys // block_kv)
    work = longest_first(ranges, batch)
    shared = 0 if lo.shape[0] == 1 else 1
    items = heads * batch * q_tiles
    blocks = min(items, tiles.blocks or _platform.multiprocessors())

    def kernel(refs, scratch):
        q_ref, k_ref, v_ref, lo_ref, hi_ref, ranges_ref, work_ref, *sinks_ref, out_ref, lse_ref = refs
        buffers, (q_ready, k_ready, v_ready), (q_free, k_free, v_free), turn = scratch
        q_smem, k_smem, v_smem, lse_smem, lo_smem, hi_smem, weight_smem = buffers
        block, warpgroup = lax.axis_index("blocks"), lax.axis_index("warpgroup")
        mine = lax.div(items - block + (blocks - 1), jnp.int32(blocks))  # items of this block

        def item(n):
            """Where the n-th item of this block lies: row, head, first query, slot of Q, tiles of keys."""
            number = block + n * blocks
            place = work_ref[lax.div(number, jnp.int32(heads))]
            row, q_tile = lax.div(place, jnp.int32(q_tiles)), lax.rem(place, jnp.int32(q_tiles))
            span = tuple(ranges_ref[row * shared, q_tile, i] for i in range(4))
            return row, lax.rem(number, jnp.int32(heads)), q_tile * rows, lax.rem(n, jnp.int32(q_slots)), span

        def leave_word():
            """Tells the other that its products may begin."""
            plgpu.barrier_arrive(turn.at[1 - warpgroup])

        def await_word():
            plgpu.barrier_wait(turn.at[warpgroup])

        @pl.when(warpgroup < WARPGROUPS)
        def _compute():
            plgpu.set_max_registers(232, action="increase")
            of_row = plgpu.Layout.WGMMA.reduce(1)
            rows_of_mine = pl.ds(warpgroup * block_q, block_q)
            shape = (block_q, block_kv)

            def q_of(slot):
                return q_smem.at[slot, pl.ds(anew(warpgroup) * block_q, block_q)]

            def first_scores(ref):
                plgpu.barrier_wait(q_ready.at[0])
                plgpu.barrier_wait(k_ready.at[0])
                plgpu.wgmma(ref, q_of(0), k_smem.at[0].transpose((1, 0)))
                return ref[...]

            def attend(n, carry):
                visited, score = carry
                row, head, first, q_slot, span = item(n)
                begin, visits = span[0], span[3] - span[0]
                my_q, my_lse = q_smem.at[q_slot, rows_of_mine], lse_smem.at[q_slot, rows_of_mine]
                lo_q = plgpu.load(lo_smem.at[q_slot, rows_of_mine], layout=of_row)
                hi_q = plgpu.load(hi_smem.at[q_slot, rows_of_mine], layout=of_row)
                # A sink is a key that has been seen before the first one.
                top = filled((block_q,), sinks_ref[0][head] if sinks_ref else LOWEST)
                total = filled((block_q,), 1.0 if sinks_ref else 0.0)

                def step(index, carry, masked: bool, last: bool = False):
                    acc, top, total, score = carry
                    done = visited + index - begin
                    slot, next_slot = (lax.rem(done + i, jnp.int32(stages)) for i in (0, 1))
                    score = scores.squash(score)
                    if masked:
                        key = index_along(1, index * block_kv, shape)
                        seen = (key >= lax.broadcast_in_dim(lo_q, key.shape, [0])) & (
                            key <= lax.broadcast_in_dim(hi_q, key.shape, [0])
                        )
                        score = jnp.where(seen, score, -jnp.inf)
                    new_top = jnp.maximum(top, score.max(axis=1) * scores.factor)
                    shrink = jnp.exp2(top - new_top)
                    weight = jnp.exp2(score * scores.factor - lax.broadcast_in_dim(new_top, score.shape, [0]))
                    acc *= lax.broadcast_in_dim(shrink, acc.shape, [0])
                    total = total * shrink + weight.sum(axis=1)
                    weight16 = weight.astype(q.dtype)
                    acc, total, new_top, weight16 = lax.optimization_barrier((acc, total, new_top, weight16))
                    next_q = q_slot
                    if last:
                        more = n + 1 < mine
                        next_q = jnp.where(more, lax.rem(n + 1, jnp.int32(q_slots)), q_slot)
                        pl.when(more)(lambda: plgpu.barrier_wait(q_ready.at[next_q]))
                    plgpu.barrier_wait(v_ready.at[slot])
                    plgpu.barrier_wait(k_ready.at[next_slot])
                    await_word()
                    next_k = k_smem.at[next_slot].transpose((1, 0))

                    def products(refs):
                        acc_ref, out_ref = refs

                        def both(score_ref):
                            plgpu.wgmma(acc_ref, weight16, v_smem.at[slot])
                            plgpu.wgmma(score_ref, q_of(next_q), next_k)
                            plgpu.wgmma_wait(1)
                            leave_word()
                            plgpu.barrier_arrive(v_free.at[slot])
                            out_ref[...] = score_ref[...]

                        pl.run_scoped(both, plgpu.ACC(shape, jnp.float32))

                    if tiles.staged:
                        (acc,) = accumulate(
                            (acc,), weight_smem.at[warpgroup], lambda add: add(weight16, v_smem.at[slot])
                        )
                        leave_word()
                        plgpu.barrier_arrive(v_free.at[slot])

                        def scores_of(ref):
                            plgpu.wgmma(ref, q_of(next_q), next_k)
                            return ref[...]

                        score = pl.run_scoped(scores_of, plgpu.ACC(shape, jnp.float32))
                    else:
                        sums: Any = pl.run_state(products)((plgpu.ACC.init(acc), score))
                        acc, score = sums
                    plgpu.barrier_arrive(k_free.at[next_slot])
                    return acc, new_top, total, score

                last = span[3] - 1
                carry = (filled((block_q, width), 0.0), top, total, score)
                inner = (begin, *(jnp.minimum(at, last) for at in span[1:]))
                carry = visit(inner, step, carry)
                acc, top, total, score = step(last, carry, masked=True, last=True)

                empty = total == 0.0
                acc /= lax.broadcast_in_dim(jnp.where(empty, 1.0, total), acc.shape, [0])
                my_q[...] = acc.astype(q.dtype)
                my_lse[...] = jnp.where(empty, jnp.inf, top + jnp.log2(jnp.where(empty, 1.0, total)))
                plgpu.commit_smem()
                at = pl.ds(first + warpgroup * block_q, block_q)
                plgpu.copy_smem_to_gmem(my_q, out_ref.at[row, at, head])
                plgpu.copy_smem_to_gmem(my_lse, lse_ref.at[row, head, at])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(q_free.at[q_slot])
                return visited + visits, score

            pl.when(warpgroup == 1)(leave_word)
            score = pl.run_scoped(first_scores, plgpu.ACC(shape, jnp.float32))
            plgpu.barrier_arrive(k_free.at[0])
            lax.fori_loop(0, mine, attend, (jnp.int32(0), score))
            pl.when(warpgroup == 0)(await_word)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == WARPGROUPS)
        def _feed():
            plgpu.set_max_registers(40, action="decrease")

            def load_k(number, at):
                slot = lax.rem(number, jnp.int32(stages))
                pl.when(number >= stages)(lambda: plgpu.barrier_wait(k_free.at[slot]))
                plgpu.copy_gmem_to_smem(k_ref.at[at], k_smem.at[slot], k_ready.at[slot])

            def feed(n, visited):
                row, head, first, q_slot, (begin, _, _, end) = item(n)
                kv_head, at = lax.div(head, jnp.int32(heads // kv_heads)), pl.ds(first, rows)
                pl.when(n >= q_slots)(lambda: plgpu.barrier_wait(q_free.at[q_slot]))
                plgpu.copy_gmem_to_smem(q_ref.at[row, at, head], q_smem.at[q_slot], q_ready.at[q_slot])
                plgpu.copy_gmem_to_smem(lo_ref.at[row * shared, at], lo_smem.at[q_slot], q_ready.at[q_slot])
                plgpu.copy_gmem_to_smem(hi_ref.at[row * shared, at], hi_smem.at[q_slot], q_ready.at[q_slot])

                def load(index, _):
                    number = visited + index - begin
                    at = (row, pl.ds(index * block_kv, block_kv), kv_head)
                    load_k(number, at)
                    slot = lax.rem(number, jnp.int32(stages))
                    pl.when(number >= stages)(lambda: plgpu.barrier_wait(v_free.at[slot]))
                    plgpu.copy_gmem_to_smem(v_ref.at[at], v_smem.at[slot], v_ready.at[slot])

                lax.fori_loop(begin, end, load, None)
                return visited + end - begin

            visited = lax.fori_loop(0, mine, feed, jnp.int32(0))
            load_k(visited, (0, pl.ds(0, block_kv), 0))  # what the last step multiplies in vain
            drain(visited + 1, stages, k_free)
            drain(visited, stages, v_free)
            drain(mine, q_slots, q_free)

    def tile(*shape, dtype=q.dtype):
        return plgpu.SMEM(shape, dtype, transforms=swizzled(shape[-1]) if dtype == q.dtype else ())

    return launch(
        kernel,
        (
            (
                tile(q_slots, rows, width),
                tile(stages, block_kv, width),
                tile(stages, block_kv, width),
                tile(q_slots, rows, dtype=jnp.float32),
                tile(q_slots, rows, dtype=jnp.int32),
                tile(q_slots, rows, dtype=jnp.int32),
                tile(WARPGROUPS, block_q, block_kv) if tiles.staged else None,
            ),
            (
                plgpu.Barrier(num_arrivals=3, num_barriers=q_slots),
                *(plgpu.Barrier(num_barriers=stages),) * 2,
            ),
            (
                plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=q_slots),
                *(plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),) * 2,
            ),
            plgpu.Barrier(num_barriers=WARPGROUPS),
        ),
        *(q, k, v, lo, hi, ranges, work),
        *([] if sinks is None else [sinks * LOG2E]),
        out_type=[q, jax.ShapeDtypeStruct((batch, heads, tokens), jnp.float32)],
        grid={"blocks": blocks},
    )
