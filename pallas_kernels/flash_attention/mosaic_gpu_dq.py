"""The deterministic backward's second kernel for Hopper: the gradient of Q, from weights formed a second time.

A block owns queries and streams the keys that they see; the formulas are those of `mosaic_gpu_dkv`.
"""

import dataclasses

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels._hopper import WARPGROUPS, drain, launch, swizzled
from pallas_kernels.flash_attention.bounds import key_tiles
from pallas_kernels.flash_attention.mosaic_gpu_tiles import (
    Order,
    Scores,
    add,
    anew,
    by_row,
    index_along,
    two_products,
    visit,
)


@dataclasses.dataclass(frozen=True)
class DqTiles:
    """Tile sizes.

    Attributes:
        own: queries that a compute warpgroup owns.
        stream: keys of a slot.
        stages: slots of the ring.
        staged: whether products go through shared memory, which is what the interpreter can run.
    """

    own: int = 64
    stream: int = 64
    stages: int = 2
    staged: bool = False


def backward_dq(q, k, v, dout, lse, delta, lo, hi, *, scores: Scores, tiles: DqTiles):
    """Gradient of queries.

    Args:
        q: (B, T, N, H), T a multiple of 2 * tiles.own.
        k: (B, S, K, H), S a multiple of tiles.stream.
        v: as k.
        dout: as q.
        lse: (B, N, T) f32, from the forward.
        delta: (B, N, T) f32.
        lo: (B or 1, T) int32, first key of each query.
        hi: last key.
        scores: from products to scores.
        tiles: sizes; the block owns queries and streams keys.

    Returns:
        dq, as q.
    """
    batch, tokens, heads, width = q.shape
    keys, kv_heads = k.shape[1], k.shape[2]
    own, stream, stages = tiles.own, tiles.stream, tiles.stages
    rows, shape = WARPGROUPS * own, (own, stream)
    if tokens % rows or keys % stream:
        raise ValueError(f"T={tokens} must be a multiple of {rows} and S={keys} of {stream}; pad them")
    ranges = key_tiles(lo, hi, rows, stream)
    shared = 0 if lo.shape[0] == 1 else 1
    order = Order.of(heads, kv_heads, tokens // rows, batch, rows)

    def kernel(refs, scratch):
        q_ref, k_ref, v_ref, dout_ref, lse_ref, delta_ref, lo_ref, hi_ref, ranges_ref, dq_ref = refs
        buffers, own_ready, ready, free = scratch
        q_smem, dout_smem, k_smem, v_smem, lse_smem, delta_smem, lo_smem, hi_smem, staging2 = buffers
        head, tile, row = order.place()
        q_tile = tokens // rows - 1 - tile  # causal rows: the longest work first
        warpgroup = lax.axis_index("warpgroup")
        kv_head = lax.div(head, jnp.int32(heads // kv_heads))
        bounds_row = row * shared
        span = tuple(ranges_ref[bounds_row, q_tile, i] for i in range(4))
        begin, end = span[0], span[3]

        @pl.when(warpgroup < WARPGROUPS)
        def _compute():
            plgpu.set_max_registers(232, action="increase")
            mine = pl.ds(q_tile * rows + warpgroup * own, own)
            for source, target in (
                (q_ref.at[row, mine, head], q_smem),
                (dout_ref.at[row, mine, head], dout_smem),
                (lse_ref.at[row, head, mine], lse_smem),
                (delta_ref.at[row, head, mine], delta_smem),
                (lo_ref.at[bounds_row, mine], lo_smem),
                (hi_ref.at[bounds_row, mine], hi_smem),
            ):
                plgpu.copy_gmem_to_smem(source, target.at[warpgroup], own_ready.at[warpgroup])
            plgpu.barrier_wait(own_ready.at[warpgroup])
            staging = None if staging2 is None else staging2.at[warpgroup]
            lse_q, delta_q, lo_q, hi_q = (
                by_row(smem.at[warpgroup], shape) for smem in (lse_smem, delta_smem, lo_smem, hi_smem)
            )

            def step(index, masked: bool, dq_acc):
                slot = lax.rem(index - begin, jnp.int32(stages))
                mine = anew(warpgroup)
                my_q, my_dout = q_smem.at[mine], dout_smem.at[mine]
                plgpu.barrier_wait(ready.at[slot])
                score, dweight = two_products(
                    (my_q, k_smem.at[slot].transpose((1, 0))), (my_dout, v_smem.at[slot].transpose((1, 0))), shape
                )
                score = scores.squash(score)
                weight = jnp.exp2(score * scores.factor - lse_q)
                if masked:
                    key = index_along(1, index * stream, shape)
                    weight = jnp.where((key >= lo_q) & (key <= hi_q), weight, 0.0)
                dscore = (scores.chain(weight, score) * (dweight - delta_q)).astype(q.dtype)
                add(dq_acc, dscore, k_smem.at[slot], staging)
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(free.at[slot])

            def all_tiles(dq_acc):
                visit(span, lambda index, _, masked: step(index, masked, dq_acc), None)
                return dq_acc[...]

            dq = pl.run_scoped(all_tiles, plgpu.ACC((own, width), jnp.float32))
            my_q = q_smem.at[warpgroup]
            my_q[...] = (dq * scores.scale).astype(q.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(my_q, dq_ref.at[row, mine, head])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == WARPGROUPS)
        def _feed():
            plgpu.set_max_registers(40, action="decrease")

            def load(index, _):
                turn = index - begin
                slot = lax.rem(turn, jnp.int32(stages))
                at = (row, pl.ds(index * stream, stream), kv_head)
                pl.when(turn >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))
                plgpu.copy_gmem_to_smem(k_ref.at[at], k_smem.at[slot], ready.at[slot])
                plgpu.copy_gmem_to_smem(v_ref.at[at], v_smem.at[slot], ready.at[slot])

            lax.fori_loop(begin, end, load, None)
            drain(end - begin, stages, free)

    def tile(*shape):
        return plgpu.SMEM(shape, q.dtype, transforms=swizzled(shape[-1]))

    floats, ints = (plgpu.SMEM((WARPGROUPS, own), dtype) for dtype in (jnp.float32, jnp.int32))
    return launch(
        kernel,
        (
            (
                *(tile(WARPGROUPS, own, width),) * 2,
                *(tile(stages, stream, width),) * 2,
                *(floats, floats, ints, ints),
                tile(WARPGROUPS, own, stream) if tiles.staged else None,
            ),
            plgpu.Barrier(num_arrivals=6, num_barriers=WARPGROUPS),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
        ),
        *(q, k, v, dout, lse, delta, lo, hi, ranges),
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=order.grid,
    )
