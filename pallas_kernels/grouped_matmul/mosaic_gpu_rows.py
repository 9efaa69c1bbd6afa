"""The Hopper kernel for products whose rows are grouped: y[m] = x[m] @ w[e].T, and its gradient dx[m] = dy[m] @ w[e].

Several products may be summed, y[m] = x[m] @ w[e].T + low[m] @ up[e].T: one after the other into the same registers.
A tile is 128 rows of one group by 256 columns. Two compute warpgroups own 64 rows each, with their sums in registers;
a third streams slots of 64 along the contraction through shared memory, into the next tile while this one is stored.
There are as many blocks as multiprocessors, and each does every `blocks`-th tile of the table of mosaic_gpu_work.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _platform
from pallas_kernels._hopper import WARPGROUPS, drain, launch, swizzled
from pallas_kernels.grouped_matmul.mosaic_gpu_work import BAND, COLUMN, COUNT, FIRST, GROUP, HALF, STORED, row_items

DEPTH = 64  # of a slot: 128 bytes, the widest swizzle


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Tile sizes and schedule.

    Attributes:
        columns: of a tile.
        stages: slots of the ring.
        band: tiles along the rows of a band, see mosaic_gpu_work.
        blocks: that share the work; None for as many as the GPU has multiprocessors.
        pair: whether the blocks of a cluster of two take neighbouring tiles and share what both read.
        stores: buffers of each compute warpgroup for results on their way out.
        depth: rows of a slot of the weights' gradient, 64 or 32: those that one product sums over, by the swizzle.
        late: whether a tile of the weights' gradient, if 16 bit, is stored during the next one's products.
        staged: whether the kernel is for the interpreter, which knows no two views of the same shared memory.
    """

    columns: int = 256
    stages: int = 4
    band: int = BAND
    blocks: int | None = None
    pair: bool = False
    stores: int = 2
    depth: int = DEPTH
    late: bool = True
    staged: bool = False


def group_rows(xs: Sequence[jax.Array], ws: Sequence[jax.Array], sizes, *, transposed: bool, tiles: Tiles):
    """Multiplies each row with its group's weight; of several rows and weights the products are summed.

    Args:
        xs: (M, K), M at least 64, K a multiple of 64, which may differ; 16 bit.
        ws: of each, (E, N, K), or (E, K, N) if not transposed; N a multiple of 64; x's dtype.
        sizes: (E,) rows of each group.
        transposed: whether the weights' last axis is the one that is summed over.
        tiles: sizes.

    Returns:
        (M, N) in x's dtype; zeros in rows of no group.
    """
    rows, groups, dtype, depths = xs[0].shape[0], ws[0].shape[0], xs[0].dtype, [x.shape[1] for x in xs]
    width = ws[0].shape[1 if transposed else 2]
    if rows < HALF or any(depth % DEPTH for depth in depths) or width % DEPTH:
        raise ValueError(f"M={rows} must be at least {HALF}, K={depths} and N={width} multiples of {DEPTH}; pad them")
    columns, stages = tiles.columns, tiles.stages
    team = 2 if tiles.pair else 1  # blocks that take one line of the table, each a tile of its columns
    table = row_items(sizes, rows, -(-width // (team * columns)), tiles.band)
    blocks = min(table.shape[0], (tiles.blocks or _platform.multiprocessors()) // team)

    def kernel(refs, scratch):
        x_refs, w_refs, (table_ref, y_ref) = refs[: len(xs)], refs[len(xs) : -2], refs[-2:]
        x_smem, w_smem, y_smem, ready, free = scratch
        # The copy engine must not see tiles of 8 rows, between which it could not start; the tensor cores must.
        x_rows, x_tiles = (x_smem, x_smem) if tiles.staged else x_smem
        shared = "pair" if tiles.pair else None
        block, warpgroup = lax.axis_index("blocks"), lax.axis_index("warpgroup")
        mine = lax.div(table_ref[0, COUNT] - block + (blocks - 1), jnp.int32(blocks))

        def item(n, *fields):
            """Fields of the table's line for this block's n-th tile: read a tile early, as that takes a microsecond."""
            line = jnp.minimum(block + n * blocks, table.shape[0] - 1)
            place = lax.axis_index("pair") if tiles.pair else 0
            column = table_ref[line, COLUMN] * team + place
            return table_ref[line, GROUP], column, *(table_ref[line, field] for field in fields)

        def steps_of(group):
            return jnp.where(group < groups, sum(depths) // DEPTH, 0)

        @pl.when(warpgroup < WARPGROUPS)
        def _compute():
            plgpu.set_max_registers(232, action="increase")

            fields = FIRST + warpgroup, STORED + warpgroup

            def tile(n, carry):
                visited, (group, column, first, stored) = carry
                steps, following = steps_of(group), item(n + 1, *fields)

                def slot_of(step):
                    return lax.rem(visited + step, jnp.int32(stages))

                @pl.when(stored > 0)
                def _multiply():
                    sums = multiply_slots(x_tiles, w_smem, ready, free, visited, steps, columns, transposed)
                    store_rows(sums, y_smem.at[warpgroup], y_ref, first, column * columns, stored)

                @pl.when(stored == 0)
                def _pass():
                    def step(k, _):
                        plgpu.barrier_wait(ready.at[slot_of(k)])
                        plgpu.barrier_arrive(free.at[slot_of(k)])

                    lax.fori_loop(0, steps, step, None)

                return visited + steps, following

            lax.fori_loop(0, mine, tile, (jnp.int32(0), item(0, *fields)))
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == WARPGROUPS)
        def _feed():
            plgpu.set_max_registers(40, action="decrease")

            def tile(n, carry):
                visited, (group, column, *firsts) = carry
                steps, following = steps_of(group), item(n + 1, FIRST, FIRST + 1)
                column = pl.ds(column * columns, columns)

                def load(k, _, x_ref, w_ref, before):
                    turn = visited + before + k
                    slot = lax.rem(turn, jnp.int32(stages))
                    inner = pl.ds(k * DEPTH, DEPTH)
                    pl.when(turn >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))
                    for half, first in enumerate(firsts):
                        source = x_ref.at[pl.ds(first, HALF), inner]
                        plgpu.copy_gmem_to_smem(source, x_rows.at[slot, half], ready.at[slot], collective_axes=shared)
                    tile_w = w_ref.at[group, column, inner] if transposed else w_ref.at[group, inner, column]
                    plgpu.copy_gmem_to_smem(tile_w, w_smem.at[slot], ready.at[slot])

                before = jnp.int32(0)
                for x_ref, w_ref, depth in zip(x_refs, w_refs, depths, strict=True):
                    count = jnp.where(group < groups, depth // DEPTH, 0)
                    one = functools.partial(load, x_ref=x_ref, w_ref=w_ref, before=before)
                    lax.fori_loop(0, count, one, None)
                    before += count
                return visited + steps, following

            visited, _ = lax.fori_loop(0, mine, tile, (jnp.int32(0), item(0, FIRST, FIRST + 1)))
            drain(visited, stages, free)

    half = (stages, WARPGROUPS, HALF, DEPTH)
    x_tiles = plgpu.SMEM(half, dtype, transforms=swizzled(DEPTH))
    x_rows = plgpu.SMEM(half, dtype, transforms=swizzled(DEPTH)[1:])
    w_tile = (columns, DEPTH) if transposed else (DEPTH, columns)
    return launch(
        kernel,
        (
            x_tiles if tiles.staged else plgpu.RefUnion(x_rows, x_tiles),
            plgpu.SMEM((stages, *w_tile), dtype, transforms=swizzled(w_tile[1])),
            store_buffers(dtype, tiles.stores),
            plgpu.Barrier(num_arrivals=WARPGROUPS + 1, num_barriers=stages),
            free_slots(tiles),
        ),
        *(*xs, *ws, table),
        out_type=jax.ShapeDtypeStruct((rows, width), dtype),
        **shape(blocks, tiles),
    )


def multiply_slots(x_tiles, w_smem, ready, free, visited, steps, columns: int, transposed: bool):
    """The sums (64, columns) of a warpgroup's next products, one a slot of the ring; frees each slot behind it.

    Args:
        x_tiles: (stages, WARPGROUPS, 64, DEPTH).
        w_smem: (stages, columns, DEPTH), or (stages, DEPTH, columns) if not transposed.
        ready, free: barriers of the slots.
        visited: slots before this tile's first.
        steps: slots of this tile.
    """
    stages, warpgroup = w_smem.shape[0], lax.axis_index("warpgroup")

    def slot_of(step):
        return lax.rem(visited + step, jnp.int32(stages))

    def multiply(sums):
        def step(k, _):
            slot = slot_of(k)
            plgpu.barrier_wait(ready.at[slot])
            tile_w = w_smem.at[slot].transpose((1, 0)) if transposed else w_smem.at[slot]
            plgpu.wgmma(sums, x_tiles.at[slot, warpgroup], tile_w)
            plgpu.wgmma_wait(1)
            pl.when(k > 0)(lambda: plgpu.barrier_arrive(free.at[slot_of(k - 1)]))

        lax.fori_loop(0, steps, step, None)
        return sums[...]

    sums = pl.run_scoped(multiply, plgpu.ACC((HALF, columns), jnp.float32))
    pl.when(steps > 0)(lambda: plgpu.barrier_arrive(free.at[slot_of(steps - 1)]))
    return sums


def shape(blocks: int, tiles: Tiles) -> dict[str, Any]:
    """Grid of so many blocks or pairs of them, for `launch`."""
    return {"grid": {"blocks": blocks}, "cluster": {"pair": 2} if tiles.pair else None}


def free_slots(tiles: Tiles):
    """Barriers of slots that are used up: where a pair shares what fills them, in both blocks."""
    if tiles.pair:
        return plgpu.ClusterBarrier(collective_axes=("pair",), num_arrivals=WARPGROUPS, num_barriers=tiles.stages)
    return plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=tiles.stages)


def store_buffers(dtype, stores: int = 2):
    """Buffers of each compute warpgroup for store_part: 64 rows of 128 bytes."""
    width = 128 // jnp.dtype(dtype).itemsize
    return plgpu.SMEM((WARPGROUPS, stores, HALF, width), dtype, transforms=swizzled(width, dtype)[1:])


def store_rows(sums, buffers, target, row, column, stored=None):
    """Stores sums (64, columns) to target[row:, column:] in its dtype, through shared memory by the copy engine.

    `stored` is how many rows are, a power of two, or None for all. What lies beyond the target's edge is left out.
    """
    for index in range(parts_of(sums, buffers)):
        store_part(index, sums, buffers, target, row, column, stored)


def parts_of(sums, buffers) -> int:
    """How many parts, each the width of a buffer, a tile is stored in."""
    return sums.shape[1] // buffers.shape[-1]


def store_part(index, sums, buffers, target, row, column, stored=None):
    """Stores the index-th part of a tile, see store_rows; a tile's parts are stored in their order."""
    count, (stores, _, width) = parts_of(sums, buffers), buffers.shape
    buffer = buffers.at[index % stores]
    plgpu.wait_smem_to_gmem(stores_behind(index, count, stores), wait_read_only=True)
    send(sums[:, index * width : (index + 1) * width], buffer, target, row, column + index * width, stored)


def send(values, buffer, target, row, column, stored=None):
    """Stores a buffer's worth of values (64, width) from the buffer, which nothing reads any longer, see store_rows."""
    buffer[...] = values.astype(target.dtype)
    plgpu.commit_smem()

    def copy(rows):
        place = target.at[pl.ds(row, rows), pl.ds(column, buffer.shape[-1])]
        plgpu.copy_smem_to_gmem(buffer.at[pl.ds(0, rows)], place)

    if stored is None:
        copy(HALF)
    else:
        for rows in (HALF >> bit for bit in range(7)):
            pl.when(stored == rows)(lambda rows=rows: copy(rows))


def stores_behind(index: int, count: int, stores: int) -> int:
    """How many parts are stored between the last one that had the index-th part's buffer and this one.

    That one is of the same tile or of the one before, of `count` parts too.
    """
    if index >= stores:
        return stores - 1
    last = index + (count - 1 - index) // stores * stores
    return count - 1 - last + index
