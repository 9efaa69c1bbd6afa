"""The fused backward kernel for Hopper: all three gradients in one pass, five products a tile.

A block owns 2 * `own` keys of one key head and streams the queries that see them, with dout, the log-sum-exp and delta,
head by head of the group. Scores are held transposed, keys by queries, so that both accumulating products take their
left side from registers. What dQ needs crosses the two warpgroups through shared memory: each writes its own dS^T,
and each forms a part of the tile's dQ from both, which the copy engine adds to f32 sums in device memory
(FlashAttention-3, arXiv 2407.08608, section 3 and appendix B). The order of those additions varies between runs;
`mosaic_gpu_dkv` and `mosaic_gpu_dq` are the form whose results do not.

The tensor cores stay busy from step to step: the next tile's scores are multiplied while this one's dQ is stored.
"""

import dataclasses
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels._hopper import WARPGROUPS, drain, filled, launch_in_place, swizzled
from pallas_kernels.flash_attention.bounds import query_tiles
from pallas_kernels.flash_attention.mosaic_gpu_tiles import Order, Scores, add, anew, by_column, visit, weights_by_key


@dataclasses.dataclass(frozen=True)
class FusedTiles:
    """Tile sizes of the fused kernel.

    Attributes:
        own: keys of a compute warpgroup.
        stream: queries of a slot.
        stages: slots of the ring.
        staged: whether products go through shared memory, which is what the interpreter can run.
    """

    own: int = 64
    stream: int = 64
    stages: int = 2
    staged: bool = False


def backward_fused(q, k, v, dout, lse, delta, lo, hi, *, scores: Scores, tiles: FusedTiles):
    """Gradients of queries, keys and values.

    Args:
        q: (B, T, N, H), T a multiple of tiles.stream.
        k: (B, S, K, H), S a multiple of 2 * tiles.own.
        v: as k.
        dout: as q.
        lse: (B, N, T) f32, from the forward.
        delta: (B, N, T) f32.
        lo: (B or 1, T) int32, first key of each query.
        hi: last key.
        scores: from products to scores.
        tiles: sizes; the block owns keys and streams queries.

    Returns:
        (dq, dk, dv), as q, k and v.
    """
    batch, tokens, heads, width = q.shape
    keys, kv_heads = k.shape[1], k.shape[2]
    group = heads // kv_heads
    own, stream, stages = tiles.own, tiles.stream, tiles.stages
    rows, shape = WARPGROUPS * own, (own, stream)
    if tokens % stream or keys % rows:
        raise ValueError(f"T={tokens} must be a multiple of {stream} and S={keys} of {rows}; pad them")
    # A warpgroup's part of a tile's dQ: half of its queries where that leaves 64, else half of the columns.
    by_query = stream // WARPGROUPS >= 64
    dq_shape = (stream // WARPGROUPS, width) if by_query else (stream, width // WARPGROUPS)
    ranges = query_tiles(lo, hi, keys, stream, rows)
    shared = 0 if lo.shape[0] == 1 else 1
    order = Order.of(kv_heads, kv_heads, keys // rows, batch, rows)

    def kernel(refs, scratch):
        q_ref, k_ref, v_ref, dout_ref, lse_ref, delta_ref, lo_ref, hi_ref, ranges_ref, dq_ref, dk_ref, dv_ref = refs
        buffers, (own_ready, q_ready, dout_ready), free, exchanged, done = scratch
        k_smem, v_smem, q_smem, dout_smem, lse_smem, delta_smem, lo_smem, hi_smem, *others = buffers
        dscore_smem, dq_smem, staging2 = others
        kv_head, k_tile, row = order.place()
        warpgroup = lax.axis_index("warpgroup")
        bounds_row = row * shared
        span = tuple(ranges_ref[bounds_row, k_tile, i] for i in range(4))
        begin, visits = span[0], span[3] - span[0]
        accumulator = plgpu.ACC(shape, jnp.float32)
        steps = group * visits  # after them, one tile more is loaded and multiplied in vain: no step is special

        def place(part):
            """Where a warpgroup's keys lie."""
            return row, pl.ds(k_tile * rows + part * own, own), kv_head

        def compute(dk_acc, dv_acc, ahead: Any = None):
            base = k_tile * rows + warpgroup * own
            my_k, my_v = k_smem.at[warpgroup], v_smem.at[warpgroup]
            staging = staging2.at[warpgroup] if tiles.staged else None

            def begin_scores(turn):
                """Begins the products of the turn's queries and the keys; staged, only waits for the queries."""
                slot = lax.rem(turn, jnp.int32(stages))
                plgpu.barrier_wait(q_ready.at[slot])
                if not tiles.staged:
                    plgpu.wgmma(ahead, my_k, q_smem.at[slot].transpose((1, 0)))

            def step(index, masked: bool, head, turn):
                mine = anew(warpgroup)
                part = pl.ds(mine * dq_shape[1 - by_query], dq_shape[1 - by_query])
                slot, half = lax.rem(turn, jnp.int32(stages)), lax.rem(turn, jnp.int32(2))

                def weigh(dweight_ref, score_ref=ahead):
                    if tiles.staged:
                        plgpu.wgmma(score_ref, my_k, q_smem.at[slot].transpose((1, 0)))
                    # With nothing else in flight where a step begins: the assembler orders products in vain otherwise.
                    product = plgpu.wgmma_accumulator_load(score_ref)
                    plgpu.barrier_wait(dout_ready.at[slot])
                    plgpu.wgmma(dweight_ref, v_smem.at[mine], dout_smem.at[slot].transpose((1, 0)))
                    bounds = (lo_smem.at[slot], hi_smem.at[slot]) if masked else None
                    weight, slope = weights_by_key(scores, product, lse_smem.at[slot], bounds, base)
                    add(dv_acc, weight.astype(q.dtype), dout_smem.at[slot], staging)
                    dweight = plgpu.wgmma_accumulator_load(dweight_ref, wait_n=1)
                    return (slope * (dweight - by_column(delta_smem.at[slot], shape))).astype(q.dtype)

                dscore = pl.run_scoped(weigh, *(accumulator,) * (2 if tiles.staged else 1))
                dscore_smem[half, mine] = dscore
                plgpu.commit_smem()
                plgpu.barrier_arrive(exchanged.at[half])
                add(dk_acc, dscore, q_smem.at[slot], staging)
                plgpu.barrier_wait(exchanged.at[half])

                def multiply(dq_acc):
                    for other in range(WARPGROUPS):
                        dscore_of, keys_of = dscore_smem.at[half, other], k_smem.at[other]
                        dscore_of = dscore_of.at[:, part] if by_query else dscore_of
                        keys_of = keys_of if by_query else keys_of.at[:, part]
                        plgpu.wgmma(dq_acc, dscore_of.transpose((1, 0)), keys_of)
                    plgpu.wgmma_wait(1)  # what dV and dK took from registers is free for the next scores
                    plgpu.barrier_arrive(free.at[slot])
                    if not tiles.staged:
                        ahead[...] = filled(shape, 0.0)
                    begin_scores(turn + 1)
                    return plgpu.wgmma_accumulator_load(dq_acc, wait_n=1)

                dq = pl.run_scoped(multiply, plgpu.ACC(dq_shape, jnp.float32))
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                dq_smem[mine] = dq
                plgpu.commit_smem()
                first = index * stream + (mine * dq_shape[0] if by_query else 0)
                at = (row, kv_head * group + head, 0 if by_query else mine, pl.ds(first, dq_shape[0]))
                if tiles.staged:
                    plgpu.copy_smem_to_gmem(dq_smem.at[mine], dq_ref.at[(k_tile, *at)])
                else:
                    plgpu.copy_smem_to_gmem(dq_smem.at[mine], dq_ref.at[at], reduction_op="add")

            def one_head(head, _):
                visit(span, lambda index, _, masked: step(index, masked, head, head * visits + index - begin), None)

            plgpu.barrier_wait(own_ready)
            begin_scores(jnp.int32(0))
            lax.fori_loop(0, group, one_head, None)
            plgpu.wgmma_wait(0)
            last = lax.rem(steps, jnp.int32(stages))
            plgpu.barrier_wait(dout_ready.at[last])
            plgpu.barrier_arrive(free.at[last])
            dk, dv = dk_acc[...], dv_acc[...]
            # Both have read all of K for their last dQ before either overwrites its part.
            plgpu.barrier_arrive(done)
            plgpu.barrier_wait(done)
            my_k[...] = (dk * scores.scale).astype(q.dtype)
            my_v[...] = dv.astype(q.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(my_k, dk_ref.at[place(warpgroup)])
            plgpu.copy_smem_to_gmem(my_v, dv_ref.at[place(warpgroup)])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup < WARPGROUPS)
        def _compute():
            plgpu.set_max_registers(240, action="increase")
            sums = plgpu.ACC((own, width), jnp.float32)
            pl.run_scoped(compute, sums, sums, *(() if tiles.staged else (accumulator,)))

        @pl.when(warpgroup == WARPGROUPS)
        def _feed():
            plgpu.set_max_registers(24, action="decrease")
            for part in range(WARPGROUPS):
                plgpu.copy_gmem_to_smem(k_ref.at[place(part)], k_smem.at[part], own_ready)
                plgpu.copy_gmem_to_smem(v_ref.at[place(part)], v_smem.at[part], own_ready)

            def load(turn, _):
                slot = lax.rem(turn, jnp.int32(stages))
                # The tile in vain may lie past the last one, or be of a block without any.
                head = jnp.minimum(lax.div(turn, jnp.maximum(visits, 1)), group - 1)
                index = jnp.minimum(begin + lax.rem(turn, jnp.maximum(visits, 1)), tokens // stream - 1)
                head, at = kv_head * group + head, pl.ds(index * stream, stream)
                pl.when(turn >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))
                for source, target, ready in (
                    (q_ref.at[row, at, head], q_smem, q_ready),
                    (lse_ref.at[row, head, at], lse_smem, q_ready),
                    (lo_ref.at[bounds_row, at], lo_smem, q_ready),
                    (hi_ref.at[bounds_row, at], hi_smem, q_ready),
                    (dout_ref.at[row, at, head], dout_smem, dout_ready),
                    (delta_ref.at[row, head, at], delta_smem, dout_ready),
                ):
                    plgpu.copy_gmem_to_smem(source, target.at[slot], ready.at[slot])

            lax.fori_loop(0, steps + 1, load, None)
            drain(steps + 1, stages, free)

    def tile(*shape, dtype=q.dtype):
        return plgpu.SMEM(shape, dtype, transforms=swizzled(shape[-1], dtype))

    floats, ints = (plgpu.SMEM((stages, stream), dtype) for dtype in (jnp.float32, jnp.int32))
    # The interpreter has no adding copy: there each block writes a share of its own, and the shares are added here.
    shares = (keys // rows,) if tiles.staged else ()
    # A warpgroup's share of a tile is one run of memory: that is what the copy engine adds fastest.
    # Zeros that wait for delta, or XLA writes them long before and holds them through other layers' widest moments.
    zero, delta = lax.optimization_barrier((jnp.float32(0), delta))
    sums = jnp.broadcast_to(zero, (*shares, batch, heads, width // dq_shape[1], tokens, dq_shape[1]))
    dq, dk, dv = launch_in_place(
        kernel,
        (
            (
                *(tile(WARPGROUPS, own, width),) * 2,
                *(tile(stages, stream, width),) * 2,
                *(floats, floats, ints, ints),
                tile(2, WARPGROUPS, own, stream),
                tile(WARPGROUPS, *dq_shape, dtype=jnp.float32),
                tile(WARPGROUPS, own, stream) if tiles.staged else None,
            ),
            (
                plgpu.Barrier(num_arrivals=2 * WARPGROUPS),
                plgpu.Barrier(num_arrivals=4, num_barriers=stages),
                plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            ),
            plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
            plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=2),
            plgpu.Barrier(num_arrivals=WARPGROUPS),
        ),
        *(q, k, v, dout, lse, delta, lo, hi, ranges),
        out=(sums, lax.empty(k.shape, k.dtype), lax.empty(v.shape, v.dtype)),
        grid=order.grid,
        auto_barriers=False,
    )
    dq = dq.sum(0) if tiles.staged else dq
    return (dq * scores.scale).astype(q.dtype).transpose(0, 3, 1, 2, 4).reshape(q.shape), dk, dv
