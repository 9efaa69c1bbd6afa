"""The Hopper kernel for the weights' gradient: dw[e] = dy[rows of e].T @ x[rows of e], summed in f32.

A tile is 128 by 256 of one group's gradient. Two compute warpgroups own 64 rows of it each; a third streams slots of 64
rows of dy and x through shared memory, which the tensor cores read transposed. The copy engine starts at multiples of 8
rows only, so that a group's first and last slot may hold rows of others. The third warpgroup zeroes those in shared
memory, in both operands, as 0 * inf is not 0, and hands such a slot on afterwards: the tensor cores, slots behind, do
not wait for it. A tile is stored while the next one is multiplied, a part of it at each of its first slots.
"""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu.fragmented_array import Tiling

from pallas_kernels import _platform
from pallas_kernels._hopper import WARPGROUPS, drain, launch, swizzled
from pallas_kernels._tiles import (
    DEPTH,
    HALF,
    ROWS,
    Tiles,
    free_slots,
    parts_of,
    shape,
    store_buffers,
    store_part,
    store_rows,
    walk,
)
from pallas_kernels.grouped_matmul.mosaic_gpu_work import starts_of

ALIGNED = 8  # rows of a shared-memory tile


def eight_rows(width: int):
    """Eight rows by `width` columns over a warpgroup: the least shared memory that it can rewrite."""
    tiling = Tiling(((ALIGNED, width), (ALIGNED // 4, width), (width // 16,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


def group_weights(x, dy, sizes, *, dtype, tiles: Tiles):
    """Multiplies each group's rows of dy, transposed, with those of x.

    Args:
        x: (M, D), M a multiple of 8, at least 64, D of 64; 16 bit.
        dy: (M, F), F a multiple of 64, x's dtype.
        sizes: (E,) rows of each group.
        dtype: of the result.
        tiles: sizes; at least 3 slots, of 32 or 64 rows.

    Returns:
        (E, F, D) in dtype; zeros for groups without rows.

    Raises:
        ValueError: a shape or the tiles are none of these.
    """
    (rows, width), height, groups = x.shape, dy.shape[1], sizes.shape[0]
    if rows < HALF or rows % ALIGNED or width % DEPTH or height % DEPTH:
        raise ValueError(
            f"M={rows} must be at least {HALF} and a multiple of {ALIGNED}, "
            f"D={width} and F={height} of {DEPTH}; pad them"
        )
    columns, stages, depth = tiles.columns, tiles.stages, tiles.depth
    if depth not in (32, 64):
        raise ValueError(f"a slot's depth must be 32 or 64, not {depth}")
    if stages < 3:  # a slot is handed on when the next one has room: that which is in use, this one and that one
        raise ValueError(f"there must be at least 3 slots, not {stages}")
    layout = eight_rows(depth)
    late = tiles.late and jnp.dtype(dtype).itemsize == 2  # f32 sums and the next ones do not fit in the registers
    team = 2 if tiles.pair else 1  # blocks that take one item, each a tile of its rows
    down, across = -(-height // (team * ROWS)), -(-width // columns)
    items = groups * down * across
    blocks = min(items, (tiles.blocks or _platform.multiprocessors()) // team)

    def kernel(refs, scratch):
        x_ref, dy_ref, starts_ref, dw_ref = refs
        x_smem, dy_smem, dw_smem, ready, free = scratch
        block, warpgroup = lax.axis_index("blocks"), lax.axis_index("warpgroup")
        mine = lax.div(items - block + (blocks - 1), jnp.int32(blocks))

        def item(n):
            """First slot's first row, the group's first row and the one behind its last: read a tile early."""
            number = jnp.minimum(block + n * blocks, items - 1)
            group = lax.div(number, jnp.int32(down * across))
            start, end = starts_ref[group], starts_ref[group + 1]
            return start - lax.rem(start, jnp.int32(ALIGNED)), start, end

        def place(n):
            """The group, row and column of the n-th tile of this block."""
            number = block + n * blocks
            group, tile = lax.div(number, jnp.int32(down * across)), lax.rem(number, jnp.int32(down * across))
            row, column = walk(tile, jnp.int32(down), jnp.int32(across), tiles.band)
            return group, (row * team + (lax.axis_index("pair") if tiles.pair else 0)) * ROWS, column * columns

        def for_tiles(body, first):
            """Calls kept = body(n, span, visited, steps, kept) for each tile; returns the number of slots, and kept."""

            def tile(n, carry):
                visited, (base, start, end), kept = carry
                following = item(n + 1)
                steps = jnp.where(end > start, lax.div(end - base + (depth - 1), jnp.int32(depth)), 0)
                kept = body(n, (base, start, end), visited, steps, kept)
                return visited + steps, following, kept

            visited, _, kept = lax.fori_loop(0, mine, tile, (jnp.int32(0), item(0), first))
            return visited, kept

        def holds_others(first, start, end):
            return (first < start) | (first + depth > end)

        def zero_others(slot, first, start, end):
            """Zeroes rows of other groups in a slot that begins at row `first` and holds some of this group."""
            operands = x_smem.at[slot], *(dy_smem.at[slot, half] for half in range(WARPGROUPS))
            eights, owned = depth // ALIGNED, jnp.minimum(end - first, depth)
            before = jnp.where(first < start, 1, 0)
            whole, rest = lax.div(owned, jnp.int32(ALIGNED)), lax.rem(owned, jnp.int32(ALIGNED))
            within = jnp.where(rest > 0, 1, 0)

            def mask(i, _):
                """Zeroes some of eight rows: of the first ones, or of those that hold the group's last."""
                tile = jnp.where(i < before, 0, whole)
                at = pl.ds(pl.multiple_of(tile * ALIGNED, ALIGNED), ALIGNED)
                values = [plgpu.load(smem.at[at], layout=layout) for smem in operands]
                for smem, value in zip(operands, values, strict=True):
                    row = plgpu.broadcasted_iota(jnp.int32, value.shape, 0, layout=layout) + first + tile * ALIGNED
                    smem[at] = jnp.where((row >= start) & (row < end), value, jnp.zeros_like(value))

            lax.fori_loop(0, before + within, mask, None)
            behind = eights - whole - within  # eights of rows of which none is the group's, by powers of two
            for bit in reversed(range(eights.bit_length() - 1)):

                @pl.when(behind & (1 << bit) > 0)
                def _zero(size=1 << bit):
                    at = pl.ds(pl.multiple_of((eights - (behind & -size)) * ALIGNED, ALIGNED), size * ALIGNED)
                    for smem in operands:
                        zeros = jnp.zeros((size * ALIGNED, smem.shape[1]), smem.dtype)
                        smem[at] = plgpu.layout_cast(zeros, layout)

            plgpu.commit_smem()

        @pl.when(warpgroup < WARPGROUPS)
        def _compute():
            plgpu.set_max_registers(232, action="increase")
            buffers = dw_smem.at[warpgroup]

            def target(n):
                group, row, column = place(n)
                return dw_ref.at[group], row + warpgroup * HALF, column

            def tile(n, _, visited, steps, kept):
                def slot_of(k):
                    return lax.rem(visited + k + stages, jnp.int32(stages))

                def store_kept(condition):
                    """Stores the parts of the tile before for whose number the condition holds."""
                    for index in range(parts_of(kept, buffers) if late else 0):
                        pl.when((n > 0) & condition(index))(
                            lambda index=index: store_part(index, kept, buffers, *target(n - 1))
                        )

                def multiply(sums):
                    def step(k, _):
                        slot = slot_of(k)
                        plgpu.barrier_wait(ready.at[slot])
                        plgpu.wgmma(sums, dy_smem.at[slot, warpgroup].transpose((1, 0)), x_smem.at[slot])
                        plgpu.wgmma_wait(1)
                        pl.when(k > 0)(lambda: plgpu.barrier_arrive(free.at[slot_of(k - 1)]))
                        store_kept(lambda index: k == index)

                    lax.fori_loop(0, steps, step, None)
                    store_kept(lambda index: steps <= index)
                    return sums[...]

                sums = pl.run_scoped(multiply, plgpu.ACC((HALF, columns), jnp.float32))
                pl.when(steps > 0)(lambda: plgpu.barrier_arrive(free.at[slot_of(steps - 1)]))
                if late:
                    return sums.astype(dtype)
                store_rows(sums, buffers, *target(n))
                return kept

            kept = plgpu.layout_cast(jnp.zeros((HALF, columns), dtype), plgpu.Layout.WGMMA) if late else None
            _, kept = for_tiles(tile, kept)
            if late:
                store_rows(kept, buffers, *target(mine - 1))
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == WARPGROUPS)
        def _feed():
            plgpu.set_max_registers(40, action="decrease")

            def hand_on(slot, first, start, end):
                """Zeroes rows of others in a slot, if it holds any, once it has been filled."""

                @pl.when(holds_others(first, start, end))
                def _zero():
                    plgpu.barrier_wait(ready.at[stages + slot])
                    zero_others(slot, first, start, end)
                    for _ in range(WARPGROUPS + 1):
                        plgpu.barrier_arrive(ready.at[slot])

            def tile(n, span, visited, steps, filled):
                _, row, column = place(n)
                base, start, end = span

                def load(k, filled):
                    turn, first = visited + k, base + k * depth
                    slot = lax.rem(turn, jnp.int32(stages))
                    at = pl.ds(pl.multiple_of(first, ALIGNED), depth)
                    pl.when(turn >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))
                    # A slot with rows of others is not ready when it has been filled.
                    barrier = ready.at[slot + jnp.where(holds_others(first, start, end), stages, 0)]
                    for half in range(WARPGROUPS):
                        source = dy_ref.at[at, pl.ds(row + half * HALF, HALF)]
                        plgpu.copy_gmem_to_smem(source, dy_smem.at[slot, half], barrier)
                    source, shared = x_ref.at[at, pl.ds(column, columns)], "pair" if tiles.pair else None
                    plgpu.copy_gmem_to_smem(source, x_smem.at[slot], barrier, collective_axes=shared)
                    hand_on(*filled)  # the slot before: its rows have had the time to arrive
                    return slot, first, start, end

                return lax.fori_loop(0, steps, load, filled)

            none = jnp.int32(0), jnp.int32(0), jnp.int32(0), jnp.int32(depth)  # a slot that holds no others' rows
            visited, filled = for_tiles(tile, none)
            hand_on(*filled)
            drain(visited, stages, free)

    return launch(
        kernel,
        (
            plgpu.SMEM((stages, depth, columns), x.dtype, transforms=swizzled(depth)),
            plgpu.SMEM((stages, WARPGROUPS, depth, HALF), x.dtype, transforms=swizzled(depth)),
            store_buffers(dtype, tiles.stores),
            # Of each slot: that it may be multiplied, and that it has been filled but holds rows of others.
            plgpu.Barrier(num_arrivals=WARPGROUPS + 1, num_barriers=2 * stages),
            free_slots(tiles),
        ),
        *(x, dy, starts_of(sizes)),
        out_type=jax.ShapeDtypeStruct((groups, height, width), dtype),
        **shape(blocks, tiles),
    )
