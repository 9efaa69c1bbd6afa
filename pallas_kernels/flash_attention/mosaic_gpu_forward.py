"""The forward kernel for Hopper: online softmax over tiles of keys, two compute warpgroups fed by a third.

A block owns 2 * block_q queries of one head. The memory warpgroup streams tiles of K and V through a ring of `stages`
shared-memory slots; each compute warpgroup multiplies its block_q queries with every tile (scores in registers), keeps
the running maximum and sum of a base-2 softmax, and accumulates P @ V. The two take turns on the tensor cores: while
one exponentiates, the other multiplies (FlashAttention-3, arXiv 2407.08608, section 3.1).
"""

import dataclasses
import functools
import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.flash_attention.bounds import key_tiles

LOG2E = math.log2(math.e)
LOWEST = -1e30  # start of the running maximum: finite, so that a row that has seen no key makes no NaN
WARPGROUPS = 2


@dataclasses.dataclass(frozen=True)
class ForwardTiles:
    """Tile sizes and schedule.

    Attributes:
        block_q: queries of a compute warpgroup.
        block_kv: keys of a slot.
        stages: slots of the ring.
        take_turns: whether the compute warpgroups alternate on the tensor cores.
        staged: whether weights go through shared memory, which is what the interpreter can run.
    """

    block_q: int = 64
    block_kv: int = 128
    stages: int = 2
    take_turns: bool = True
    staged: bool = False


def swizzled(width: int) -> tuple[plgpu.TilingTransform, plgpu.SwizzleTransform]:
    """Shared-memory layout of a 16-bit tile whose rows have `width` elements: the widest swizzle that divides them."""
    swizzle = next(size for size in (128, 64, 32) if width * 2 % size == 0)
    return plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle)


def multiply_add(acc, a, b, staging):
    """`acc + a @ b` on the tensor cores.

    With a None `staging`, a comes from registers and the sum is formed in place. The interpreter can do neither: then a
    goes through `staging`, a shared-memory tile, and the product through an accumulator of its own.
    """
    if staging is None:
        return pl.run_state(lambda ref: plgpu.wgmma(ref, a, b))(plgpu.ACC.init(acc))
    staging[...] = a
    plgpu.commit_smem()

    def product(ref):
        plgpu.wgmma(ref, staging, b)
        return ref[...]

    return acc + pl.run_scoped(product, plgpu.ACC(acc.shape, jnp.float32))


def drain(visits, stages: int, *free) -> None:
    """Waits until the last slots are free, so that no barrier is left with an arrival that nobody saw."""

    def wait(visit, _):
        for barrier in free:
            plgpu.barrier_wait(barrier.at[lax.rem(visit, jnp.int32(stages))])

    lax.fori_loop(jnp.maximum(visits - stages, 0), visits, wait, None)


def forward_tiles(q, k, v, lo, hi, *, scale: float, tiles: ForwardTiles):
    """Attends within row bounds.

    Args:
        q: (B, T, N, H), T a multiple of 2 * block_q; 16 bit.
        k: (B, S, K, H), S a multiple of block_kv.
        v: as k.
        lo: (B or 1, T) int32, first key of each query.
        hi: last key.
        scale: factor on the scores.
        tiles: sizes.

    Returns:
        (out (B, T, N, H), lse (B, N, T) f32): lse is the base-2 logarithm of the sum of exponentials of the scaled
        scores, +inf for a query that sees no key.
    """
    batch, tokens, heads, width = q.shape
    keys, kv_heads = k.shape[1], k.shape[2]
    block_q, block_kv, stages = tiles.block_q, tiles.block_kv, tiles.stages
    rows = WARPGROUPS * block_q
    if tokens % rows or keys % block_kv:
        raise ValueError(f"T={tokens} must be a multiple of {rows} and S={keys} of {block_kv}; pad them")
    ranges = key_tiles(lo, hi, rows, block_kv)
    shared = 0 if lo.shape[0] == 1 else 1
    transforms = swizzled(width)
    log2_scale = scale * LOG2E

    def kernel(refs, scratch):
        q_ref, k_ref, v_ref, lo_ref, hi_ref, ranges_ref, out_ref, lse_ref = refs
        buffers, q_ready, (k_ready, v_ready), (k_free, v_free), turn = scratch
        q_smem, k_smem, v_smem, lse_smem, lo_smem, hi_smem, weight_smem = buffers
        head, q_tile, row = lax.axis_index("heads"), lax.axis_index("q_tiles"), lax.axis_index("batch")
        warpgroup = lax.axis_index("warpgroup")
        kv_head = lax.div(head, jnp.int32(heads // kv_heads))
        bounds_row = row * shared
        begin, clear_begin, clear_end, end = (ranges_ref[bounds_row, q_tile, i] for i in range(4))

        def take_turn():
            if tiles.take_turns:
                plgpu.barrier_arrive(turn)
                plgpu.barrier_wait(turn)

        @pl.when(warpgroup < WARPGROUPS)
        def _compute():
            plgpu.set_max_registers(232, action="increase")
            base = q_tile * rows + warpgroup * block_q
            mine = pl.ds(base, block_q)
            plgpu.copy_gmem_to_smem(q_ref.at[row, mine, head], q_smem.at[warpgroup], q_ready.at[warpgroup])
            plgpu.copy_gmem_to_smem(lo_ref.at[bounds_row, mine], lo_smem.at[warpgroup], q_ready.at[warpgroup])
            plgpu.copy_gmem_to_smem(hi_ref.at[bounds_row, mine], hi_smem.at[warpgroup], q_ready.at[warpgroup])
            plgpu.barrier_wait(q_ready.at[warpgroup])
            by_row = plgpu.Layout.WGMMA.reduce(1)
            lo_q = plgpu.load(lo_smem.at[warpgroup], layout=by_row)
            hi_q = plgpu.load(hi_smem.at[warpgroup], layout=by_row)
            full = functools.partial(jnp.full, dtype=jnp.float32)
            carry = (
                plgpu.layout_cast(full((block_q, width), 0.0), plgpu.Layout.WGMMA),
                plgpu.layout_cast(full((block_q,), LOWEST), by_row),
                plgpu.layout_cast(full((block_q,), 0.0), by_row),
            )
            pl.when(warpgroup == 1)(take_turn)

            def step(index, carry, masked: bool):
                acc, top, total = carry
                slot = lax.rem(index - begin, jnp.int32(stages))
                plgpu.barrier_wait(k_ready.at[slot])

                def multiply(acc_ref):
                    plgpu.wgmma(acc_ref, q_smem.at[warpgroup], k_smem.at[slot].transpose((1, 0)))
                    take_turn()
                    return acc_ref[...]

                score = pl.run_scoped(multiply, plgpu.ACC((block_q, block_kv), jnp.float32))
                plgpu.barrier_arrive(k_free.at[slot])
                if masked:
                    key = plgpu.broadcasted_iota(jnp.int32, (block_q, block_kv), 1, layout=plgpu.Layout.WGMMA)
                    key += index * block_kv
                    seen = (key >= lax.broadcast_in_dim(lo_q, key.shape, [0])) & (
                        key <= lax.broadcast_in_dim(hi_q, key.shape, [0])
                    )
                    score = jnp.where(seen, score, -jnp.inf)
                new_top = jnp.maximum(top, score.max(axis=1) * log2_scale)
                shrink = jnp.exp2(top - new_top)
                weight = jnp.exp2(score * log2_scale - lax.broadcast_in_dim(new_top, score.shape, [0]))
                acc *= lax.broadcast_in_dim(shrink, acc.shape, [0])
                total = total * shrink + weight.sum(axis=1)
                weight16 = weight.astype(q.dtype)
                acc, total, new_top, weight16 = lax.optimization_barrier((acc, total, new_top, weight16))
                if tiles.take_turns:
                    plgpu.barrier_arrive(turn)
                plgpu.barrier_wait(v_ready.at[slot])
                if tiles.take_turns:
                    plgpu.barrier_wait(turn)

                staging = None if weight_smem is None else weight_smem.at[warpgroup]
                acc = multiply_add(acc, weight16, v_smem.at[slot], staging)
                plgpu.barrier_arrive(v_free.at[slot])
                return acc, new_top, total

            masked, clear = functools.partial(step, masked=True), functools.partial(step, masked=False)
            carry = lax.fori_loop(begin, clear_begin, masked, carry)
            carry = lax.fori_loop(clear_begin, clear_end, clear, carry)
            acc, top, total = lax.fori_loop(clear_end, end, masked, carry)
            pl.when(warpgroup == 0)(take_turn)

            empty = total == 0.0
            acc /= lax.broadcast_in_dim(jnp.where(empty, 1.0, total), acc.shape, [0])
            q_smem[warpgroup] = acc.astype(q.dtype)
            lse_smem[warpgroup] = jnp.where(empty, jnp.inf, top + jnp.log2(jnp.where(empty, 1.0, total)))
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_smem.at[warpgroup], out_ref.at[row, mine, head])
            plgpu.copy_smem_to_gmem(lse_smem.at[warpgroup], lse_ref.at[row, head, mine])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == WARPGROUPS)
        def _feed():
            plgpu.set_max_registers(40, action="decrease")

            def load(index, _):
                turn_of_slot = index - begin
                slot = lax.rem(turn_of_slot, jnp.int32(stages))
                at = (row, pl.ds(index * block_kv, block_kv), kv_head)
                pl.when(turn_of_slot >= stages)(lambda: plgpu.barrier_wait(k_free.at[slot]))
                plgpu.copy_gmem_to_smem(k_ref.at[at], k_smem.at[slot], k_ready.at[slot])
                pl.when(turn_of_slot >= stages)(lambda: plgpu.barrier_wait(v_free.at[slot]))
                plgpu.copy_gmem_to_smem(v_ref.at[at], v_smem.at[slot], v_ready.at[slot])

            lax.fori_loop(begin, end, load, None)
            drain(end - begin, stages, k_free, v_free)

    def entry(*refs):
        pl.run_scoped(
            lambda *scratch: kernel(refs, scratch),
            (
                plgpu.SMEM((WARPGROUPS, block_q, width), q.dtype, transforms=transforms),
                plgpu.SMEM((stages, block_kv, width), q.dtype, transforms=transforms),
                plgpu.SMEM((stages, block_kv, width), q.dtype, transforms=transforms),
                plgpu.SMEM((WARPGROUPS, block_q), jnp.float32),
                plgpu.SMEM((WARPGROUPS, block_q), jnp.int32),
                plgpu.SMEM((WARPGROUPS, block_q), jnp.int32),
                plgpu.SMEM((WARPGROUPS, block_q, block_kv), q.dtype, transforms=swizzled(block_kv))
                if tiles.staged
                else None,
            ),
            plgpu.Barrier(num_arrivals=3, num_barriers=WARPGROUPS),
            (plgpu.Barrier(num_barriers=stages),) * 2,
            (plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),) * 2,
            plgpu.Barrier(num_arrivals=WARPGROUPS),
            collective_axes="warpgroup",
        )

    return plgpu.kernel(
        entry,
        out_type=[q, jax.ShapeDtypeStruct((batch, heads, tokens), jnp.float32)],
        grid=(heads, tokens // rows, batch),
        grid_names=("heads", "q_tiles", "batch"),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(q, k, v, lo, hi, ranges)
