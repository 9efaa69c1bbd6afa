"""The fused backward kernel for Hopper: all three gradients in one pass, five products a tile.

A block owns 2 * `own` keys of one key head and streams the queries that see them, with dout, the log-sum-exp and delta,
head by head of the group. Scores are held transposed, keys by queries, so that both accumulating products take their
left side from registers. What dQ needs crosses the two warpgroups through shared memory: each writes its own dS^T,
and each forms a part of the tile's dQ from both, which the copy engine adds to f32 sums in device memory
(FlashAttention-3, arXiv 2407.08608, section 3 and appendix B). The order of those additions varies between runs;
`mosaic_gpu_backward` is the form whose results do not.

The tensor cores are kept busy while a tile's dQ is stored: by the next tile's scores, or by dK.
"""

import dataclasses

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels._hopper import WARPGROUPS, drain, filled, launch_in_place, swizzled
from pallas_kernels.flash_attention.bounds import query_tiles
from pallas_kernels.flash_attention.mosaic_gpu_backward import weights_by_key
from pallas_kernels.flash_attention.mosaic_gpu_tiles import (
    Scores,
    add,
    anew,
    by_column,
    index_along,
    visit,
)


@dataclasses.dataclass(frozen=True)
class FusedTiles:
    """Tile sizes and schedule of the fused kernel.

    Attributes:
        own: keys of a compute warpgroup.
        stream: queries of a slot.
        stages: slots of the ring.
        ahead: whether the next tile's scores are multiplied while this one's dQ is stored.
        dq_first: whether dQ is multiplied before dK, so that it is stored while dK is formed.
        auto_barriers: whether the compiler puts a barrier around every store to shared memory.
        omit: of timing experiments: "reduce" (no dQ is added), "dq" (none is formed either); results are then wrong.
        registers: of a thread that computes.
        staged: whether products go through shared memory, which is what the interpreter can run.
    """

    own: int = 64
    stream: int = 64
    stages: int = 2
    ahead: bool = True
    dq_first: bool = False
    auto_barriers: bool = False
    one_loop: bool = False
    flat: bool = True
    by_row: bool = False
    sweep: bool = False
    order: tuple[str, ...] = ("heads", "tiles", "batch")
    omit: str = ""
    registers: int = 240
    staged: bool = False


def hide(weight, bounds, first_key):
    """Weights of a tile of keys by queries, those outside of the queries' bounds 0."""
    key = index_along(0, first_key, weight.shape)
    seen = (key >= by_column(bounds[0], weight.shape)) & (key <= by_column(bounds[1], weight.shape))
    return jnp.where(seen, weight, 0.0)


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
    more = 1 if tiles.ahead else 0  # a last tile that is loaded and multiplied in vain, so that no step is special

    def kernel(refs, scratch):
        q_ref, k_ref, v_ref, dout_ref, lse_ref, delta_ref, lo_ref, hi_ref, ranges_ref, dq_ref, dk_ref, dv_ref = refs
        buffers, (own_ready, q_ready, dout_ready), free, exchanged, done = scratch
        k_smem, v_smem, q_smem, dout_smem, lse_smem, delta_smem, lo_smem, hi_smem, *others = buffers
        dscore_smem, dq_smem, staging2 = others
        kv_head, k_tile, row = lax.axis_index("heads"), lax.axis_index("tiles"), lax.axis_index("batch")
        warpgroup = lax.axis_index("warpgroup")
        bounds_row = row * shared
        span = tuple(ranges_ref[bounds_row, k_tile, i] for i in range(4))
        begin, visits = span[0], span[3] - span[0]

        def compute(dk_ref_, dv_ref_, *ahead_ref):
            base = k_tile * rows + warpgroup * own
            my_k, my_v = k_smem.at[warpgroup], v_smem.at[warpgroup]
            accumulator = plgpu.ACC(shape, jnp.float32)

            staging = staging2.at[warpgroup] if tiles.staged else None

            def score_of(ref, turn):
                """Begins the products of the turn's queries and the keys."""
                slot = lax.rem(turn, jnp.int32(stages))
                plgpu.barrier_wait(q_ready.at[slot])
                if not tiles.staged:
                    plgpu.wgmma(ref, my_k, q_smem.at[slot].transpose((1, 0)))

            def step(index, masked, head, turn):
                mine = anew(warpgroup)
                my_k, my_v = k_smem.at[mine], v_smem.at[mine]
                part = pl.ds(mine * dq_shape[1 - by_query], dq_shape[1 - by_query])
                slot, half = lax.rem(turn, jnp.int32(stages)), lax.rem(turn, jnp.int32(2))

                def weigh(score_ref, dweight_ref):
                    if not tiles.ahead:
                        score_of(score_ref, turn)
                    if tiles.staged:
                        plgpu.wgmma(score_ref, my_k, q_smem.at[slot].transpose((1, 0)))
                    # With nothing else in flight where a step begins: the assembler orders products in vain otherwise.
                    product = plgpu.wgmma_accumulator_load(score_ref) if tiles.ahead else None
                    plgpu.barrier_wait(dout_ready.at[slot])
                    plgpu.wgmma(dweight_ref, my_v, dout_smem.at[slot].transpose((1, 0)))
                    if product is None:
                        product = plgpu.wgmma_accumulator_load(score_ref, wait_n=1)
                    bounds = (lo_smem.at[slot], hi_smem.at[slot])
                    now = bounds if masked is True else None
                    weight, slope = weights_by_key(scores, product, lse_smem.at[slot], now, base)
                    if not isinstance(masked, bool):
                        weight = lax.cond(masked, lambda w: hide(w, bounds, base), lambda w: w, weight)
                        slope = weight
                    add(dv_ref_, weight.astype(q.dtype), dout_smem.at[slot], staging)
                    dweight = plgpu.wgmma_accumulator_load(dweight_ref, wait_n=1)
                    return (slope * (dweight - by_column(delta_smem.at[slot], shape))).astype(q.dtype)

                if tiles.ahead and not tiles.staged:
                    dscore = pl.run_scoped(lambda dweight_ref: weigh(ahead_ref[0], dweight_ref), accumulator)
                else:
                    dscore = pl.run_scoped(weigh, accumulator, accumulator)
                if tiles.omit == "dq":
                    add(dk_ref_, dscore, q_smem.at[slot], staging)
                    if tiles.ahead:
                        ahead_ref[0][...] = filled(shape, 0.0)
                        score_of(ahead_ref[0], turn + 1)
                    plgpu.wgmma_wait(more)
                    plgpu.barrier_arrive(free.at[slot])
                    return
                if tiles.by_row:
                    dscore_smem.at[half, mine].transpose((1, 0))[...] = dscore
                else:
                    dscore_smem[half, mine] = dscore
                plgpu.commit_smem()
                plgpu.barrier_arrive(exchanged.at[half])
                if not tiles.dq_first:
                    add(dk_ref_, dscore, q_smem.at[slot], staging)
                plgpu.barrier_wait(exchanged.at[half])

                def multiply(dq_acc):
                    for other in range(WARPGROUPS):
                        dscore_of, keys_of = dscore_smem.at[half, other], k_smem.at[other]
                        if by_query and tiles.by_row:
                            dscore_of = dscore_of.at[part]
                        elif by_query:
                            dscore_of = dscore_of.at[:, part]
                        else:
                            keys_of = keys_of.at[:, part]
                        plgpu.wgmma(dq_acc, dscore_of if tiles.by_row else dscore_of.transpose((1, 0)), keys_of)
                    if tiles.dq_first:
                        add(dk_ref_, dscore, q_smem.at[slot], staging)
                    else:  # what dV and dK took from registers is free for the next scores
                        plgpu.wgmma_wait(1)
                        plgpu.barrier_arrive(free.at[slot])
                    dq = plgpu.wgmma_accumulator_load(dq_acc, wait_n=1) if tiles.dq_first else None
                    if tiles.ahead:
                        if not tiles.staged:
                            ahead_ref[0][...] = filled(shape, 0.0)
                        score_of(ahead_ref[0] if ahead_ref else None, turn + 1)
                    return plgpu.wgmma_accumulator_load(dq_acc, wait_n=more) if dq is None else dq

                dq = pl.run_scoped(multiply, plgpu.ACC(dq_shape, jnp.float32))
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                dq_smem[mine] = dq
                plgpu.commit_smem()
                first = index * stream + (mine * dq_shape[0] if by_query else 0)
                at = (row, kv_head * group + head, 0 if by_query else mine, pl.ds(first, dq_shape[0]))
                if not tiles.flat:
                    at = (row, pl.ds(first, dq_shape[0]), kv_head * group + head, *(() if by_query else (part,)))
                if tiles.staged:
                    plgpu.copy_smem_to_gmem(dq_smem.at[mine], dq_ref.at[(k_tile, *at)])
                elif tiles.omit == "reduce":  # the compiler does not see that this never is

                    @pl.when(begin < 0)
                    def _never():
                        plgpu.copy_smem_to_gmem(dq_smem.at[mine], dq_ref.at[at], reduction_op="add")
                else:
                    how = None if tiles.omit == "add" else "add"
                    plgpu.copy_smem_to_gmem(dq_smem.at[mine], dq_ref.at[at], reduction_op=how)
                if tiles.dq_first:
                    plgpu.wgmma_wait(more)
                    plgpu.barrier_arrive(free.at[slot])

            plgpu.barrier_wait(own_ready)
            if tiles.ahead:
                score_of(ahead_ref[0] if ahead_ref else None, jnp.int32(0))

            def one_head(head, _):
                def one(index, _, masked):
                    step(index, masked, head, head * visits + index - begin)

                visit(span, one, None)

            def one_tile(turn, at):
                head, index = at
                masked = (index < span[1]) | (index >= span[2])
                step(index, masked, head, turn)
                last = index + 1 == span[3]
                return head + last.astype(jnp.int32), jnp.where(last, begin, index + 1)

            def swept(turn, _, masked):
                step(span[3] - 1 - lax.div(turn, jnp.int32(group)), masked, lax.rem(turn, jnp.int32(group)), turn)

            if tiles.sweep:
                # From the last queries, which all keys before them see, head by head: what blocks read is still in L2.
                visit(tuple((span[3] - at) * group for at in reversed(span)), swept, None)
            elif tiles.one_loop:
                lax.fori_loop(0, group * visits, one_tile, (jnp.int32(0), begin))
            else:
                lax.fori_loop(0, group, one_head, None)
            if tiles.ahead:
                plgpu.wgmma_wait(0)
                plgpu.barrier_wait(dout_ready.at[lax.rem(group * visits, jnp.int32(stages))])
                plgpu.barrier_arrive(free.at[lax.rem(group * visits, jnp.int32(stages))])
            dk, dv = dk_ref_[...], dv_ref_[...]
            # Both have read all of K for their last dQ before either overwrites its part.
            plgpu.barrier_arrive(done)
            plgpu.barrier_wait(done)
            my_k[...] = (dk * scores.scale).astype(q.dtype)
            my_v[...] = dv.astype(q.dtype)
            plgpu.commit_smem()
            mine = (row, pl.ds(base, own), kv_head)
            plgpu.copy_smem_to_gmem(my_k, dk_ref.at[mine])
            plgpu.copy_smem_to_gmem(my_v, dv_ref.at[mine])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup < WARPGROUPS)
        def _compute():
            plgpu.set_max_registers(tiles.registers, action="increase")
            sums = plgpu.ACC((own, width), jnp.float32)
            ahead = (plgpu.ACC(shape, jnp.float32),) if tiles.ahead and not tiles.staged else ()
            pl.run_scoped(compute, sums, sums, *ahead)

        @pl.when(warpgroup == WARPGROUPS)
        def _feed():
            plgpu.set_max_registers(24, action="decrease")
            for part in range(WARPGROUPS):
                mine = (row, pl.ds(k_tile * rows + part * own, own), kv_head)
                plgpu.copy_gmem_to_smem(k_ref.at[mine], k_smem.at[part], own_ready)
                plgpu.copy_gmem_to_smem(v_ref.at[mine], v_smem.at[part], own_ready)

            def load(turn, _):
                slot = lax.rem(turn, jnp.int32(stages))
                # The tile in vain may lie past the last one, or be of a block without any.
                head = jnp.minimum(lax.div(turn, jnp.maximum(visits, 1)), group - 1)
                index = jnp.minimum(begin + lax.rem(turn, jnp.maximum(visits, 1)), tokens // stream - 1)
                if tiles.sweep:
                    head = lax.rem(turn, jnp.int32(group))
                    index = jnp.clip(span[3] - 1 - lax.div(turn, jnp.int32(group)), 0, tokens // stream - 1)
                head, at = kv_head * group + head, pl.ds(index * stream, stream)
                pl.when(turn >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))
                for ref, smem in ((q_ref, q_smem), (lse_ref, lse_smem), (lo_ref, lo_smem), (hi_ref, hi_smem)):
                    source = (
                        (row, at, head) if ref is q_ref else (row, head, at) if ref is lse_ref else (bounds_row, at)
                    )
                    plgpu.copy_gmem_to_smem(ref.at[source], smem.at[slot], q_ready.at[slot])
                plgpu.copy_gmem_to_smem(dout_ref.at[row, at, head], dout_smem.at[slot], dout_ready.at[slot])
                plgpu.copy_gmem_to_smem(delta_ref.at[row, head, at], delta_smem.at[slot], dout_ready.at[slot])

            lax.fori_loop(0, group * visits + more, load, None)
            drain(group * visits + more, stages, free)

    def tile(*shape, dtype=q.dtype):
        return plgpu.SMEM(shape, dtype, transforms=swizzled(shape[-1], dtype))

    floats, ints = (plgpu.SMEM((stages, stream), dtype) for dtype in (jnp.float32, jnp.int32))
    # The interpreter has no adding copy: there each block writes a share of its own, and the shares are added here.
    shares = (keys // rows,) if tiles.staged else ()
    parts = width // dq_shape[1]
    dq, dk, dv = launch_in_place(
        kernel,
        (
            (
                *(tile(WARPGROUPS, own, width),) * 2,
                *(tile(stages, stream, width),) * 2,
                *(floats, floats, ints, ints),
                tile(2, WARPGROUPS, *((stream, own) if tiles.by_row else (own, stream))),
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
        out=(
            # A warpgroup's share of a tile is one run of memory: that is what the copy engine adds fastest.
            jnp.zeros((*shares, *((batch, heads, parts, tokens, dq_shape[1]) if tiles.flat else q.shape)), jnp.float32),
            jax.lax.empty(k.shape, k.dtype),
            jax.lax.empty(v.shape, v.dtype),
        ),
        grid={name: {"heads": kv_heads, "tiles": keys // rows, "batch": batch}[name] for name in tiles.order},
        auto_barriers=tiles.auto_barriers,
    )
    dq = dq.sum(0) if tiles.staged else dq
    dq = (dq * scores.scale).astype(q.dtype)
    if tiles.flat:
        dq = dq.transpose(0, 3, 1, 2, 4)
    return dq.reshape(q.shape), dk, dv
