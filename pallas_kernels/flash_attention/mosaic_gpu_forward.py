"""The forward kernel for Hopper: online softmax over tiles of keys, two compute warpgroups fed by a third.

An item of work is 2 * block_q queries of one head. The memory warpgroup streams tiles of K and V through a ring of
`stages` shared-memory slots; each compute warpgroup multiplies its block_q queries with every tile (scores in
registers), keeps the running maximum and sum of a base-2 softmax, and accumulates P @ V. The two take turns on the
tensor cores: while one exponentiates, the other multiplies (FlashAttention-3, arXiv 2407.08608, section 3.1). One adds
its weighted values once the other has left word that its next scores are begun.

There are as many blocks as the GPU runs at a time; each does every `blocks`-th item, longest first, and loads the next
item's tiles while it finishes this one's.
"""

import dataclasses

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _platform
from pallas_kernels._hopper import WARPGROUPS, drain, filled, launch, swizzled
from pallas_kernels.flash_attention.bounds import key_tiles, longest_first
from pallas_kernels.flash_attention.mosaic_gpu_tiles import LOG2E, Scores, accumulate, index_along, visit

LOWEST = -1e30  # start of the running maximum: finite, so that a row that has seen no key makes no NaN


@dataclasses.dataclass(frozen=True)
class ForwardTiles:
    """Tile sizes and schedule.

    Attributes:
        block_q: queries of a compute warpgroup.
        block_kv: keys of a slot.
        stages: slots of the ring.
        items: slots for items of queries: with 2 the next item's are loaded while one is at work.
        blocks: that share the work; None for as many as the GPU has multiprocessors.
        staged: whether weights go through shared memory, which is what the interpreter can run.
    """

    block_q: int = 64
    block_kv: int = 128
    stages: int = 2
    items: int = 2
    blocks: int | None = None
    staged: bool = False


def forward_tiles(q, k, v, lo, hi, sinks=None, *, scores: Scores, tiles: ForwardTiles):
    """Attends within row bounds.

    Args:
        q: (B, T, N, H), T a multiple of 2 * block_q; 16 bit.
        k: (B, S, K, H), S a multiple of block_kv.
        v: as k.
        lo: (B or 1, T) int32, first key of each query.
        hi: last key.
        sinks: (N,) f32, score of a key without a value that every query of the head sees, or None.
        scores: from products to scores.
        tiles: sizes.

    Returns:
        (out (B, T, N, H), lse (B, N, T) f32): lse is the base-2 logarithm of the sum of exponentials of the scores, the
        sink's included, +inf where there is none.
    """
    batch, tokens, heads, width = q.shape
    keys, kv_heads = k.shape[1], k.shape[2]
    block_q, block_kv, stages, q_slots = tiles.block_q, tiles.block_kv, tiles.stages, tiles.items
    rows = WARPGROUPS * block_q
    if tokens % rows or keys % block_kv:
        raise ValueError(f"T={tokens} must be a multiple of {rows} and S={keys} of {block_kv}; pad them")
    q_tiles = tokens // rows
    ranges = key_tiles(lo, hi, rows, block_kv)
    work = longest_first(ranges, batch)
    shared = 0 if lo.shape[0] == 1 else 1
    items = heads * batch * q_tiles
    blocks = min(items, tiles.blocks or _platform.multiprocessors())

    def kernel(refs, scratch):
        q_ref, k_ref, v_ref, lo_ref, hi_ref, ranges_ref, work_ref, *sinks_ref, out_ref, lse_ref = refs
        buffers, (q_ready, k_ready, v_ready), (q_free, k_free, v_free), turn = scratch
        q_smem, k_smem, v_smem, lse_smem, lo_smem, hi_smem, weight_smem = buffers
        block, warpgroup = lax.axis_index("blocks"), lax.axis_index("warpgroup")
        mine = lax.div(items - block + (blocks - 1), jnp.int32(blocks))  # items of this block

        def item(n):
            """Where the n-th item of this block lies: row, head, first query, slot of Q, tiles of keys."""
            number = block + n * blocks
            place = work_ref[lax.div(number, jnp.int32(heads))]
            row, q_tile = lax.div(place, jnp.int32(q_tiles)), lax.rem(place, jnp.int32(q_tiles))
            span = tuple(ranges_ref[row * shared, q_tile, i] for i in range(4))
            return row, lax.rem(number, jnp.int32(heads)), q_tile * rows, lax.rem(n, jnp.int32(q_slots)), span

        def leave_word():
            """Tells the other that this one's scores are begun."""
            plgpu.barrier_arrive(turn.at[1 - warpgroup])

        def await_word():
            plgpu.barrier_wait(turn.at[warpgroup])

        @pl.when(warpgroup < WARPGROUPS)
        def _compute():
            plgpu.set_max_registers(232, action="increase")
            of_row = plgpu.Layout.WGMMA.reduce(1)
            rows_of_mine = pl.ds(warpgroup * block_q, block_q)
            pl.when(warpgroup == 1)(await_word)

            def attend(n, visited):
                row, head, first, q_slot, span = item(n)
                begin, visits = span[0], span[3] - span[0]
                my_q, my_lse = q_smem.at[q_slot, rows_of_mine], lse_smem.at[q_slot, rows_of_mine]
                plgpu.barrier_wait(q_ready.at[q_slot])
                lo_q = plgpu.load(lo_smem.at[q_slot, rows_of_mine], layout=of_row)
                hi_q = plgpu.load(hi_smem.at[q_slot, rows_of_mine], layout=of_row)
                # A sink is a key that has been seen before the first one.
                top = filled((block_q,), sinks_ref[0][head] if sinks_ref else LOWEST)
                total = filled((block_q,), 1.0 if sinks_ref else 0.0)

                def step(index, carry, masked: bool):
                    acc, top, total = carry
                    slot = lax.rem(visited + index - begin, jnp.int32(stages))
                    plgpu.barrier_wait(k_ready.at[slot])

                    def multiply(acc_ref):
                        plgpu.wgmma(acc_ref, my_q, k_smem.at[slot].transpose((1, 0)))
                        leave_word()
                        return acc_ref[...]

                    score = scores.squash(pl.run_scoped(multiply, plgpu.ACC((block_q, block_kv), jnp.float32)))
                    plgpu.barrier_arrive(k_free.at[slot])
                    if masked:
                        key = index_along(1, index * block_kv, (block_q, block_kv))
                        seen = (key >= lax.broadcast_in_dim(lo_q, key.shape, [0])) & (
                            key <= lax.broadcast_in_dim(hi_q, key.shape, [0])
                        )
                        score = jnp.where(seen, score, -jnp.inf)
                    new_top = jnp.maximum(top, score.max(axis=1) * scores.factor)
                    shrink = jnp.exp2(top - new_top)
                    weight = jnp.exp2(score * scores.factor - lax.broadcast_in_dim(new_top, score.shape, [0]))
                    acc *= lax.broadcast_in_dim(shrink, acc.shape, [0])
                    total = total * shrink + weight.sum(axis=1)
                    weight16 = weight.astype(q.dtype)
                    acc, total, new_top, weight16 = lax.optimization_barrier((acc, total, new_top, weight16))
                    plgpu.barrier_wait(v_ready.at[slot])
                    await_word()

                    staging = None if weight_smem is None else weight_smem.at[warpgroup]
                    (acc,) = accumulate((acc,), staging, lambda add: add(weight16, v_smem.at[slot]))
                    plgpu.barrier_arrive(v_free.at[slot])
                    return acc, new_top, total

                acc, top, total = visit(span, step, (filled((block_q, width), 0.0), top, total))

                empty = total == 0.0
                acc /= lax.broadcast_in_dim(jnp.where(empty, 1.0, total), acc.shape, [0])
                my_q[...] = acc.astype(q.dtype)
                my_lse[...] = jnp.where(empty, jnp.inf, top + jnp.log2(jnp.where(empty, 1.0, total)))
                plgpu.commit_smem()
                at = pl.ds(first + warpgroup * block_q, block_q)
                plgpu.copy_smem_to_gmem(my_q, out_ref.at[row, at, head])
                plgpu.copy_smem_to_gmem(my_lse, lse_ref.at[row, head, at])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(q_free.at[q_slot])
                return visited + visits

            lax.fori_loop(0, mine, attend, jnp.int32(0))
            pl.when(warpgroup == 0)(leave_word)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == WARPGROUPS)
        def _feed():
            plgpu.set_max_registers(40, action="decrease")

            def feed(n, visited):
                row, head, first, q_slot, (begin, _, _, end) = item(n)
                kv_head, at = lax.div(head, jnp.int32(heads // kv_heads)), pl.ds(first, rows)
                pl.when(n >= q_slots)(lambda: plgpu.barrier_wait(q_free.at[q_slot]))
                plgpu.copy_gmem_to_smem(q_ref.at[row, at, head], q_smem.at[q_slot], q_ready.at[q_slot])
                plgpu.copy_gmem_to_smem(lo_ref.at[row * shared, at], lo_smem.at[q_slot], q_ready.at[q_slot])
                plgpu.copy_gmem_to_smem(hi_ref.at[row * shared, at], hi_smem.at[q_slot], q_ready.at[q_slot])

                def load(index, _):
                    turn_of_slot = visited + index - begin
                    slot = lax.rem(turn_of_slot, jnp.int32(stages))
                    at = (row, pl.ds(index * block_kv, block_kv), kv_head)
                    pl.when(turn_of_slot >= stages)(lambda: plgpu.barrier_wait(k_free.at[slot]))
                    plgpu.copy_gmem_to_smem(k_ref.at[at], k_smem.at[slot], k_ready.at[slot])
                    pl.when(turn_of_slot >= stages)(lambda: plgpu.barrier_wait(v_free.at[slot]))
                    plgpu.copy_gmem_to_smem(v_ref.at[at], v_smem.at[slot], v_ready.at[slot])

                lax.fori_loop(begin, end, load, None)
                return visited + end - begin

            visited = lax.fori_loop(0, mine, feed, jnp.int32(0))
            drain(visited, stages, k_free, v_free)
            drain(mine, q_slots, q_free)

    def tile(*shape, dtype=q.dtype):
        return plgpu.SMEM(shape, dtype, transforms=swizzled(shape[-1]) if dtype == q.dtype else ())

    return launch(
        kernel,
        (
            (
                tile(q_slots, rows, width),
                tile(stages, block_kv, width),
                tile(stages, block_kv, width),
                tile(q_slots, rows, dtype=jnp.float32),
                tile(q_slots, rows, dtype=jnp.int32),
                tile(q_slots, rows, dtype=jnp.int32),
                tile(WARPGROUPS, block_q, block_kv) if tiles.staged else None,
            ),
            (
                plgpu.Barrier(num_arrivals=3, num_barriers=q_slots),
                *(plgpu.Barrier(num_barriers=stages),) * 2,
            ),
            (
                plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=q_slots),
                *(plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),) * 2,
            ),
            plgpu.Barrier(num_barriers=WARPGROUPS),
        ),
        *(q, k, v, lo, hi, ranges, work),
        *([] if sinks is None else [sinks * LOG2E]),
        out_type=[q, jax.ShapeDtypeStruct((batch, heads, tokens), jnp.float32)],
        grid={"blocks": blocks},
    )
