"""Tiles of products on Hopper: sizes, their order, what a warpgroup sums from a ring of slots, how results leave.

A tile is 128 rows by some columns. Two compute warpgroups own 64 rows each, with their sums in registers; results go
through buffers in shared memory, which the copy engine stores while the next ones are made.

Tiles are walked in bands of BAND tiles along the rows, down each column of a band: what the multiprocessors read at a
time is then about square and stays in the L2 cache, and the right operand is read once a band.
"""

import dataclasses
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels._hopper import WARPGROUPS, swizzled

DEPTH = 64  # of a slot: 128 bytes, the widest swizzle
HALF = 64  # rows of a tile that one warpgroup owns
ROWS = 2 * HALF
BAND = 16


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Tile sizes and schedule.

    Attributes:
        columns: of a tile.
        stages: slots of the ring.
        band: tiles along the rows of a band, see above.
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

    @property
    def team(self) -> int:
        """Blocks that take one line of the table, each a tile of its columns."""
        return 2 if self.pair else 1


def walk(index, rows, columns, band=BAND):
    """The place (row, column) of the `index`-th of rows * columns tiles; int32 arrays or numbers of one shape."""
    above = lax.div(index, band * columns) * band
    height = jnp.minimum(rows - above, band)
    within = index - above * columns
    return above + lax.rem(within, height), lax.div(within, height)


def multiply_slots(x_tiles, w_smem, ready, free, visited, steps, columns: int, transposed: bool, beside=()):
    """The sums (64, columns) of a warpgroup's next products, one a slot of the ring; frees each slot behind it.

    Args:
        x_tiles: (stages, WARPGROUPS, 64, DEPTH).
        w_smem: (stages, columns, DEPTH), or (stages, DEPTH, columns) if not transposed.
        ready, free: barriers of the slots.
        visited: slots before this tile's first.
        steps: slots of this tile.
        beside: functions to call while the first slots' products run, one a slot; no more than there are steps.
    """
    stages, warpgroup = w_smem.shape[0], lax.axis_index("warpgroup")

    def slot_of(step):
        return lax.rem(visited + step, jnp.int32(stages))

    def multiply(sums):
        def step(k, do=None):
            slot = slot_of(k)
            plgpu.barrier_wait(ready.at[slot])
            tile_w = w_smem.at[slot].transpose((1, 0)) if transposed else w_smem.at[slot]
            plgpu.wgmma(sums, x_tiles.at[slot, warpgroup], tile_w)
            if do is not None:
                do()
            plgpu.wgmma_wait(1)
            pl.when(k > 0)(lambda: plgpu.barrier_arrive(free.at[slot_of(k - 1)]))

        for k, do in enumerate(beside):
            step(k, do)
        lax.fori_loop(len(beside), steps, lambda k, _: step(k), None)
        return sums[...]

    sums = pl.run_scoped(multiply, plgpu.ACC((HALF, columns), jnp.float32))
    pl.when(steps > 0)(lambda: plgpu.barrier_arrive(free.at[slot_of(steps - 1)]))
    return sums


def shape(blocks: int, tiles: Tiles) -> dict[str, Any]:
    """Grid of so many blocks or pairs of them, for `launch`."""
    return {"grid": {"blocks": blocks}, "cluster": {"pair": 2} if tiles.pair else None}


def left_slots(dtype, tiles: Tiles):
    """Slots of the left operand, (stages, WARPGROUPS, 64, DEPTH), for `left_views` to tell apart."""
    slots = tiles.stages, WARPGROUPS, HALF, DEPTH
    as_rows, as_tiles = (plgpu.SMEM(slots, dtype, transforms=swizzled(DEPTH)[first:]) for first in (1, 0))
    return as_tiles if tiles.staged else plgpu.RefUnion(as_rows, as_tiles)


def left_views(slots, tiles: Tiles):
    """The same memory as copies fill it, of arrays with any number of rows, and as products read it."""
    return (slots, slots) if tiles.staged else slots


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
        return
    pl.when(stored == HALF)(lambda: copy(HALF))

    @pl.when(stored < HALF)
    def _part():
        for bit in range(1, 7):
            pl.when(stored == HALF >> bit)(lambda rows=HALF >> bit: copy(rows))


def stores_behind(index: int, count: int, stores: int) -> int:
    """How many parts are stored between the last one that had the index-th part's buffer and this one.

    That one is of the same tile or of the one before, of `count` parts too.
    """
    if index >= stores:
        return stores - 1
    last = index + (count - 1 - index) // stores * stores
    return count - 1 - last + index
