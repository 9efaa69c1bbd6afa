"""The deterministic backward's second kernel for Hopper, with rings of their own for keys and values.

As `mosaic_gpu_dq`. Values are used up a product earlier than keys, so that one slot of them serves where two of keys
are needed: at a width of 256 there is room for no more, and with one slot of both the tensor cores wait for loads. What
the queries' rows need is read again in every step, or registers spill.
"""

import dataclasses

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels._hopper import WARPGROUPS, drain, launch, swizzled
from pallas_kernels.flash_attention.bounds import key_tiles
from pallas_kernels.flash_attention.mosaic_gpu_tiles import Scores, add, anew, by_row, index_along, visit


@dataclasses.dataclass(frozen=True)
class RingTiles:
    """Tile sizes.

    Attributes:
        own: queries that a compute warpgroup owns.
        stream: keys of a slot.
        stages: slots of the ring of keys.
        values: slots of the ring of values.
        staged: whether products go through shared memory, which is what the interpreter can run.
    """

    own: int = 64
    stream: int = 64
    stages: int = 2
    values: int = 1
    staged: bool = False


def backward_dq_rings(q, k, v, dout, lse, delta, lo, hi, *, scores: Scores, tiles: RingTiles):
    """As `mosaic_gpu_dq.backward_dq`."""
    batch, tokens, heads, width = q.shape
    keys, kv_heads = k.shape[1], k.shape[2]
    own, stream, stages, values = tiles.own, tiles.stream, tiles.stages, tiles.values
    rows, shape = WARPGROUPS * own, (own, stream)
    if tokens % rows or keys % stream:
        raise ValueError(f"T={tokens} must be a multiple of {rows} and S={keys} of {stream}; pad them")
    ranges = key_tiles(lo, hi, rows, stream)
    shared = 0 if lo.shape[0] == 1 else 1

    def kernel(refs, scratch):
        q_ref, k_ref, v_ref, dout_ref, lse_ref, delta_ref, lo_ref, hi_ref, ranges_ref, dq_ref = refs
        buffers, own_ready, (k_ready, v_ready), (k_free, v_free) = scratch
        q_smem, dout_smem, k_smem, v_smem, floats_smem, bounds_smem, staging2 = buffers
        (lse_smem, delta_smem), (lo_smem, hi_smem) = ((smem.at[0], smem.at[1]) for smem in (floats_smem, bounds_smem))
        head, row = lax.axis_index("heads"), lax.axis_index("batch")
        q_tile = tokens // rows - 1 - lax.axis_index("tiles")  # causal rows: the longest work first
        warpgroup = lax.axis_index("warpgroup")
        kv_head = lax.div(head, jnp.int32(heads // kv_heads))
        bounds_row = row * shared
        span = tuple(ranges_ref[bounds_row, q_tile, i] for i in range(4))
        begin, end = span[0], span[3]
        accumulator = plgpu.ACC(shape, jnp.float32)

        def slot_of(index, slots: int):
            return lax.rem(index - begin, jnp.int32(slots))

        def compute(dq_acc):
            staging = staging2.at[warpgroup] if tiles.staged else None

            def step(index, masked: bool):
                slot, v_slot, mine = slot_of(index, stages), slot_of(index, values), anew(warpgroup)

                def weigh(score_ref, dweight_ref):
                    plgpu.barrier_wait(k_ready.at[slot])
                    plgpu.wgmma(score_ref, q_smem.at[mine], k_smem.at[slot].transpose((1, 0)))
                    plgpu.barrier_wait(v_ready.at[v_slot])
                    plgpu.wgmma(dweight_ref, dout_smem.at[mine], v_smem.at[v_slot].transpose((1, 0)))
                    product = plgpu.wgmma_accumulator_load(score_ref, wait_n=1)
                    score = scores.squash(product)
                    weight = jnp.exp2(score * scores.factor - by_row(lse_smem.at[mine], shape))
                    if masked:
                        key = index_along(1, index * stream, shape)
                        first, last = (by_row(smem.at[mine], shape) for smem in (lo_smem, hi_smem))
                        weight = jnp.where((key >= first) & (key <= last), weight, 0.0)
                    slope = scores.chain(weight, score)
                    dweight = plgpu.wgmma_accumulator_load(dweight_ref)
                    plgpu.barrier_arrive(v_free.at[v_slot])
                    return (slope * (dweight - by_row(delta_smem.at[mine], shape))).astype(q.dtype)

                dscore = pl.run_scoped(weigh, accumulator, accumulator)
                add(dq_acc, dscore, k_smem.at[slot], staging)
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(k_free.at[slot])

            plgpu.barrier_wait(own_ready.at[warpgroup])
            visit(span, lambda index, _, masked: step(index, masked), None)
            return dq_acc[...]

        @pl.when(warpgroup < WARPGROUPS)
        def _compute():
            plgpu.set_max_registers(240, action="increase")
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
            dq = pl.run_scoped(compute, plgpu.ACC((own, width), jnp.float32))
            my_q = q_smem.at[warpgroup]
            my_q[...] = (dq * scores.scale).astype(q.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(my_q, dq_ref.at[row, mine, head])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == WARPGROUPS)
        def _feed():
            plgpu.set_max_registers(24, action="decrease")

            def load(index, ref, smem, ready, free, slots: int):
                slot, at = slot_of(index, slots), index * stream
                pl.when(index - begin >= slots)(lambda: plgpu.barrier_wait(free.at[slot]))
                plgpu.copy_gmem_to_smem(ref.at[row, pl.ds(at, stream), kv_head], smem.at[slot], ready.at[slot])

            def load_both(index, _):
                load(index, k_ref, k_smem, k_ready, k_free, stages)
                load(index, v_ref, v_smem, v_ready, v_free, values)

            lax.fori_loop(begin, end, load_both, None)
            drain(end - begin, stages, k_free)
            drain(end - begin, values, v_free)

    def tile(*shape):
        return plgpu.SMEM(shape, q.dtype, transforms=swizzled(shape[-1]))

    rings = (stages, values)
    return launch(
        kernel,
        (
            (
                *(tile(WARPGROUPS, own, width),) * 2,
                *(tile(slots, stream, width) for slots in rings),
                *(plgpu.SMEM((2, WARPGROUPS, own), dtype) for dtype in (jnp.float32, jnp.int32)),
                tile(WARPGROUPS, own, stream) if tiles.staged else None,
            ),
            plgpu.Barrier(num_arrivals=6, num_barriers=WARPGROUPS),
            tuple(plgpu.Barrier(num_barriers=slots) for slots in rings),
            tuple(plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=slots) for slots in rings),
        ),
        *(q, k, v, dout, lse, delta, lo, hi, ranges),
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid={"heads": heads, "tiles": tokens // rows, "batch": batch},
        reduction_bytes=0,
    )
