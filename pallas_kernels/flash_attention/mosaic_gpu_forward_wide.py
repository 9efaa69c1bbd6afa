"""The forward kernel for Hopper of wide heads: a tile ahead, with one slot of queries for each warpgroup.

As `mosaic_gpu_forward_ahead`, whose items have two slots of queries in shared memory, of 64 KiB each at a width of 256:
here a warpgroup gives its slot back behind the item's last scores, a step before the item's last values, and the next
item's queries are there when its first scores are wanted. Results therefore leave by way of registers. Tiles of keys
need not divide their number: the copy engine fills what lies beyond with zeros, which no query sees.
"""

import functools
from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels._hopper import WARPGROUPS, drain, filled, padded
from pallas_kernels.flash_attention.bounds import at_least_one, key_tiles
from pallas_kernels.flash_attention.mosaic_gpu_items import Forward, ForwardTiles, turns
from pallas_kernels.flash_attention.mosaic_gpu_tiles import Scores, accumulate, anew, visit


def forward_wide(q, k, v, lo, hi, sinks=None, *, scores: Scores, tiles: ForwardTiles):
    """As `forward_ahead`, for any number of keys."""
    if tiles.staged:  # the interpreter does not read beyond an array
        k, v = (padded(x, 1, tiles.block_kv, 1, 1) for x in (k, v))
    call, width = Forward.of(q, k, lo, sinks, scores, tiles, ragged=True), q.shape[-1]
    block_q, block_kv, stages = tiles.block_q, tiles.block_kv, tiles.stages
    ranges = at_least_one(key_tiles(lo, hi, call.rows, block_kv), -(-call.keys // block_kv))

    def kernel(refs, scratch):
        q_ref, k_ref, v_ref, lo_ref, hi_ref, ranges_ref, work_ref, *sinks_ref, out_ref, lse_ref = refs
        buffers, (q_ready, k_ready, v_ready), (q_free, k_free, v_free), turn = scratch
        q_smem, k_smem, v_smem, bounds_smem, weight_smem = buffers
        block, warpgroup = lax.axis_index("blocks"), lax.axis_index("warpgroup")
        mine = call.of_block(block)

        def item(n):
            return call.item(ranges_ref, work_ref, block, n)

        leave_word, await_word = turns(turn, warpgroup)

        @pl.when(warpgroup < WARPGROUPS)
        def _compute():
            plgpu.set_max_registers(240, action="increase")
            of_row = plgpu.Layout.WGMMA.reduce(1)
            mine_of_slot = pl.ds(warpgroup * block_q, block_q)
            shape = (block_q, block_kv)

            def my_queries():
                return q_smem.at[pl.ds(anew(warpgroup) * block_q, block_q)]

            def score_tile(slot):
                def multiply(ref):
                    plgpu.wgmma(ref, my_queries(), k_smem.at[slot].transpose((1, 0)))
                    return ref[...]

                return pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))

            def attend(n, carry):
                visited, score = carry
                row, head, first, _, span = item(n)
                begin, visits = span[0], span[3] - span[0]
                last = span[3] - 1
                lo_q, hi_q = (plgpu.load(bounds_smem.at[i, mine_of_slot], layout=of_row) for i in (0, 1))
                pl.when(visits == 1)(lambda: plgpu.barrier_arrive(q_free.at[warpgroup]))
                top, total = call.start(sinks_ref, head)

                def step(index, carry, masked: bool, at_end: bool = False):
                    score = carry[3]
                    done = visited + index - begin
                    slot, next_slot = (lax.rem(done + i, jnp.int32(stages)) for i in (0, 1))
                    seen = functools.partial(call.seen, index, lo_q, hi_q) if masked else None
                    (acc, top, total), weight16 = call.soften(score, carry[:3], seen)
                    if at_end:
                        pl.when(n + 1 < mine)(lambda: plgpu.barrier_wait(q_ready.at[warpgroup]))
                    plgpu.barrier_wait(v_ready.at[slot])
                    plgpu.barrier_wait(k_ready.at[next_slot])
                    await_word()

                    def products(refs):
                        acc_ref, out_ref = refs

                        def both(score_ref):
                            plgpu.wgmma(acc_ref, weight16, v_smem.at[slot])
                            plgpu.wgmma(score_ref, my_queries(), k_smem.at[next_slot].transpose((1, 0)))
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
                        score = score_tile(next_slot)
                    else:
                        sums: Any = pl.run_state(products)((plgpu.ACC.init(acc), score))
                        acc, score = sums
                    plgpu.barrier_arrive(k_free.at[next_slot])
                    if not at_end:
                        pl.when(index == last - 1)(lambda: plgpu.barrier_arrive(q_free.at[warpgroup]))
                    return acc, top, total, score

                carry = (filled((block_q, width), 0.0), top, total, score)
                inner = (begin, *(jnp.minimum(at, last) for at in span[1:]))
                carry = visit(inner, step, carry)
                *carry, score = step(last, carry, masked=True, at_end=True)
                at = pl.ds(first + warpgroup * block_q, block_q)
                finish(call, carry, out_ref.at[row, at, head], lse_ref.at[row, head, at])
                return visited + visits, score

            pl.when(warpgroup == 1)(leave_word)
            plgpu.barrier_wait(q_ready.at[warpgroup])
            plgpu.barrier_wait(k_ready.at[0])
            score = score_tile(0)
            plgpu.barrier_arrive(k_free.at[0])
            lax.fori_loop(0, mine, attend, (jnp.int32(0), score))
            pl.when(warpgroup == 0)(await_word)

        @pl.when(warpgroup == WARPGROUPS)
        def _feed():
            plgpu.set_max_registers(24, action="decrease")

            def load(ref, smem, ready, free, number, at):
                slot = lax.rem(number, jnp.int32(stages))
                pl.when(number >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))
                plgpu.copy_gmem_to_smem(ref.at[at], smem.at[slot], ready.at[slot])

            def load_queries(wanted, n):
                for taker in range(WARPGROUPS):
                    pl.when(n > 0)(lambda taker=taker: plgpu.barrier_wait(q_free.at[taker]))
                    at, slot = pl.ds(wanted.first + taker * block_q, block_q), pl.ds(taker * block_q, block_q)
                    bounds_row, ready = call.bounds_row(wanted.row), q_ready.at[taker]
                    plgpu.copy_gmem_to_smem(q_ref.at[wanted.row, at, wanted.head], q_smem.at[slot], ready)
                    for i, bounds_ref in enumerate((lo_ref, hi_ref)):
                        plgpu.copy_gmem_to_smem(bounds_ref.at[bounds_row, at], bounds_smem.at[i, slot], ready)

            def feed(n, visited):
                wanted = item(n)
                begin, _, _, end = wanted.span
                kv_head = call.kv_head(wanted.head)

                def load_k(index):
                    load(k_ref, k_smem, k_ready, k_free, visited + index - begin, keys_at(index))

                def load_v(index):
                    load(v_ref, v_smem, v_ready, v_free, visited + index - begin, keys_at(index))

                def keys_at(index):
                    return wanted.row, pl.ds(index * block_kv, block_kv), kv_head

                def load_both(index, _):
                    load_k(index)
                    load_v(index)

                # The item before gives its queries' slots back behind its last scores.
                load_k(begin)
                load_queries(wanted, n)
                load_v(begin)
                lax.fori_loop(begin + 1, end, load_both, None)
                return visited + end - begin

            visited = lax.fori_loop(0, mine, feed, jnp.int32(0))
            # What the last step multiplies in vain:
            load(k_ref, k_smem, k_ready, k_free, visited, (0, pl.ds(0, block_kv), 0))
            drain(visited + 1, stages, k_free)
            drain(visited, stages, v_free)
            for taker in range(WARPGROUPS):
                plgpu.barrier_wait(q_free.at[taker])

    scratch = (
        (
            call.tile(call.rows, width),
            call.tile(stages, block_kv, width),
            call.tile(stages, block_kv, width, width=block_kv),  # products take keys by whole swizzles
            call.tile(2, call.rows, dtype=jnp.int32),
            call.weights(),
        ),
        (plgpu.Barrier(num_arrivals=3, num_barriers=WARPGROUPS), *(plgpu.Barrier(num_barriers=stages),) * 2),
        *call.free_and_turn(plgpu.Barrier(num_barriers=WARPGROUPS)),
    )
    return call.launch(kernel, scratch, q, k, v, lo, hi, sinks, ranges)


def finish(call: Forward, carry, out_ref, lse_ref) -> None:
    """Writes an item's results from registers."""
    out, lse_ref[...] = call.normalise(*carry)
    out_ref[...] = out if call.tiles.staged else by_sixteen_bytes(out)


def by_sixteen_bytes(tile):
    """A tile of 16-bit tensor-core results, such that a thread holds eight neighbours instead of four pairs.

    The four threads of a row exchange: of four pairs next to each other each keeps one place from all four threads.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA,),
        return_type=plgpu.ShapeDtypeStruct(tile.shape, tile.dtype, plgpu.Layout.WGMMA_UPCAST_4X),
    )
    def exchange(_, array):
        layout = fragmented_array.WGMMA_LAYOUT_UPCAST_4X
        i32 = ir.IntegerType.get_signless(32)
        lane = utils.thread_idx()

        def is_set(bit: int):
            masked = arith.andi(lane, arith.constant(i32, bit))
            return arith.cmpi(arith.CmpIPredicate.ne, masked, arith.constant(i32, 0))

        odd, upper = is_set(1), is_set(2)

        def swap(low, high, distance: int, flag):
            """Low of a thread without the flag and of its partner, or high of both in a thread with it."""
            received = utils.shfl_bfly(arith.select(flag, low, high), distance)
            return arith.select(flag, received, low), arith.select(flag, high, received)

        registers = np.empty(layout.registers_shape(array.shape), dtype=object)
        for (rows, columns, *rest), _ in np.ndenumerate(registers):
            a, b, c, d = (utils.bitcast(array.registers[(rows, 4 * columns + i, *rest)], i32) for i in range(4))
            (a, b), (c, d) = swap(a, b, 1, odd), swap(c, d, 1, odd)
            (a, c), (b, d) = swap(a, c, 2, upper), swap(b, d, 2, upper)
            words = [utils.bitcast(word, array.registers.flat[0].type) for word in (a, b, c, d)]
            registers[(rows, columns, *rest)] = utils.vector_concat(words)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return exchange(tile)
