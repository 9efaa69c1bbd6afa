"""The schedule of products whose rows are grouped, whatever is done with a tile's sums.

Two compute warpgroups own 64 rows of a tile each; a third streams slots of 64 along the contraction through shared
memory, into the next tile while this one is stored. There are as many blocks as multiprocessors, and each does every
`blocks`-th tile of the table of mosaic_gpu_work.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _platform
from pallas_kernels._hopper import WARPGROUPS, drain, launch, swizzled
from pallas_kernels._tiles import (
    DEPTH,
    HALF,
    Tiles,
    free_slots,
    left_slots,
    left_views,
    multiply_slots,
    shape,
    store_buffers,
)
from pallas_kernels.grouped_matmul.mosaic_gpu_work import COLUMN, COUNT, FIRST, GROUP, STORED


class Place(NamedTuple):
    """Where a warpgroup's tile is.

    Attributes:
        line: of the table.
        column: in tiles.
        first: row.
        stored: how many rows are, from the first on.
        warpgroup: that owns them.
        slot_of: the slot of the ring that has the i-th of what comes behind the tile's products.
    """

    line: Any
    column: Any
    first: Any
    stored: Any
    warpgroup: Any
    slot_of: Any


class Scratch(NamedTuple):
    """Shared memory and barriers.

    The copy engine must not see tiles of 8 rows, between which it could not start; the tensor cores must: `rows` and
    `tiles` are two views, and so are `others` and `other_tiles`, of the weights' slots. The interpreter knows no views.
    """

    rows: Any
    tiles: Any
    weights: Any
    others: Any
    other_tiles: Any
    buffers: Any
    ready: Any
    free: Any


def check(xs: Sequence[jax.Array], width: int) -> None:
    """Refuses shapes that the copies do not fit."""
    rows, depths = xs[0].shape[0], [x.shape[1] for x in xs]
    if rows < HALF or any(depth % DEPTH for depth in depths) or width % DEPTH:
        raise ValueError(f"M={rows} must be at least {HALF}, K={depths} and N={width} multiples of {DEPTH}; pad them")


def run(
    xs: Sequence[jax.Array],
    operands: Sequence[tuple[jax.Array, ...]],
    more: Sequence[jax.Array],
    table: jax.Array,
    groups: int,
    *,
    out,
    load_weights,
    finish,
    load_behind=None,
    behind: int = 0,
    copies: int = 1,
    transposed: bool,
    tiles: Tiles,
):
    """Runs a kernel that sums, for each tile, products of rows with their group's weights.

    Args:
        xs: rows of each product, (M, K) with K a multiple of 64.
        operands: of each product the arrays that load_weights copies from.
        more: arrays for load_behind and finish.
        table: of tiles, see row_items.
        groups: E.
        out: shapes of the results.
        load_weights: (operand, slot, scratch, group, k, column) -> None, `copies` copies into a slot.
        finish: (sums, scratch, (*more, *out), place) -> None, does with a tile's sums what is to be done.
        load_behind: (more, slot, scratch, firsts, i, column) -> None, as many copies as a slot of products takes, into
            the i-th of `behind` slots behind the products'; `finish` waits for those slots and frees them.
        behind: how many such slots a tile has.
        copies: of weights a slot.
        transposed: whether the weights' last axis is the one that is summed over.
        tiles: sizes.
    """
    dtype, columns, stages = xs[0].dtype, tiles.columns, tiles.stages
    depths, flat = [x.shape[1] for x in xs], [array for operand in operands for array in operand]
    blocks = min(table.shape[0], (tiles.blocks or _platform.multiprocessors()) // tiles.team)
    shared = "pair" if tiles.pair else None

    def kernel(refs, scratch):
        x_refs, refs = refs[: len(xs)], refs[len(xs) :]
        flat_refs, refs = list(refs[: len(flat)]), refs[len(flat) :]
        operand_refs = [[flat_refs.pop(0) for _ in operand] for operand in operands]
        table_ref, refs = refs[len(more)], [*refs[: len(more)], *refs[len(more) + 1 :]]
        scratch = _scratch(scratch, tiles, behind)
        ready, free = scratch.ready, scratch.free
        block, warpgroup = lax.axis_index("blocks"), lax.axis_index("warpgroup")
        mine = lax.div(table_ref[0, COUNT] - block + (blocks - 1), jnp.int32(blocks))

        def item(n, *fields):
            """This block's n-th line of the table and fields of it: read a tile early, as that takes a microsecond."""
            line = jnp.minimum(block + n * blocks, table.shape[0] - 1)
            place = lax.axis_index("pair") if tiles.pair else 0
            column = table_ref[line, COLUMN] * tiles.team + place
            return line, table_ref[line, GROUP], column, *(table_ref[line, field] for field in fields)

        def products_of(group):
            return jnp.where(group < groups, sum(depths) // DEPTH, 0)

        @pl.when(warpgroup < WARPGROUPS)
        def _compute():
            plgpu.set_max_registers(232, action="increase")
            fields = FIRST + warpgroup, STORED + warpgroup

            def tile(n, carry):
                visited, (line, group, column, first, stored) = carry
                steps, following = products_of(group), item(n + 1, *fields)

                def slot_of(step):
                    return lax.rem(visited + step, jnp.int32(stages))

                @pl.when(stored > 0)
                def _multiply():
                    sums = multiply_slots(
                        scratch.tiles, scratch.weights, ready, free, visited, steps, columns, transposed
                    )
                    place = Place(line, column, first, stored, warpgroup, lambda i: slot_of(steps + i))
                    finish(sums, scratch, refs, place)

                @pl.when(stored == 0)
                def _pass():
                    def step(k, _):
                        plgpu.barrier_wait(ready.at[slot_of(k)])
                        plgpu.barrier_arrive(free.at[slot_of(k)])

                    lax.fori_loop(0, steps + behind, step, None)

                return visited + steps + behind, following

            lax.fori_loop(0, mine, tile, (jnp.int32(0), item(0, *fields)))
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == WARPGROUPS)
        def _feed():
            plgpu.set_max_registers(40, action="decrease")

            def tile(n, carry):
                visited, (_, group, column, *firsts) = carry
                steps, following = products_of(group), item(n + 1, FIRST, FIRST + 1)

                def next_slot(turn):
                    slot = lax.rem(turn, jnp.int32(stages))
                    pl.when(turn >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))
                    return slot

                def load(k, _, x_ref, operand, before):
                    slot = next_slot(visited + before + k)
                    for half, first in enumerate(firsts):
                        source = x_ref.at[pl.ds(first, HALF), pl.ds(k * DEPTH, DEPTH)]
                        target = scratch.rows.at[slot, half]
                        plgpu.copy_gmem_to_smem(source, target, ready.at[slot], collective_axes=shared)
                    load_weights(operand, slot, scratch, group, k, column)

                before = jnp.int32(0)
                for x_ref, operand, depth in zip(x_refs, operand_refs, depths, strict=True):
                    count = jnp.where(group < groups, depth // DEPTH, 0)
                    one = functools.partial(load, x_ref=x_ref, operand=operand, before=before)
                    lax.fori_loop(0, count, one, None)
                    before += count

                if load_behind is not None:

                    def load_one(i, _):
                        load_behind(refs, next_slot(visited + steps + i), scratch, firsts, i, column)

                    lax.fori_loop(0, behind, load_one, None)
                return visited + steps + behind, following

            visited, _ = lax.fori_loop(0, mine, tile, (jnp.int32(0), item(0, FIRST, FIRST + 1)))
            drain(visited, stages, free)

    types = _scratch_types(dtype, tiles, copies, transposed, behind)
    return launch(kernel, types, *(*xs, *flat, *more, table), out_type=out, reduction_bytes=0, **shape(blocks, tiles))


def _scratch_types(dtype, tiles: Tiles, copies: int, transposed: bool, behind: int):
    """What `_scratch` takes apart."""
    stages, columns = tiles.stages, tiles.columns
    w_tile = (columns, DEPTH) if transposed else (DEPTH, columns)
    weights = plgpu.SMEM((stages, *w_tile), dtype, transforms=swizzled(w_tile[1]))
    if behind and not tiles.staged:
        slots = stages, columns // HALF, HALF, DEPTH  # a slot's bytes, of which the first two 64 rows are used
        views = (plgpu.SMEM(slots, dtype, transforms=swizzled(DEPTH)[first:]) for first in (1, 0))
        weights = plgpu.RefUnion(weights, *views)
    return (
        left_slots(dtype, tiles),
        weights,
        left_slots(dtype, tiles) if behind and tiles.staged else None,
        store_buffers(dtype, tiles.stores),
        plgpu.Barrier(num_arrivals=WARPGROUPS + copies, num_barriers=stages),
        free_slots(tiles),
    )


def _scratch(scratch, tiles: Tiles, behind: int) -> Scratch:
    x_smem, w_smem, others, *rest = scratch
    as_rows, as_tiles = left_views(x_smem, tiles)
    shared = behind and not tiles.staged
    others, other_tiles = w_smem[1:] if shared else (others, others)
    return Scratch(as_rows, as_tiles, w_smem[0] if shared else w_smem, others, other_tiles, *rest)
