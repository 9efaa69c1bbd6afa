"""The forward kernel for Hopper: items and their softmax as in mosaic_gpu_items, a tile's scores and values in turn.

One warpgroup adds its weighted values once the other has left word that its next scores are begun. The word that the
second needs for an item's last values comes with the first's scores of the next item, or, where that item's queries
have no slot before both have finished this one (items=1), at the first's end of this one.
"""

import functools

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels._hopper import WARPGROUPS, drain, filled
from pallas_kernels.flash_attention.bounds import key_tiles
from pallas_kernels.flash_attention.mosaic_gpu_items import Forward, ForwardTiles, turns
from pallas_kernels.flash_attention.mosaic_gpu_tiles import Scores, accumulate, visit


def forward_tiles(q, k, v, lo, hi, sinks=None, *, scores: Scores, tiles: ForwardTiles):
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
    ranges, one_slot = key_tiles(lo, hi, call.rows, block_kv), tiles.items == 1

    def kernel(refs, scratch):
        q_ref, k_ref, v_ref, lo_ref, hi_ref, ranges_ref, work_ref, *sinks_ref, out_ref, lse_ref = refs
        buffers, (q_ready, k_ready, v_ready), (q_free, k_free, v_free), turn = scratch
        q_smem, k_smem, v_smem, lse_smem, lo_smem, hi_smem, weight_smem = buffers
        block, warpgroup = lax.axis_index("blocks"), lax.axis_index("warpgroup")
        mine = call.of_block(block)

        def item(n):
            return call.item(ranges_ref, work_ref, block, n)

        leave_word, await_word = turns(turn, warpgroup)

        def begin_turns():
            """The first multiplies first."""
            pl.when(warpgroup == 1)(await_word)

        def end_turns():
            """The second has no one to wait for."""
            pl.when(warpgroup == 0)(leave_word)

        @pl.when(warpgroup < WARPGROUPS)
        def _compute():
            plgpu.set_max_registers(232, action="increase")
            of_row = plgpu.Layout.WGMMA.reduce(1)
            rows_of_mine = pl.ds(warpgroup * block_q, block_q)
            if not one_slot:
                begin_turns()

            def attend(n, visited):
                row, head, first, q_slot, span = item(n)
                begin, visits = span[0], span[3] - span[0]
                my_q, my_lse = q_smem.at[q_slot, rows_of_mine], lse_smem.at[q_slot, rows_of_mine]
                plgpu.barrier_wait(q_ready.at[q_slot])
                lo_q = plgpu.load(lo_smem.at[q_slot, rows_of_mine], layout=of_row)
                hi_q = plgpu.load(hi_smem.at[q_slot, rows_of_mine], layout=of_row)
                top, total = call.start(sinks_ref, head)
                if one_slot:
                    begin_turns()

                def step(index, carry, masked: bool):
                    slot = lax.rem(visited + index - begin, jnp.int32(stages))
                    plgpu.barrier_wait(k_ready.at[slot])

                    def multiply(acc_ref):
                        plgpu.wgmma(acc_ref, my_q, k_smem.at[slot].transpose((1, 0)))
                        leave_word()
                        return acc_ref[...]

                    score = pl.run_scoped(multiply, plgpu.ACC((block_q, block_kv), jnp.float32))
                    plgpu.barrier_arrive(k_free.at[slot])
                    seen = functools.partial(call.seen, index, lo_q, hi_q) if masked else None
                    carry, weight16 = call.soften(score, carry, seen)
                    plgpu.barrier_wait(v_ready.at[slot])
                    await_word()

                    staging = None if weight_smem is None else weight_smem.at[warpgroup]
                    (acc,) = accumulate(carry[:1], staging, lambda add: add(weight16, v_smem.at[slot]))
                    plgpu.barrier_arrive(v_free.at[slot])
                    return acc, *carry[1:]

                carry = visit(span, step, (filled((block_q, width), 0.0), top, total))
                if one_slot:
                    end_turns()
                at = pl.ds(first + warpgroup * block_q, block_q)
                call.finish(carry, my_q, my_lse, out_ref.at[row, at, head], lse_ref.at[row, head, at])
                plgpu.barrier_arrive(q_free.at[q_slot])
                return visited + visits

            lax.fori_loop(0, mine, attend, jnp.int32(0))
            if not one_slot:
                end_turns()
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == WARPGROUPS)
        def _feed():
            plgpu.set_max_registers(40, action="decrease")

            def feed(n, visited):
                wanted = item(n)
                begin, _, _, end = wanted.span
                kv_head = call.kv_head(wanted.head)
                pl.when(n >= tiles.items)(lambda: plgpu.barrier_wait(q_free.at[wanted.slot]))
                call.load_queries(wanted, (q_ref, lo_ref, hi_ref), (q_smem, lo_smem, hi_smem), q_ready)

                def load(index, _):
                    turn_of_slot = visited + index - begin
                    slot = lax.rem(turn_of_slot, jnp.int32(stages))
                    at = (wanted.row, pl.ds(index * block_kv, block_kv), kv_head)
                    pl.when(turn_of_slot >= stages)(lambda: plgpu.barrier_wait(k_free.at[slot]))
                    plgpu.copy_gmem_to_smem(k_ref.at[at], k_smem.at[slot], k_ready.at[slot])
                    pl.when(turn_of_slot >= stages)(lambda: plgpu.barrier_wait(v_free.at[slot]))
                    plgpu.copy_gmem_to_smem(v_ref.at[at], v_smem.at[slot], v_ready.at[slot])

                lax.fori_loop(begin, end, load, None)
                return visited + end - begin

            visited = lax.fori_loop(0, mine, feed, jnp.int32(0))
            drain(visited, stages, k_free, v_free)
            drain(mine, tiles.items, q_free)

    return call.launch(kernel, call.scratch(), q, k, v, lo, hi, sinks, ranges)
