"""The backward kernels for Hopper: dK and dV over tiles of queries, dQ over tiles of keys.

Both recompute the weights from the saved base-2 logarithm of the sum of exponentials (FlashAttention-2, arXiv
2307.08691, section 3.1): with p = exp2(s - lse) and delta = sum(out * dout), ds = p * (dout @ v.T - delta). Each output
is written once by the block that owns it, so that the result is the same in every run.
"""

import dataclasses
import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.flash_attention.bounds import key_tiles, query_tiles
from pallas_kernels.flash_attention.mosaic_gpu_forward import LOG2E, drain, multiply_add, swizzled


@dataclasses.dataclass(frozen=True)
class BackwardTiles:
    """Tile sizes and schedule of one backward kernel.

    Attributes:
        own: rows of the output that a compute warpgroup owns.
        stream: rows of a slot of the ring that is streamed past it.
        warpgroups: that compute.
        stages: slots of the ring.
        staged: whether products go through shared memory, which is what the interpreter can run.
    """

    own: int = 64
    stream: int = 64
    warpgroups: int = 2
    stages: int = 2
    staged: bool = False


def _product(a, b, shape):
    """`a @ b` of two shared-memory tiles."""

    def multiply(ref):
        plgpu.wgmma(ref, a, b)
        return ref[...]

    return pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))


def _zeros(shape):
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)


def backward_dkv(q, k, v, dout, lse, delta, lo, hi, *, scale: float, tiles: BackwardTiles):
    """Gradients of keys and values, summed over the query heads that share them.

    Args:
        q: (B, T, N, H), T a multiple of tiles.stream.
        k: (B, S, K, H), S a multiple of tiles.warpgroups * tiles.own.
        v: as k.
        dout: as q.
        lse: (B, N, T) f32, from the forward.
        delta: (B, N, T) f32.
        lo: (B or 1, T) int32, first key of each query.
        hi: last key.
        scale: factor on the scores.
        tiles: sizes; the block owns keys and streams queries.

    Returns:
        (dk, dv), as k.
    """
    batch, tokens, heads, width = q.shape
    keys, kv_heads = k.shape[1], k.shape[2]
    group = heads // kv_heads
    own, stream, warpgroups, stages = tiles.own, tiles.stream, tiles.warpgroups, tiles.stages
    rows = warpgroups * own
    if tokens % stream or keys % rows:
        raise ValueError(f"T={tokens} must be a multiple of {stream} and S={keys} of {rows}; pad them")
    ranges = query_tiles(lo, hi, keys, stream, rows)
    shared = 0 if lo.shape[0] == 1 else 1
    transforms = swizzled(width)

    def kernel(refs, scratch):
        q_ref, k_ref, v_ref, dout_ref, lse_ref, delta_ref, lo_ref, hi_ref, ranges_ref, dk_ref, dv_ref = refs
        buffers, own_ready, (q_ready, dout_ready), (q_free, dout_free) = scratch
        k_smem, v_smem, q_smem, dout_smem, lse_smem, delta_smem, lo_smem, hi_smem, staging2 = buffers
        kv_head, k_tile, row = lax.axis_index("heads"), lax.axis_index("k_tiles"), lax.axis_index("batch")
        warpgroup = lax.axis_index("warpgroup")
        bounds_row = row * shared
        begin, clear_begin, clear_end, end = (ranges_ref[bounds_row, k_tile, i] for i in range(4))
        visits = end - begin

        @pl.when(warpgroup < warpgroups)
        def _compute():
            plgpu.set_max_registers(232, action="increase")
            base = k_tile * rows + warpgroup * own
            mine = (row, pl.ds(base, own), kv_head)
            plgpu.copy_gmem_to_smem(k_ref.at[mine], k_smem.at[warpgroup], own_ready.at[warpgroup])
            plgpu.copy_gmem_to_smem(v_ref.at[mine], v_smem.at[warpgroup], own_ready.at[warpgroup])
            plgpu.barrier_wait(own_ready.at[warpgroup])
            my_k, my_v = k_smem.at[warpgroup], v_smem.at[warpgroup]
            staging = None if staging2 is None else staging2.at[warpgroup]

            def step(index, carry, masked: bool, head: int):
                dk, dv = carry
                slot = lax.rem(head * visits + index - begin, jnp.int32(stages))
                by_column = plgpu.Layout.WGMMA.reduce(0)

                def column(smem):
                    return lax.broadcast_in_dim(plgpu.load(smem.at[slot], layout=by_column), (own, stream), [1])

                plgpu.barrier_wait(q_ready.at[slot])
                score = _product(my_k, q_smem.at[slot].transpose((1, 0)), (own, stream))
                weight = jnp.exp2(score * (scale * LOG2E) - column(lse_smem))
                if masked:
                    key = plgpu.broadcasted_iota(jnp.int32, (own, stream), 0, layout=plgpu.Layout.WGMMA) + base
                    weight = jnp.where((key >= column(lo_smem)) & (key <= column(hi_smem)), weight, 0.0)
                plgpu.barrier_wait(dout_ready.at[slot])
                dv = multiply_add(dv, weight.astype(q.dtype), dout_smem.at[slot], staging)
                dweight = _product(my_v, dout_smem.at[slot].transpose((1, 0)), (own, stream))
                dscore = weight * (dweight - column(delta_smem))
                plgpu.barrier_arrive(dout_free.at[slot])
                dk = multiply_add(dk, dscore.astype(q.dtype), q_smem.at[slot], staging)
                plgpu.barrier_arrive(q_free.at[slot])
                return dk, dv

            def one_head(head, carry):
                masked = functools.partial(step, masked=True, head=head)
                carry = lax.fori_loop(begin, clear_begin, masked, carry)
                carry = lax.fori_loop(clear_begin, clear_end, functools.partial(step, masked=False, head=head), carry)
                return lax.fori_loop(clear_end, end, masked, carry)

            dk, dv = lax.fori_loop(0, group, one_head, (_zeros((own, width)), _zeros((own, width))))
            my_k[...] = (dk * scale).astype(q.dtype)
            my_v[...] = dv.astype(q.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(my_k, dk_ref.at[mine])
            plgpu.copy_smem_to_gmem(my_v, dv_ref.at[mine])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == warpgroups)
        def _feed():
            plgpu.set_max_registers(40, action="decrease")

            def load(visit, _):
                slot = lax.rem(visit, jnp.int32(stages))
                head = kv_head * group + lax.div(visit, visits)
                span = pl.ds((begin + lax.rem(visit, visits)) * stream, stream)
                pl.when(visit >= stages)(lambda: plgpu.barrier_wait(q_free.at[slot]))
                plgpu.copy_gmem_to_smem(q_ref.at[row, span, head], q_smem.at[slot], q_ready.at[slot])
                plgpu.copy_gmem_to_smem(lse_ref.at[row, head, span], lse_smem.at[slot], q_ready.at[slot])
                plgpu.copy_gmem_to_smem(lo_ref.at[bounds_row, span], lo_smem.at[slot], q_ready.at[slot])
                plgpu.copy_gmem_to_smem(hi_ref.at[bounds_row, span], hi_smem.at[slot], q_ready.at[slot])
                plgpu.copy_gmem_to_smem(delta_ref.at[row, head, span], delta_smem.at[slot], q_ready.at[slot])
                pl.when(visit >= stages)(lambda: plgpu.barrier_wait(dout_free.at[slot]))
                plgpu.copy_gmem_to_smem(dout_ref.at[row, span, head], dout_smem.at[slot], dout_ready.at[slot])

            lax.fori_loop(0, group * visits, load, None)
            drain(group * visits, stages, q_free, dout_free)

    def entry(*refs):
        owned = plgpu.SMEM((warpgroups, own, width), q.dtype, transforms=transforms)
        streamed = plgpu.SMEM((stages, stream, width), q.dtype, transforms=transforms)
        staging = plgpu.SMEM((warpgroups, own, stream), q.dtype, transforms=swizzled(stream)) if tiles.staged else None
        floats, ints = (plgpu.SMEM((stages, stream), dtype) for dtype in (jnp.float32, jnp.int32))
        pl.run_scoped(
            lambda *scratch: kernel(refs, scratch),
            (owned, owned, streamed, streamed, floats, floats, ints, ints, staging),
            plgpu.Barrier(num_arrivals=2, num_barriers=warpgroups),
            (plgpu.Barrier(num_arrivals=5, num_barriers=stages), plgpu.Barrier(num_barriers=stages)),
            (plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),) * 2,
            collective_axes="warpgroup",
        )

    return plgpu.kernel(
        entry,
        out_type=[k, v],
        grid=(kv_heads, keys // rows, batch),
        grid_names=("heads", "k_tiles", "batch"),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(q, k, v, dout, lse, delta, lo, hi, ranges)


def backward_dq(q, k, v, dout, lse, delta, lo, hi, *, scale: float, tiles: BackwardTiles):
    """Gradient of queries.

    Args:
        q: (B, T, N, H), T a multiple of tiles.warpgroups * tiles.own.
        k: (B, S, K, H), S a multiple of tiles.stream.
        v: as k.
        dout: as q.
        lse: (B, N, T) f32, from the forward.
        delta: (B, N, T) f32.
        lo: (B or 1, T) int32, first key of each query.
        hi: last key.
        scale: factor on the scores.
        tiles: sizes; the block owns queries and streams keys.

    Returns:
        dq, as q.
    """
    batch, tokens, heads, width = q.shape
    keys, kv_heads = k.shape[1], k.shape[2]
    own, stream, warpgroups, stages = tiles.own, tiles.stream, tiles.warpgroups, tiles.stages
    rows = warpgroups * own
    if tokens % rows or keys % stream:
        raise ValueError(f"T={tokens} must be a multiple of {rows} and S={keys} of {stream}; pad them")
    ranges = key_tiles(lo, hi, rows, stream)
    shared = 0 if lo.shape[0] == 1 else 1
    transforms = swizzled(width)

    def kernel(refs, scratch):
        q_ref, k_ref, v_ref, dout_ref, lse_ref, delta_ref, lo_ref, hi_ref, ranges_ref, dq_ref = refs
        buffers, own_ready, (k_ready, v_ready), (k_free, v_free) = scratch
        q_smem, dout_smem, k_smem, v_smem, lse_smem, delta_smem, lo_smem, hi_smem, staging2 = buffers
        head, q_tile, row = lax.axis_index("heads"), lax.axis_index("q_tiles"), lax.axis_index("batch")
        warpgroup = lax.axis_index("warpgroup")
        kv_head = lax.div(head, jnp.int32(heads // kv_heads))
        bounds_row = row * shared
        begin, clear_begin, clear_end, end = (ranges_ref[bounds_row, q_tile, i] for i in range(4))

        @pl.when(warpgroup < warpgroups)
        def _compute():
            plgpu.set_max_registers(232, action="increase")
            span = pl.ds(q_tile * rows + warpgroup * own, own)
            ready = own_ready.at[warpgroup]
            plgpu.copy_gmem_to_smem(q_ref.at[row, span, head], q_smem.at[warpgroup], ready)
            plgpu.copy_gmem_to_smem(dout_ref.at[row, span, head], dout_smem.at[warpgroup], ready)
            plgpu.copy_gmem_to_smem(lse_ref.at[row, head, span], lse_smem.at[warpgroup], ready)
            plgpu.copy_gmem_to_smem(delta_ref.at[row, head, span], delta_smem.at[warpgroup], ready)
            plgpu.copy_gmem_to_smem(lo_ref.at[bounds_row, span], lo_smem.at[warpgroup], ready)
            plgpu.copy_gmem_to_smem(hi_ref.at[bounds_row, span], hi_smem.at[warpgroup], ready)
            plgpu.barrier_wait(ready)
            my_q, my_dout = q_smem.at[warpgroup], dout_smem.at[warpgroup]
            staging = None if staging2 is None else staging2.at[warpgroup]

            def by_row(smem):
                loaded = plgpu.load(smem.at[warpgroup], layout=plgpu.Layout.WGMMA.reduce(1))
                return lax.broadcast_in_dim(loaded, (own, stream), [0])

            lse_q, delta_q, lo_q, hi_q = (by_row(smem) for smem in (lse_smem, delta_smem, lo_smem, hi_smem))

            def step(index, dq, masked: bool):
                slot = lax.rem(index - begin, jnp.int32(stages))
                plgpu.barrier_wait(k_ready.at[slot])
                score = _product(my_q, k_smem.at[slot].transpose((1, 0)), (own, stream))
                weight = jnp.exp2(score * (scale * LOG2E) - lse_q)
                if masked:
                    key = (
                        plgpu.broadcasted_iota(jnp.int32, (own, stream), 1, layout=plgpu.Layout.WGMMA) + index * stream
                    )
                    weight = jnp.where((key >= lo_q) & (key <= hi_q), weight, 0.0)
                plgpu.barrier_wait(v_ready.at[slot])
                dweight = _product(my_dout, v_smem.at[slot].transpose((1, 0)), (own, stream))
                plgpu.barrier_arrive(v_free.at[slot])
                dscore = weight * (dweight - delta_q)
                dq = multiply_add(dq, dscore.astype(q.dtype), k_smem.at[slot], staging)
                plgpu.barrier_arrive(k_free.at[slot])
                return dq

            masked = functools.partial(step, masked=True)
            dq = lax.fori_loop(begin, clear_begin, masked, _zeros((own, width)))
            dq = lax.fori_loop(clear_begin, clear_end, functools.partial(step, masked=False), dq)
            dq = lax.fori_loop(clear_end, end, masked, dq)
            my_q[...] = (dq * scale).astype(q.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(my_q, dq_ref.at[row, span, head])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == warpgroups)
        def _feed():
            plgpu.set_max_registers(40, action="decrease")

            def load(index, _):
                visit = index - begin
                slot = lax.rem(visit, jnp.int32(stages))
                at = (row, pl.ds(index * stream, stream), kv_head)
                pl.when(visit >= stages)(lambda: plgpu.barrier_wait(k_free.at[slot]))
                plgpu.copy_gmem_to_smem(k_ref.at[at], k_smem.at[slot], k_ready.at[slot])
                pl.when(visit >= stages)(lambda: plgpu.barrier_wait(v_free.at[slot]))
                plgpu.copy_gmem_to_smem(v_ref.at[at], v_smem.at[slot], v_ready.at[slot])

            lax.fori_loop(begin, end, load, None)
            drain(end - begin, stages, k_free, v_free)

    def entry(*refs):
        owned = plgpu.SMEM((warpgroups, own, width), q.dtype, transforms=transforms)
        streamed = plgpu.SMEM((stages, stream, width), q.dtype, transforms=transforms)
        floats, ints = (plgpu.SMEM((warpgroups, own), dtype) for dtype in (jnp.float32, jnp.int32))
        staging = plgpu.SMEM((warpgroups, own, stream), q.dtype, transforms=swizzled(stream)) if tiles.staged else None
        pl.run_scoped(
            lambda *scratch: kernel(refs, scratch),
            (owned, owned, streamed, streamed, floats, floats, ints, ints, staging),
            plgpu.Barrier(num_arrivals=6, num_barriers=warpgroups),
            (plgpu.Barrier(num_barriers=stages),) * 2,
            (plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),) * 2,
            collective_axes="warpgroup",
        )

    return plgpu.kernel(
        entry,
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(heads, tokens // rows, batch),
        grid_names=("heads", "q_tiles", "batch"),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(q, k, v, dout, lse, delta, lo, hi, ranges)
