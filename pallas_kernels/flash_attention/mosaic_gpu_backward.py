"""The deterministic backward kernels for Hopper: one for the gradients of K and V, one for that of Q.

Both recompute the weights from the forward's log-sum-exp (FlashAttention-2, arXiv 2307.08691, algorithm 2):
p = exp2(scores - lse) and, with delta = sum(out * dout), ds = p * (dout @ v.T - delta). Each output is written once by
the block that owns it, so that the result is the same in every run; `mosaic_gpu_fused` needs fewer products.
"""

import dataclasses

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels._hopper import WARPGROUPS, drain, launch, swizzled
from pallas_kernels.flash_attention.bounds import key_tiles, query_tiles
from pallas_kernels.flash_attention.mosaic_gpu_tiles import (
    Scores,
    add,
    anew,
    by_column,
    by_row,
    index_along,
    visit,
)


@dataclasses.dataclass(frozen=True)
class BackwardTiles:
    """Tile sizes and schedule of one backward kernel.

    Attributes:
        own: rows of the output that a compute warpgroup owns.
        stream: rows of a slot of the ring that is streamed past it.
        stages: slots of the ring.
        flight: whether a step's dQ is still being formed when the next step begins.
        split_width: whether the warpgroups own the same rows and half of the columns each, for wide heads (dK and dV).
        staged: whether products go through shared memory, which is what the interpreter can run.
    """

    own: int = 64
    stream: int = 64
    stages: int = 2
    flight: bool = True
    sweep: bool = False
    order: tuple[str, ...] = ("heads", "tiles", "batch")
    split_width: bool = False
    staged: bool = False


def two_products(first, second, shape: tuple[int, int]):
    """`a @ b` of two pairs of shared-memory tiles, in flight together so that they wait once."""

    def multiply(first_ref, second_ref):
        plgpu.wgmma(first_ref, *first)
        plgpu.wgmma(second_ref, *second)
        return first_ref[...], second_ref[...]

    return pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32), plgpu.ACC(shape, jnp.float32))


def weights_by_key(scores: Scores, product, lse, bounds, first_key):
    """Weights of a tile of keys by queries, and what turns their gradient into that of `scale * product`.

    Args:
        scores: from products to scores.
        product: of keys and queries.
        lse: of the tile's queries, in shared memory.
        bounds: their first and last keys, in shared memory; None where every query sees the whole tile.
        first_key: of the tile.
    """
    score, shape = scores.squash(product), product.shape
    weight = jnp.exp2(score * scores.factor - by_column(lse, shape))
    if bounds is not None:
        key = index_along(0, first_key, shape)
        seen = (key >= by_column(bounds[0], shape)) & (key <= by_column(bounds[1], shape))
        weight = jnp.where(seen, weight, 0.0)
    return weight, scores.chain(weight, score)


def stream_queries(
    sources, targets, ready, free, heads, span, row, bounds_row, stream: int, stages: int, sweep: bool
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
    """
    q, dout, lse, delta, lo, hi = sources
    begin, visits = span[0], span[3] - span[0]

    def load(turn, _):
        slot = lax.rem(turn, jnp.int32(stages))
        if sweep:
            head = heads[0] + lax.rem(turn, jnp.int32(heads[1]))
            at = pl.ds((span[3] - 1 - lax.div(turn, jnp.int32(heads[1]))) * stream, stream)
        else:
            head = heads[0] + lax.div(turn, visits)
            at = pl.ds((begin + lax.rem(turn, visits)) * stream, stream)
        pl.when(turn >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))
        parts = (q.at[row, at, head], dout.at[row, at, head], lse.at[row, head, at], delta.at[row, head, at])
        for source, target in zip((*parts, lo.at[bounds_row, at], hi.at[bounds_row, at]), targets, strict=True):
            plgpu.copy_gmem_to_smem(source, target.at[slot], ready.at[slot])

    lax.fori_loop(0, heads[1] * visits, load, None)
    drain(heads[1] * visits, stages, free)


def backward_dkv(q, k, v, dout, lse, delta, lo, hi, *, scores: Scores, tiles: BackwardTiles):
    """Gradients of keys and values, summed over the query heads that share them.

    Args:
        q: (B, T, N, H), T a multiple of tiles.stream.
        k: (B, S, K, H), S a multiple of what a block owns: tiles.own, or twice that without split_width.
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
    owned, columns = (1, width // WARPGROUPS) if tiles.split_width else (WARPGROUPS, width)
    rows, shape = owned * own, (own, stream)
    if tokens % stream or keys % rows:
        raise ValueError(f"T={tokens} must be a multiple of {stream} and S={keys} of {rows}; pad them")
    ranges = query_tiles(lo, hi, keys, stream, rows)
    shared = 0 if lo.shape[0] == 1 else 1

    def kernel(refs, scratch):
        q_ref, k_ref, v_ref, dout_ref, lse_ref, delta_ref, lo_ref, hi_ref, ranges_ref, dk_ref, dv_ref = refs
        buffers, own_ready, ready, free, done = scratch
        k_smem, v_smem, q_smem, dout_smem, lse_smem, delta_smem, lo_smem, hi_smem, staging2 = buffers
        kv_head, k_tile, row = lax.axis_index("heads"), lax.axis_index("tiles"), lax.axis_index("batch")
        warpgroup = lax.axis_index("warpgroup")
        bounds_row = row * shared
        span = tuple(ranges_ref[bounds_row, k_tile, i] for i in range(4))
        begin, visits = span[0], span[3] - span[0]

        @pl.when(warpgroup < WARPGROUPS)
        def _compute():
            plgpu.set_max_registers(232, action="increase")
            part = 0 if tiles.split_width else warpgroup
            base = k_tile * rows + part * own
            mine = (row, pl.ds(base, own), kv_head)
            my_k, my_v = k_smem.at[part], v_smem.at[part]

            @pl.when(warpgroup < owned)
            def _load_own():
                plgpu.copy_gmem_to_smem(k_ref.at[mine], my_k, own_ready)
                plgpu.copy_gmem_to_smem(v_ref.at[mine], my_v, own_ready)

            plgpu.barrier_wait(own_ready)
            staging = None if staging2 is None else staging2.at[warpgroup]

            def my_columns(smem):
                return smem.at[:, pl.ds(warpgroup * columns, columns)] if tiles.split_width else smem

            def step(turn, masked: bool, dk_ref, dv_ref):
                slot = lax.rem(turn, jnp.int32(stages))
                part = anew(0 if tiles.split_width else warpgroup)
                my_k, my_v = k_smem.at[part], v_smem.at[part]
                plgpu.barrier_wait(ready.at[slot])
                score, dweight = two_products(
                    (my_k, q_smem.at[slot].transpose((1, 0))), (my_v, dout_smem.at[slot].transpose((1, 0))), shape
                )
                bounds = (lo_smem.at[slot], hi_smem.at[slot]) if masked else None
                weight, slope = weights_by_key(scores, score, lse_smem.at[slot], bounds, base)
                dscore = slope * (dweight - by_column(delta_smem.at[slot], shape))
                add(dv_ref, weight.astype(q.dtype), my_columns(dout_smem.at[slot]), staging)
                add(dk_ref, dscore.astype(q.dtype), my_columns(q_smem.at[slot]), staging)
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(free.at[slot])

            def all_heads(dk_ref, dv_ref):
                def one_head(head, _):
                    def one(index, _, masked):
                        step(head * visits + index - begin, masked, dk_ref, dv_ref)

                    visit(span, one, None)

                if tiles.sweep:
                    swept = tuple((span[3] - at) * group for at in reversed(span))
                    visit(swept, lambda turn, _, masked: step(turn, masked, dk_ref, dv_ref), None)
                else:
                    lax.fori_loop(0, group, one_head, None)
                return dk_ref[...], dv_ref[...]

            sums = plgpu.ACC((own, columns), jnp.float32)
            dk, dv = pl.run_scoped(all_heads, sums, sums)

            def together():
                if tiles.split_width:
                    plgpu.barrier_arrive(done)
                    plgpu.barrier_wait(done)

            together()  # both have read K and V for the last time before either overwrites its columns
            my_columns(my_k)[...] = (dk * scores.scale).astype(q.dtype)
            my_columns(my_v)[...] = dv.astype(q.dtype)
            plgpu.commit_smem()
            together()

            @pl.when(warpgroup < owned)
            def _store_own():
                plgpu.copy_smem_to_gmem(my_k, dk_ref.at[mine])
                plgpu.copy_smem_to_gmem(my_v, dv_ref.at[mine])
                plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == WARPGROUPS)
        def _feed():
            plgpu.set_max_registers(40, action="decrease")
            sources, targets = (q_ref, dout_ref, lse_ref, delta_ref, lo_ref, hi_ref), buffers[2:8]
            heads_of_group = (kv_head * group, group)
            stream_queries(
                sources, targets, ready, free, heads_of_group, span, row, bounds_row, stream, stages, tiles.sweep
            )

    def tile(*shape):
        return plgpu.SMEM(shape, q.dtype, transforms=swizzled(shape[-1]))

    floats, ints = (plgpu.SMEM((stages, stream), dtype) for dtype in (jnp.float32, jnp.int32))
    return launch(
        kernel,
        (
            (
                *(tile(owned, own, width),) * 2,
                *(tile(stages, stream, width),) * 2,
                *(floats, floats, ints, ints),
                tile(WARPGROUPS, own, stream) if tiles.staged else None,
            ),
            plgpu.Barrier(num_arrivals=2 * owned),
            plgpu.Barrier(num_arrivals=6, num_barriers=stages),
            plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
            plgpu.Barrier(num_arrivals=WARPGROUPS),
        ),
        *(q, k, v, dout, lse, delta, lo, hi, ranges),
        out_type=[k, v],
        grid={name: {"heads": kv_heads, "tiles": keys // rows, "batch": batch}[name] for name in tiles.order},
    )


def backward_dq(q, k, v, dout, lse, delta, lo, hi, *, scores: Scores, tiles: BackwardTiles):
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
    flight = tiles.flight and stages > 1  # with one slot, the next tile cannot come while the last is in use
    if tokens % rows or keys % stream:
        raise ValueError(f"T={tokens} must be a multiple of {rows} and S={keys} of {stream}; pad them")
    ranges = key_tiles(lo, hi, rows, stream)
    shared = 0 if lo.shape[0] == 1 else 1

    def kernel(refs, scratch):
        q_ref, k_ref, v_ref, dout_ref, lse_ref, delta_ref, lo_ref, hi_ref, ranges_ref, dq_ref = refs
        buffers, own_ready, ready, free = scratch
        q_smem, dout_smem, k_smem, v_smem, lse_smem, delta_smem, lo_smem, hi_smem, staging2 = buffers
        head, row = lax.axis_index("heads"), lax.axis_index("batch")
        q_tile = tokens // rows - 1 - lax.axis_index("tiles")  # causal rows: the longest work first
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
                turn = index - begin
                slot = lax.rem(turn, jnp.int32(stages))
                mine = anew(warpgroup)
                my_q, my_dout = q_smem.at[mine], dout_smem.at[mine]
                plgpu.barrier_wait(ready.at[slot])
                score, dweight = two_products(
                    (my_q, k_smem.at[slot].transpose((1, 0))), (my_dout, v_smem.at[slot].transpose((1, 0))), shape
                )
                if flight:
                    pl.when(turn > 0)(
                        lambda: plgpu.barrier_arrive(free.at[lax.rem(turn + stages - 1, jnp.int32(stages))])
                    )
                score = scores.squash(score)
                weight = jnp.exp2(score * scores.factor - lse_q)
                if masked:
                    key = index_along(1, index * stream, shape)
                    weight = jnp.where((key >= lo_q) & (key <= hi_q), weight, 0.0)
                dscore = (scores.chain(weight, score) * (dweight - delta_q)).astype(q.dtype)
                add(dq_acc, dscore, k_smem.at[slot], staging)
                if not flight:
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(free.at[slot])

            def all_tiles(dq_acc):
                visit(span, lambda index, _, masked: step(index, masked, dq_acc), None)
                dq = dq_acc[...]
                if flight:
                    last = lax.rem(end - begin + stages - 1, jnp.int32(stages))
                    pl.when(end > begin)(lambda: plgpu.barrier_arrive(free.at[last]))
                return dq

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
        grid={"heads": heads, "tiles": tokens // rows, "batch": batch},
    )
