"""The Hopper kernel for the weights' gradient: dw[e] = dy[rows of e].T @ x[rows of e], summed in f32.

A tile is 128 by 256 of one group's gradient. Two compute warpgroups own 64 rows of it each; a third streams slots of 64
rows of dy and x through shared memory, which the tensor cores read transposed. The copy engine starts at multiples of 8
rows only, so that a group's first and last slot may hold rows of others: both operands' are zeroed in shared memory
(one's would not do, as 0 * inf is not 0).
"""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _platform
from pallas_kernels.flash_attention.mosaic_gpu_tiles import WARPGROUPS, drain, index_along, launch, swizzled
from pallas_kernels.grouped_matmul.mosaic_gpu_rows import DEPTH, Tiles, store_buffers, store_rows
from pallas_kernels.grouped_matmul.mosaic_gpu_work import HALF, ROWS, spans, walk

ALIGNED = 8  # rows of a shared-memory tile


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
    down, across = -(-height // ROWS), -(-width // columns)
    items = groups * down * across
    blocks = min(items, tiles.blocks or _platform.multiprocessors())

    def kernel(refs, scratch):
        x_ref, dy_ref, spans_ref, dw_ref = refs
        x_smem, dy_smem, dw_smem, ready, free, zeroed = scratch
        block, warpgroup = lax.axis_index("blocks"), lax.axis_index("warpgroup")
        mine = lax.div(items - block + (blocks - 1), jnp.int32(blocks))

        def item(n):
            """The group, first row and column in it, first slot's first row, rows, and slots of the n-th tile."""
            number = block + n * blocks
            group, tile = lax.div(number, jnp.int32(down * across)), lax.rem(number, jnp.int32(down * across))
            row, column = walk(tile, jnp.int32(down), jnp.int32(across))
            base, start, end = (spans_ref[group, i] for i in range(3))
            steps = jnp.where(end > start, lax.div(end - base + (DEPTH - 1), jnp.int32(DEPTH)), 0)
            return group, row * ROWS, column * columns, base, (start, end), steps

        @pl.when(warpgroup < WARPGROUPS)
        def _compute():
            plgpu.set_max_registers(232, action="increase")

            def zero_others(slot, first, start, end):
                """Zeroes rows of other groups in a slot that begins at `first`: a half of dy, every other part of x."""

                def zero(smem):
                    row = index_along(0, first, (DEPTH, DEPTH))
                    value = plgpu.load(smem, layout=plgpu.Layout.WGMMA)
                    smem[...] = jnp.where((row >= start) & (row < end), value, jnp.zeros_like(value))

                zero(dy_smem.at[slot, warpgroup])
                for part in range(0, columns // DEPTH, WARPGROUPS):
                    mine = part + warpgroup
                    pl.when(mine < columns // DEPTH)(
                        lambda mine=mine: zero(x_smem.at[slot, :, pl.ds(mine * DEPTH, DEPTH)])
                    )
                plgpu.commit_smem()
                plgpu.barrier_arrive(zeroed)
                plgpu.barrier_wait(zeroed)

            def tile(n, visited):
                group, row, column, base, (start, end), steps = item(n)

                def slot_of(step):
                    return lax.rem(visited + step, jnp.int32(stages))

                def multiply(sums):
                    def step(k, _):
                        slot, first = slot_of(k), base + k * DEPTH
                        plgpu.barrier_wait(ready.at[slot])
                        pl.when((first < start) | (first + DEPTH > end))(lambda: zero_others(slot, first, start, end))
                        plgpu.wgmma(sums, dy_smem.at[slot, warpgroup].transpose((1, 0)), x_smem.at[slot])
                        plgpu.wgmma_wait(1)
                        pl.when(k > 0)(lambda: plgpu.barrier_arrive(free.at[slot_of(k - 1)]))

                    lax.fori_loop(0, steps, step, None)
                    return sums[...]

                sums = pl.run_scoped(multiply, plgpu.ACC((HALF, columns), jnp.float32))
                pl.when(steps > 0)(lambda: plgpu.barrier_arrive(free.at[slot_of(steps - 1)]))
                store_rows(sums, dw_smem.at[warpgroup], dw_ref.at[group], row + warpgroup * HALF, column)
                return visited + steps

            lax.fori_loop(0, mine, tile, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == WARPGROUPS)
        def _feed():
            plgpu.set_max_registers(40, action="decrease")

            def tile(n, visited):
                _, row, column, base, _, steps = item(n)

                def load(k, _):
                    turn = visited + k
                    slot, at = lax.rem(turn, jnp.int32(stages)), pl.ds(pl.multiple_of(base + k * DEPTH, ALIGNED), DEPTH)
                    pl.when(turn >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))
                    for half in range(WARPGROUPS):
                        source = dy_ref.at[at, pl.ds(row + half * HALF, HALF)]
                        plgpu.copy_gmem_to_smem(source, dy_smem.at[slot, half], ready.at[slot])
                    plgpu.copy_gmem_to_smem(x_ref.at[at, pl.ds(column, columns)], x_smem.at[slot], ready.at[slot])

                lax.fori_loop(0, steps, load, None)
                return visited + steps

            drain(lax.fori_loop(0, mine, tile, jnp.int32(0)), stages, free)

    return launch(
        kernel,
        (
            plgpu.SMEM((stages, DEPTH, columns), x.dtype, transforms=swizzled(columns)),
            plgpu.SMEM((stages, WARPGROUPS, DEPTH, HALF), x.dtype, transforms=swizzled(HALF)),
            store_buffers(dtype),
            plgpu.Barrier(num_arrivals=WARPGROUPS + 1, num_barriers=stages),
            plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
            plgpu.Barrier(num_arrivals=WARPGROUPS),
        ),
        *(x, dy, spans(sizes, ALIGNED)),
        out_type=jax.ShapeDtypeStruct((groups, height, width), dtype),
        grid={"blocks": blocks},
    )
