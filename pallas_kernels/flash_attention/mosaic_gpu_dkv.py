"""The deterministic backward's first kernel for Hopper: the gradients of K and V.

A block owns keys and streams the queries that see them, head by head of the group. Weights are recomputed from the
forward's log-sum-exp (FlashAttention-2, arXiv 2307.08691, algorithm 2): p = exp2(scores - lse) and, with
delta = sum(out * dout), ds = p * (dout @ v.T - delta). Each output is written once by the block that owns it, so that
the result is the same in every run, as that of `mosaic_gpu_dq` is; `mosaic_gpu_fused` needs five products for their
seven.
"""

import dataclasses

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels._hopper import WARPGROUPS, drain, launch, swizzled
from pallas_kernels.flash_attention.bounds import query_tiles
from pallas_kernels.flash_attention.mosaic_gpu_tiles import (
    Scores,
    add,
    anew,
    by_column,
    two_products,
    visit,
    weights_by_key,
)


@dataclasses.dataclass(frozen=True)
class DkvTiles:
    """Tile sizes and schedule.

    Attributes:
        own: keys that a compute warpgroup owns.
        stream: queries of a slot.
        stages: slots of the ring.
        staged: whether products go through shared memory, which is what the interpreter can run.
    """

    own: int = 64
    stream: int = 64
    stages: int = 2
    staged: bool = False


def stream_queries(
    sources, targets, ready, free, heads, span, row, bounds_row, stream: int, stages: int, vain: int = 0
) -> None:
    """What feeds a block that owns keys: the tiles of queries that see them, head by head of their group.

    Args:
        sources: q, dout, lse, delta, lo, hi in device memory.
        targets: their rings in shared memory.
        ready: barriers of slots that are filled.
        free: barriers of slots that are used up.
        heads: (first head, how many).
        span: tiles of queries, see bounds.query_tiles.
        row: of the batch.
        bounds_row: of lo and hi.
        stream: queries of a slot.
        stages: slots.
        vain: tiles more, of whatever queries, for a kernel that multiplies ahead.
    """
    q, dout, lse, delta, lo, hi = sources
    begin, visits = span[0], span[3] - span[0]
    steps = heads[1] * visits + vain

    def load(turn, _):
        slot = lax.rem(turn, jnp.int32(stages))
        head, index = lax.div(turn, visits), begin + lax.rem(turn, visits)
        if vain:  # they may lie past the last head or tile, or be of a block without any
            head = jnp.minimum(lax.div(turn, jnp.maximum(visits, 1)), heads[1] - 1)
            index = jnp.minimum(begin + lax.rem(turn, jnp.maximum(visits, 1)), q.shape[1] // stream - 1)
        head, at = heads[0] + head, pl.ds(index * stream, stream)
        pl.when(turn >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))
        parts = (q.at[row, at, head], dout.at[row, at, head], lse.at[row, head, at], delta.at[row, head, at])
        for source, target in zip((*parts, lo.at[bounds_row, at], hi.at[bounds_row, at]), targets, strict=True):
            plgpu.copy_gmem_to_smem(source, target.at[slot], ready.at[slot])

    lax.fori_loop(0, steps, load, None)
    drain(steps, stages, free)


def backward_dkv(q, k, v, dout, lse, delta, lo, hi, *, scores: Scores, tiles: DkvTiles):
    """Gradients of keys and values, summed over the query heads that share them.

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
        (dk, dv), as k.
    """
    batch, tokens, heads, width = q.shape
    keys, kv_heads = k.shape[1], k.shape[2]
    group = heads // kv_heads
    own, stream, stages = tiles.own, tiles.stream, tiles.stages
    rows, shape = WARPGROUPS * own, (own, stream)
    if tokens % stream or keys % rows:
        raise ValueError(f"T={tokens} must be a multiple of {stream} and S={keys} of {rows}; pad them")
    ranges = query_tiles(lo, hi, keys, stream, rows)
    shared = 0 if lo.shape[0] == 1 else 1

    def kernel(refs, scratch):
        q_ref, k_ref, v_ref, dout_ref, lse_ref, delta_ref, lo_ref, hi_ref, ranges_ref, dk_ref, dv_ref = refs
        buffers, own_ready, ready, free = scratch
        k_smem, v_smem, q_smem, dout_smem, lse_smem, delta_smem, lo_smem, hi_smem, staging2 = buffers
        kv_head, k_tile, row = lax.axis_index("heads"), lax.axis_index("tiles"), lax.axis_index("batch")
        warpgroup = lax.axis_index("warpgroup")
        bounds_row = row * shared
        span = tuple(ranges_ref[bounds_row, k_tile, i] for i in range(4))
        begin, visits = span[0], span[3] - span[0]

        @pl.when(warpgroup < WARPGROUPS)
        def _compute():
            plgpu.set_max_registers(232, action="increase")
            base = k_tile * rows + warpgroup * own
            mine = (row, pl.ds(base, own), kv_head)
            my_k, my_v = k_smem.at[warpgroup], v_smem.at[warpgroup]
            plgpu.copy_gmem_to_smem(k_ref.at[mine], my_k, own_ready)
            plgpu.copy_gmem_to_smem(v_ref.at[mine], my_v, own_ready)
            plgpu.barrier_wait(own_ready)
            staging = None if staging2 is None else staging2.at[warpgroup]

            def step(turn, masked: bool, dk_ref, dv_ref):
                slot = lax.rem(turn, jnp.int32(stages))
                part = anew(warpgroup)
                my_k, my_v = k_smem.at[part], v_smem.at[part]
                plgpu.barrier_wait(ready.at[slot])
                score, dweight = two_products(
                    (my_k, q_smem.at[slot].transpose((1, 0))), (my_v, dout_smem.at[slot].transpose((1, 0))), shape
                )
                bounds = (lo_smem.at[slot], hi_smem.at[slot]) if masked else None
                weight, slope = weights_by_key(scores, score, lse_smem.at[slot], bounds, base)
                dscore = slope * (dweight - by_column(delta_smem.at[slot], shape))
                add(dv_ref, weight.astype(q.dtype), dout_smem.at[slot], staging)
                add(dk_ref, dscore.astype(q.dtype), q_smem.at[slot], staging)
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(free.at[slot])

            def all_heads(dk_ref, dv_ref):
                def one_head(head, _):
                    def one(index, _, masked):
                        step(head * visits + index - begin, masked, dk_ref, dv_ref)

                    visit(span, one, None)

                lax.fori_loop(0, group, one_head, None)
                return dk_ref[...], dv_ref[...]

            sums = plgpu.ACC((own, width), jnp.float32)
            dk, dv = pl.run_scoped(all_heads, sums, sums)
            my_k[...] = (dk * scores.scale).astype(q.dtype)  # nobody else reads these tiles
            my_v[...] = dv.astype(q.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(my_k, dk_ref.at[mine])
            plgpu.copy_smem_to_gmem(my_v, dv_ref.at[mine])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == WARPGROUPS)
        def _feed():
            plgpu.set_max_registers(40, action="decrease")
            sources, targets = (q_ref, dout_ref, lse_ref, delta_ref, lo_ref, hi_ref), buffers[2:8]
            heads_of_group = (kv_head * group, group)
            stream_queries(sources, targets, ready, free, heads_of_group, span, row, bounds_row, stream, stages)

    def tile(*shape):
        return plgpu.SMEM(shape, q.dtype, transforms=swizzled(shape[-1]))

    floats, ints = (plgpu.SMEM((stages, stream), dtype) for dtype in (jnp.float32, jnp.int32))
    return launch(
        kernel,
        (
            (
                *(tile(WARPGROUPS, own, width),) * 2,
                *(tile(stages, stream, width),) * 2,
                *(floats, floats, ints, ints),
                tile(WARPGROUPS, own, stream) if tiles.staged else None,
            ),
            plgpu.Barrier(num_arrivals=2 * WARPGROUPS),
            plgpu.Barrier(num_arrivals=6, num_barriers=stages),
            plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
        ),
        *(q, k, v, dout, lse, delta, lo, hi, ranges),
        out_type=[k, v],
        grid={"heads": kv_heads, "tiles": keys // rows, "batch": batch},
    )
