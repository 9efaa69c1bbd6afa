"""The deterministic backward's first kernel for Hopper, of wide heads: one warpgroup makes dV and the other dK.

A block owns 64 keys, whose two sums are 256 columns wide: each fills one warpgroup's registers. Halves of both in each
would need all weights and their gradients in both warpgroups: six products where four do. Here the first warpgroup
multiplies K and Q, exponentiates and adds to dV; what turns dP into dS crosses to the second through shared memory in
f32; the second multiplies V and dO and adds to dK. Neither waits for the other's products, so that the tensor cores
have one's while the other computes. Each begins its next tile's product behind the sum's.
"""

import dataclasses
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels._hopper import WARPGROUPS, filled, launch, swizzled
from pallas_kernels.flash_attention.bounds import query_tiles
from pallas_kernels.flash_attention.mosaic_gpu_dkv import stream_queries
from pallas_kernels.flash_attention.mosaic_gpu_tiles import Scores, add, by_column, visit, weights_by_key


@dataclasses.dataclass(frozen=True)
class WideTiles:
    """Tile sizes and schedule.

    Attributes:
        own: keys that a block owns.
        stream: queries of a slot.
        stages: slots of the ring.
        staged: whether products go through shared memory, which is what the interpreter can run.
    """

    own: int = 64
    stream: int = 64
    stages: int = 2
    staged: bool = False


def backward_dkv_wide(q, k, v, dout, lse, delta, lo, hi, *, scores: Scores, tiles: WideTiles):
    """As `mosaic_gpu_dkv.backward_dkv`, for S a multiple of tiles.own."""
    batch, tokens, heads, width = q.shape
    keys, kv_heads = k.shape[1], k.shape[2]
    group = heads // kv_heads
    own, stream, stages = tiles.own, tiles.stream, tiles.stages
    shape = (own, stream)
    if tokens % stream or keys % own:
        raise ValueError(f"T={tokens} must be a multiple of {stream} and S={keys} of {own}; pad them")
    ranges = query_tiles(lo, hi, keys, stream, own)
    shared = 0 if lo.shape[0] == 1 else 1

    def kernel(refs, scratch):
        q_ref, k_ref, v_ref, dout_ref, lse_ref, delta_ref, lo_ref, hi_ref, ranges_ref, dk_ref, dv_ref = refs
        buffers, own_ready, ready, free, (slope_ready, slope_free) = scratch
        k_smem, v_smem, q_smem, dout_smem, floats_smem, bounds_smem, slope_smem, staging2 = buffers
        (lse_smem, delta_smem), (lo_smem, hi_smem) = ((smem.at[0], smem.at[1]) for smem in (floats_smem, bounds_smem))
        kv_head, k_tile, row = lax.axis_index("heads"), lax.axis_index("tiles"), lax.axis_index("batch")
        warpgroup = lax.axis_index("warpgroup")
        bounds_row = row * shared
        span = tuple(ranges_ref[bounds_row, k_tile, i] for i in range(4))
        begin, visits = span[0], span[3] - span[0]
        steps = group * visits  # after them, one tile more is loaded and multiplied in vain: no step is special
        mine = (row, pl.ds(k_tile * own, own), kv_head)
        accumulator = plgpu.ACC(shape, jnp.float32)

        def owner(part: int, own_ref, own_smem, left_smem, right_smem, sum_of, out_ref, factor: float):
            """One warpgroup's work.

            Args:
                part: which of the two.
                own_ref: K or V in device memory.
                own_smem: its tile's place.
                left_smem: the ring of what it is multiplied with.
                right_smem: the ring of what the sum's products have on their right.
                sum_of: from (turn, slot, masked, product) to their left side.
                out_ref: where the sum goes.
                factor: of the sum.
            """
            plgpu.copy_gmem_to_smem(own_ref.at[mine], own_smem, own_ready.at[part])
            staging = staging2.at[part] if tiles.staged else None

            def multiply(ref, slot):
                plgpu.wgmma(ref, own_smem, left_smem.at[slot].transpose((1, 0)))

            def run(sum_acc, ahead: Any = None):
                def begin_product(turn):
                    """Begins the turn's first product; staged, only waits for its tiles."""
                    slot = lax.rem(turn, jnp.int32(stages))
                    plgpu.barrier_wait(ready.at[slot])
                    if not tiles.staged:
                        multiply(ahead, slot)

                def step(turn, masked: bool):
                    slot = lax.rem(turn, jnp.int32(stages))
                    if tiles.staged:

                        def first(ref):
                            multiply(ref, slot)
                            return ref[...]

                        product = pl.run_scoped(first, accumulator)
                    else:
                        product = plgpu.wgmma_accumulator_load(ahead)
                    add(sum_acc, sum_of(turn, slot, masked, product).astype(q.dtype), right_smem.at[slot], staging)
                    if not tiles.staged:
                        ahead[...] = filled(shape, 0.0)
                    begin_product(turn + 1)
                    plgpu.wgmma_wait(0 if tiles.staged else 1)  # the sum's
                    plgpu.barrier_arrive(free.at[slot])

                def one_head(head, _):
                    visit(span, lambda index, _, masked: step(head * visits + index - begin, masked), None)

                plgpu.barrier_wait(own_ready.at[part])
                begin_product(jnp.int32(0))
                lax.fori_loop(0, group, one_head, None)
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(free.at[lax.rem(steps, jnp.int32(stages))])
                return sum_acc[...]

            sums = plgpu.ACC((own, width), jnp.float32), *(() if tiles.staged else (accumulator,))
            own_smem[...] = (pl.run_scoped(run, *sums) * factor).astype(q.dtype)  # nobody else reads this tile
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(own_smem, out_ref.at[mine])
            plgpu.wait_smem_to_gmem(0)

        def weight_of(turn, slot, masked, product):
            bounds = (lo_smem.at[slot], hi_smem.at[slot]) if masked else None
            weight, slope = weights_by_key(scores, product, lse_smem.at[slot], bounds, k_tile * own)
            pl.when(turn > 0)(lambda: plgpu.barrier_wait(slope_free))
            slope_smem[...] = slope
            plgpu.commit_smem()
            plgpu.barrier_arrive(slope_ready)
            return weight

        def dscore_of(turn, slot, masked, product):
            del turn, masked  # the slope of what is not seen is 0
            product -= by_column(delta_smem.at[slot], shape)
            plgpu.barrier_wait(slope_ready)
            slope = plgpu.load(slope_smem, layout=plgpu.Layout.WGMMA)
            plgpu.barrier_arrive(slope_free)
            return slope * product

        @pl.when(warpgroup == 0)
        def _values():
            plgpu.set_max_registers(240, action="increase")
            owner(0, k_ref, k_smem, q_smem, dout_smem, weight_of, dv_ref, 1.0)
            pl.when(steps > 0)(lambda: plgpu.barrier_wait(slope_free))

        @pl.when(warpgroup == 1)
        def _keys():
            plgpu.set_max_registers(240, action="increase")
            owner(1, v_ref, v_smem, dout_smem, q_smem, dscore_of, dk_ref, scores.scale)

        @pl.when(warpgroup == WARPGROUPS)
        def _feed():
            plgpu.set_max_registers(24, action="decrease")
            sources = q_ref, dout_ref, lse_ref, delta_ref, lo_ref, hi_ref
            targets = q_smem, dout_smem, lse_smem, delta_smem, lo_smem, hi_smem
            heads_of_group = (kv_head * group, group)
            stream_queries(sources, targets, ready, free, heads_of_group, span, row, bounds_row, stream, stages, vain=1)

    def tile(*shape, dtype=q.dtype):
        return plgpu.SMEM(shape, dtype, transforms=swizzled(shape[-1], dtype))

    return launch(
        kernel,
        (
            (
                *(tile(own, width),) * 2,
                *(tile(stages, stream, width),) * 2,
                *(plgpu.SMEM((2, stages, stream), dtype) for dtype in (jnp.float32, jnp.int32)),
                tile(own, stream, dtype=jnp.float32),
                tile(WARPGROUPS, own, stream) if tiles.staged else None,
            ),
            plgpu.Barrier(num_barriers=WARPGROUPS),
            plgpu.Barrier(num_arrivals=6, num_barriers=stages),
            plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
            (plgpu.Barrier(),) * 2,
        ),
        *(q, k, v, dout, lse, delta, lo, hi, ranges),
        out_type=[k, v],
        grid={"heads": kv_heads, "tiles": keys // own, "batch": batch},
        reduction_bytes=0,
    )
