"""The Hopper kernel for the weights' gradient: dw[e] = dy[rows of e].T @ x[rows of e], summed in f32.

A tile is 128 by 256 of one group's gradient. Two compute warpgroups own 64 rows of it each; a third streams slots of 64
rows of dy and x through shared memory, which the tensor cores read transposed. The copy engine starts at multiples of 8
rows only, so that a group's first and last slot may hold rows of others. Those are zeroed in shared memory while the
slot before is multiplied; in both operands, as 0 * inf is not 0.
"""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu.fragmented_array import Tiling

from pallas_kernels import _platform
from pallas_kernels._hopper import WARPGROUPS, drain, launch, swizzled
from pallas_kernels.grouped_matmul.mosaic_gpu_rows import DEPTH, Tiles, free_slots, shape, store_buffers, store_rows
from pallas_kernels.grouped_matmul.mosaic_gpu_work import HALF, ROWS, starts_of, walk

ALIGNED = 8  # rows of a shared-memory tile
# A tile of 8 rows by 64 columns, 4 elements a thread: the smallest part of shared memory that a warpgroup can rewrite.
EIGHT_ROWS = plgpu.Layout.TILED(
    Tiling(((ALIGNED, DEPTH), (ALIGNED // 4, DEPTH), (4,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
)


def group_weights(x, dy, sizes, *, dtype, tiles: Tiles):
    """Multiplies each group's rows of dy, transposed, with those of x.

    Args:
        x: (M, D), M a multiple of 8, at least 64, D of 64; 16 bit.
        dy: (M, F), F a multiple of 64, x's dtype.
        sizes: (E,) rows of each group.
        dtype: of the result.
        tiles: sizes.

    Returns:
        (E, F, D) in dtype; zeros for groups without rows.
    """
    (rows, width), height, groups = x.shape, dy.shape[1], sizes.shape[0]
    if rows < HALF or rows % ALIGNED or width % DEPTH or height % DEPTH:
        raise ValueError(
            f"M={rows} must be at least {HALF} and a multiple of {ALIGNED}, "
            f"D={width} and F={height} of {DEPTH}; pad them"
        )
    columns, stages = tiles.columns, tiles.stages
    team = 2 if tiles.pair else 1  # blocks that take one item, each a tile of its rows
    down, across = -(-height // (team * ROWS)), -(-width // columns)
    items = groups * down * across
    blocks = min(items, (tiles.blocks or _platform.multiprocessors()) // team)

    def kernel(refs, scratch):
        x_ref, dy_ref, starts_ref, dw_ref = refs
        x_smem, dy_smem, dw_smem, ready, free, zeroed = scratch
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

        def for_tiles(body):
            """Calls body(n, span, visited, steps) for each tile; returns how many slots were visited."""

            def tile(n, carry):
                visited, (base, start, end) = carry
                following = item(n + 1)
                steps = jnp.where(end > start, lax.div(end - base + (DEPTH - 1), jnp.int32(DEPTH)), 0)
                body(n, (base, start, end), visited, steps)
                return visited + steps, following

            return lax.fori_loop(0, mine, tile, (jnp.int32(0), item(0)))[0]

        def for_slots(visited, steps, body):
            """Calls body(k, slot) for each slot of a tile, when it has been filled."""

            def step(k, _):
                slot = lax.rem(visited + k, jnp.int32(stages))
                plgpu.barrier_wait(ready.at[slot])
                body(k, slot)

            lax.fori_loop(0, steps, step, None)

        def holds_others(first, rows, span):
            return (first < span[1]) | (first + rows > span[2])

        def zero_others(slot, first, span):
            """Zeroes rows of other groups in a slot that begins at row `first`: a half of dy, every other part of x."""
            parts: list[Any] = [(dy_smem.at[slot, warpgroup], True)]
            for part in range(0, columns // DEPTH, WARPGROUPS):
                mine = part + warpgroup
                parts.append((x_smem.at[slot, :, pl.ds(mine * DEPTH, DEPTH)], mine < columns // DEPTH))

            def eight(tile, _):
                at = pl.ds(pl.multiple_of(tile * ALIGNED, ALIGNED), ALIGNED)
                row = plgpu.broadcasted_iota(jnp.int32, (ALIGNED, DEPTH), 0, layout=EIGHT_ROWS) + (
                    first + tile * ALIGNED
                )
                owned = (row >= span[1]) & (row < span[2])

                def zero(smem):
                    value = plgpu.load(smem.at[at], layout=EIGHT_ROWS)
                    smem[at] = jnp.where(owned, value, jnp.zeros_like(value))

                @pl.when(holds_others(first + tile * ALIGNED, ALIGNED, span))
                def _zero():
                    for smem, exists in parts:
                        pl.when(exists)(lambda smem=smem: zero(smem))

            lax.fori_loop(0, DEPTH // ALIGNED, eight, None)
            plgpu.commit_smem()
            plgpu.barrier_arrive(zeroed)
            plgpu.barrier_wait(zeroed)

        @pl.when(warpgroup < WARPGROUPS)
        def _compute():
            plgpu.set_max_registers(232, action="increase")

            def tile(n, span, visited, steps):
                def multiply(sums):
                    def step(k, slot):
                        first = span[0] + k * DEPTH
                        pl.when(holds_others(first, DEPTH, span))(lambda: zero_others(slot, first, span))
                        plgpu.wgmma(sums, dy_smem.at[slot, warpgroup].transpose((1, 0)), x_smem.at[slot])
                        plgpu.wgmma_wait(1)
                        last = lax.rem(visited + k + (stages - 1), jnp.int32(stages))
                        pl.when(k > 0)(lambda: plgpu.barrier_arrive(free.at[last]))

                    for_slots(visited, steps, step)
                    return sums[...]

                sums = pl.run_scoped(multiply, plgpu.ACC((HALF, columns), jnp.float32))
                last = lax.rem(visited + steps + (stages - 1), jnp.int32(stages))
                pl.when(steps > 0)(lambda: plgpu.barrier_arrive(free.at[last]))
                group, row, column = place(n)
                store_rows(sums, dw_smem.at[warpgroup], dw_ref.at[group], row + warpgroup * HALF, column)

            for_tiles(tile)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == WARPGROUPS)
        def _feed():
            plgpu.set_max_registers(40, action="decrease")

            def tile(n, span, visited, steps):
                _, row, column = place(n)

                def load(k, _):
                    turn = visited + k
                    slot = lax.rem(turn, jnp.int32(stages))
                    at = pl.ds(pl.multiple_of(span[0] + k * DEPTH, ALIGNED), DEPTH)
                    pl.when(turn >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))
                    for half in range(WARPGROUPS):
                        source = dy_ref.at[at, pl.ds(row + half * HALF, HALF)]
                        plgpu.copy_gmem_to_smem(source, dy_smem.at[slot, half], ready.at[slot])
                    source, shared = x_ref.at[at, pl.ds(column, columns)], "pair" if tiles.pair else None
                    plgpu.copy_gmem_to_smem(source, x_smem.at[slot], ready.at[slot], collective_axes=shared)

                lax.fori_loop(0, steps, load, None)

            drain(for_tiles(tile), stages, free)

    return launch(
        kernel,
        (
            plgpu.SMEM((stages, DEPTH, columns), x.dtype, transforms=swizzled(columns)),
            plgpu.SMEM((stages, WARPGROUPS, DEPTH, HALF), x.dtype, transforms=swizzled(HALF)),
            store_buffers(dtype),
            plgpu.Barrier(num_arrivals=WARPGROUPS + 1, num_barriers=stages),
            free_slots(tiles),
            plgpu.Barrier(num_arrivals=WARPGROUPS),
        ),
        *(x, dy, starts_of(sizes)),
        out_type=jax.ShapeDtypeStruct((groups, height, width), dtype),
        **shape(blocks, tiles),
    )
