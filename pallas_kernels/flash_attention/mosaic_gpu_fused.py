"""The fused backward kernel for Hopper: all three gradients in one pass, five products a tile.

A block owns 2 * `own` keys of one key head and streams the queries that see them, with dout, the log-sum-exp and delta,
head by head of the group. Scores are held transposed, keys by queries, so that both accumulating products take their
left side from registers. What dQ needs crosses the two warpgroups through shared memory: each writes its own dS^T,
and each forms a part of the tile's dQ from both, which the copy engine adds to f32 sums in device memory
(FlashAttention-3, arXiv 2407.08608, section 3 and appendix B). The order of those additions varies between runs;
`mosaic_gpu_backward` is the form whose results do not.
"""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels._hopper import WARPGROUPS, filled, launch_in_place, swizzled
from pallas_kernels.flash_attention.bounds import query_tiles
from pallas_kernels.flash_attention.mosaic_gpu_backward import BackwardTiles, stream_queries, weights_by_key
from pallas_kernels.flash_attention.mosaic_gpu_tiles import Scores, accumulate, by_column, visit


def backward_fused(q, k, v, dout, lse, delta, lo, hi, *, scores: Scores, tiles: BackwardTiles):
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

    def kernel(refs, scratch):
        q_ref, k_ref, v_ref, dout_ref, lse_ref, delta_ref, lo_ref, hi_ref, ranges_ref, dq_ref, dk_ref, dv_ref = refs
        buffers, own_ready, ready, free, exchanged, done = scratch
        k_smem, v_smem, q_smem, dout_smem, lse_smem, delta_smem, lo_smem, hi_smem, *others = buffers
        dscore_smem, dq_smem, staging2 = others
        kv_head, k_tile, row = lax.axis_index("heads"), lax.axis_index("tiles"), lax.axis_index("batch")
        warpgroup = lax.axis_index("warpgroup")
        bounds_row = row * shared
        span = tuple(ranges_ref[bounds_row, k_tile, i] for i in range(4))
        begin, visits = span[0], span[3] - span[0]

        @pl.when(warpgroup < WARPGROUPS)
        def _compute():
            plgpu.set_max_registers(240, action="increase")
            base = k_tile * rows + warpgroup * own
            mine = (row, pl.ds(base, own), kv_head)
            plgpu.copy_gmem_to_smem(k_ref.at[mine], k_smem.at[warpgroup], own_ready)
            plgpu.copy_gmem_to_smem(v_ref.at[mine], v_smem.at[warpgroup], own_ready)
            plgpu.barrier_wait(own_ready)
            my_k, my_v = k_smem.at[warpgroup], v_smem.at[warpgroup]
            staging = None if staging2 is None else staging2.at[warpgroup]
            part = pl.ds(warpgroup * dq_shape[1 - by_query], dq_shape[1 - by_query])

            def step(index, sums, masked: bool, head):
                turn_of_slot = head * visits + index - begin
                slot, turn = lax.rem(turn_of_slot, jnp.int32(stages)), lax.rem(turn_of_slot, jnp.int32(2))
                plgpu.barrier_wait(ready.at[slot])

                def weigh(score_ref, dweight_ref):
                    plgpu.wgmma(score_ref, my_k, q_smem.at[slot].transpose((1, 0)))
                    plgpu.wgmma(dweight_ref, my_v, dout_smem.at[slot].transpose((1, 0)))
                    product = plgpu.wgmma_accumulator_load(score_ref, wait_n=1)
                    bounds = (lo_smem.at[slot], hi_smem.at[slot]) if masked else None
                    weight, slope = weights_by_key(scores, product, lse_smem.at[slot], bounds, base)
                    return weight.astype(q.dtype), slope, dweight_ref[...]

                def multiply(dq_acc):
                    for other in range(WARPGROUPS):
                        dscore_of, keys_of = dscore_smem.at[turn, other], k_smem.at[other]
                        if by_query:
                            dscore_of = dscore_of.at[:, part]
                        else:
                            keys_of = keys_of.at[:, part]
                        plgpu.wgmma(dq_acc, dscore_of.transpose((1, 0)), keys_of)
                    return dq_acc[...]

                def products(add_to_dk, add_to_dv):
                    accumulator = plgpu.ACC(shape, jnp.float32)
                    weight, slope, dweight = pl.run_scoped(weigh, accumulator, accumulator)
                    add_to_dv(weight, dout_smem.at[slot])
                    dscore = (slope * (dweight - by_column(delta_smem.at[slot], shape))).astype(q.dtype)
                    dscore_smem[turn, warpgroup] = dscore
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(exchanged.at[turn])
                    add_to_dk(dscore, q_smem.at[slot])
                    plgpu.barrier_wait(exchanged.at[turn])
                    dq = pl.run_scoped(multiply, plgpu.ACC(dq_shape, jnp.float32))
                    plgpu.barrier_arrive(free.at[slot])
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    dq_smem[warpgroup] = dq
                    plgpu.commit_smem()
                    first = index * stream + (warpgroup * dq_shape[0] if by_query else 0)
                    at = (row, pl.ds(first, dq_shape[0]), kv_head * group + head, *(() if by_query else (part,)))
                    if tiles.staged:
                        plgpu.copy_smem_to_gmem(dq_smem.at[warpgroup], dq_ref.at[(k_tile, *at)])
                    else:
                        plgpu.copy_smem_to_gmem(dq_smem.at[warpgroup], dq_ref.at[at], reduction_op="add")

                return accumulate(sums, staging, products)

            def one_head(head, sums):
                return visit(span, lambda index, sums, masked: step(index, sums, masked, head), sums)

            zeros = filled((own, width), 0.0)
            dk, dv = lax.fori_loop(0, group, one_head, (zeros, zeros))
            # Both have read all of K for their last dQ before either overwrites its part.
            plgpu.barrier_arrive(done)
            plgpu.barrier_wait(done)
            my_k[...] = (dk * scores.scale).astype(q.dtype)
            my_v[...] = dv.astype(q.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(my_k, dk_ref.at[mine])
            plgpu.copy_smem_to_gmem(my_v, dv_ref.at[mine])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == WARPGROUPS)
        def _feed():
            plgpu.set_max_registers(24, action="decrease")
            sources, targets = (q_ref, dout_ref, lse_ref, delta_ref, lo_ref, hi_ref), buffers[2:8]
            heads_of_group = (kv_head * group, group)
            stream_queries(sources, targets, ready, free, heads_of_group, span, row, bounds_row, stream, stages)

    def tile(*shape, dtype=q.dtype):
        return plgpu.SMEM(shape, dtype, transforms=swizzled(shape[-1], dtype))

    floats, ints = (plgpu.SMEM((stages, stream), dtype) for dtype in (jnp.float32, jnp.int32))
    # The interpreter has no adding copy: there each block writes a share of its own, and the shares are added here.
    shares = (keys // rows,) if tiles.staged else ()
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
            plgpu.Barrier(num_arrivals=2 * WARPGROUPS),
            plgpu.Barrier(num_arrivals=6, num_barriers=stages),
            plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
            plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=2),
            plgpu.Barrier(num_arrivals=WARPGROUPS),
        ),
        *(q, k, v, dout, lse, delta, lo, hi, ranges),
        out=(
            jnp.zeros((*shares, *q.shape), jnp.float32),
            jax.lax.empty(k.shape, k.dtype),
            jax.lax.empty(v.shape, v.dtype),
        ),
        grid={"heads": kv_heads, "tiles": keys // rows, "batch": batch},
    )
    dq = dq.sum(0) if tiles.staged else dq
    return (dq * scores.scale).astype(q.dtype), dk, dv
