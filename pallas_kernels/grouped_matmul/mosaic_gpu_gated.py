"""The Hopper kernels of gated experts: products of grouped rows whose results are gated before they leave.

Forward, gate and up are the two halves of one tile's columns, so that a warpgroup has both of an element and stores
`silu(gate) * up * weight` beside them. Backward, the product that makes that array's gradient gets gate and up through
four more slots of the ring behind its own and stores their gradients, never that array's. Schedule and tiles are those
of mosaic_gpu_rows.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _platform
from pallas_kernels._hopper import WARPGROUPS, drain, launch, swizzled
from pallas_kernels.grouped_matmul.mosaic_gpu_rows import (
    DEPTH,
    Tiles,
    multiply_slots,
    send,
    store_buffers,
    stores_behind,
)
from pallas_kernels.grouped_matmul.mosaic_gpu_work import COLUMN, COUNT, FIRST, GROUP, HALF, STORED, row_items

PART = 64  # columns that are gated at a time
ARRIVALS = 4  # of a slot: two of rows, two of weights, or two of gate and two of up
LOG2E = math.log2(math.e)
_OF_ROW = plgpu.Layout.WGMMA.reduce(1)


def silu_parts(gate, up):
    """sigmoid(gate), silu(gate) and silu(gate) * up, in f32."""
    gate, up = gate.astype(jnp.float32), up.astype(jnp.float32)
    sigmoid = 1.0 / (1.0 + jnp.exp2(gate * -LOG2E))
    active = gate * sigmoid
    return sigmoid, active, active * up


def gated_rows(xs: Sequence[jax.Array], gates: Sequence[jax.Array], ups: Sequence[jax.Array], weight, sizes, *, tiles):
    """Multiplies each row with its group's weights for gate and for up, and gates.

    Args:
        xs: (M, K), M at least 64, K a multiple of 64, which may differ; 16 bit.
        gates, ups: of each, (E, F, K), F a multiple of 64; x's dtype.
        weight: (M + 64,) f32, that of each row; what stands behind them is read and not used.
        sizes: (E,) rows of each group.
        tiles: sizes; `columns` are half gate's and half up's. No pairs.

    Returns:
        gate, up and `silu(gate) * up * weight`, (M, F) in x's dtype; zeros in rows of no group.
    """
    rows, groups, dtype, width = xs[0].shape[0], len(sizes), xs[0].dtype, gates[0].shape[1]
    depths, half = [x.shape[1] for x in xs], tiles.columns // 2
    _check(rows, depths, width)
    table = row_items(sizes, rows, -(-width // half), tiles.band)

    def load_weights(operand, slot, scratch, group, k, column):
        inner = pl.ds(k * DEPTH, DEPTH)
        for i, ref in enumerate(operand):
            source = ref.at[group, pl.ds(column * half, half), inner]
            plgpu.copy_gmem_to_smem(source, scratch.weights.at[slot, pl.ds(i * half, half)], scratch.ready.at[slot])

    def finish(sums, scratch, refs, place):
        weight_ref, *out_refs = refs
        scale = _by_row(weight_ref, place.first)
        put = _Parts(scratch, place, 3 * half // PART)
        for part in range(half // PART):
            at = part * PART
            gate, up = (sums[:, start : start + PART].astype(dtype) for start in (at, half + at))
            _, _, product = silu_parts(gate, up)
            for value, ref in zip((gate, up, product * scale), out_refs, strict=True):
                put(value, ref, place.column * half + at)

    out = [jax.ShapeDtypeStruct((rows, width), dtype)] * 3
    operands = list(zip(gates, ups, strict=True))
    return _run(xs, operands, (weight,), table, groups, out, load_weights, finish, transposed=True, tiles=tiles)


def gated_gradients(xs: Sequence[jax.Array], ws: Sequence[jax.Array], gate, up, weight, sizes, *, tiles: Tiles):
    """Gradients of gate, up and weight where `silu(gate) * up * weight` has the gradient sum over i of xs[i] @ ws[i].

    Args:
        xs: (M, K), M at least 64, K a multiple of 64, which may differ; 16 bit.
        ws: of each, (E, K, F), F a multiple of 64; x's dtype.
        gate, up: (M, F), x's dtype.
        weight: (M + 64,) f32, likewise.
        sizes: (E,) rows of each group.
        tiles: sizes, at least 128 columns. No pairs.

    Returns:
        Gradients of gate and up, and `silu(gate) * up * weight` once more, (M, F) in x's dtype; of each line of the
        tiles' table and each half of its rows the sums over the tile's columns that make the weight's gradient,
        (lines, 2, 64) f32; the table.
    """
    rows, groups, dtype, width = xs[0].shape[0], len(sizes), xs[0].dtype, gate.shape[1]
    depths, columns = [x.shape[1] for x in xs], tiles.columns
    _check(rows, depths, width)
    table = row_items(sizes, rows, -(-width // columns), tiles.band)

    def load_weights(operand, slot, scratch, group, k, column):
        for i in range(2):
            inner = pl.ds(i * DEPTH // 2, DEPTH // 2)
            source = operand[0].at[
                group, pl.ds(k * DEPTH + i * DEPTH // 2, DEPTH // 2), pl.ds(column * columns, columns)
            ]
            plgpu.copy_gmem_to_smem(source, scratch.weights.at[slot, inner], scratch.ready.at[slot])

    def load_gated(refs, slot, scratch, firsts, part, column):
        for ref, target in ((refs[0], scratch.rows), (refs[1], scratch.others)):
            for half, first in enumerate(firsts):
                source = ref.at[pl.ds(first, HALF), pl.ds(column * columns + part * PART, PART)]
                plgpu.copy_gmem_to_smem(source, target.at[slot, half], scratch.ready.at[slot])

    def finish(sums, scratch, refs, place):
        _, _, weight_ref, dgate_ref, dup_ref, product_ref, dweight_ref = refs
        scale = _by_row(weight_ref, place.first)
        put, total = _Parts(scratch, place, 3 * columns // PART), None
        for part in range(columns // PART):
            slot = place.slot_of(part)
            plgpu.barrier_wait(scratch.ready.at[slot])
            gate, up = (
                plgpu.load(tiled.at[slot, place.warpgroup], layout=plgpu.Layout.WGMMA).astype(jnp.float32)
                for tiled in (scratch.tiles, scratch.other_tiles)
            )
            sigmoid, active, product = silu_parts(gate, up)
            d = sums[:, part * PART : (part + 1) * PART]
            sum_of_part = jnp.sum(d * product, axis=1)
            total = sum_of_part if total is None else total + sum_of_part
            d = d * scale
            dgate = d * up * (sigmoid + active * (1.0 - sigmoid))
            at = place.column * columns + part * PART
            put(dgate, dgate_ref, at)
            plgpu.barrier_arrive(scratch.free.at[slot])  # behind a store's fence, as the copy engine writes there next
            put(d * active, dup_ref, at)
            put(product * scale, product_ref, at)
        dweight_ref[place.line, place.warpgroup] = total

    like = jax.ShapeDtypeStruct((rows, width), dtype)
    partial = jax.ShapeDtypeStruct((table.shape[0], WARPGROUPS, HALF), jnp.float32)
    out = [like, like, like, partial]
    results = _run(
        xs, [(w,) for w in ws], (gate, up, weight), table, groups, out, load_weights, finish, load_gated,
        transposed=False, tiles=tiles,
    )  # fmt: skip
    return *results, table


class _Parts:
    """Stores a warpgroup's `count` parts of a tile one after the other, from its buffers in turn."""

    def __init__(self, scratch, place, count: int):
        self._buffers, self._place, self._count, self._index = scratch.buffers.at[place.warpgroup], place, count, 0

    def __call__(self, values, target, column):
        stores, index = self._buffers.shape[0], self._index
        plgpu.wait_smem_to_gmem(stores_behind(index, self._count, stores), wait_read_only=True)
        send(values, self._buffers.at[index % stores], target, self._place.first, column, self._place.stored)
        self._index += 1


def _check(rows: int, depths: Sequence[int], width: int) -> None:
    if rows < HALF or any(depth % DEPTH for depth in depths) or width % DEPTH:
        raise ValueError(f"M={rows} must be at least {HALF}, K={depths} and F={width} multiples of {DEPTH}; pad them")


def _by_row(ref, first):
    """The numbers of 64 rows, for each of a part's columns."""
    values = plgpu.load(ref.at[pl.ds(first, HALF)], layout=_OF_ROW, optimized=False)
    return lax.broadcast_in_dim(values, (HALF, PART), [0])


def _run(
    xs, operands, more, table, groups, out, load_weights, finish, load_gated=None, *, transposed: bool, tiles: Tiles
):
    """The schedule of group_rows around what is loaded of the weights and what is done with a tile's sums.

    Args:
        xs: rows of each product.
        operands: of each product the arrays that load_weights copies from.
        more: arrays for load_gated and finish.
        table: of tiles.
        groups: E.
        out: shapes of the results.
        load_weights: (operand, slot, scratch, group, k, column) -> None, two copies into a slot.
        finish: (sums, scratch, (*more, *out), place) -> None, does with a tile's sums what is to be done.
        load_gated: (more, slot, scratch, firsts, part, column) -> None, four copies into a slot behind the products',
            for each part of a tile's columns; `finish` takes those slots. None: there are none.
        transposed: whether the weights' last axis is the one that is summed over.
        tiles: sizes.
    """
    if tiles.pair:
        raise ValueError("gated products have no pairs of blocks")
    dtype, columns, stages = xs[0].dtype, tiles.columns, tiles.stages
    depths, flat = [x.shape[1] for x in xs], [array for operand in operands for array in operand]
    parts = 0 if load_gated is None else columns // PART
    blocks = min(table.shape[0], tiles.blocks or _platform.multiprocessors())

    def kernel(refs, scratch):
        x_refs, refs = refs[: len(xs)], refs[len(xs) :]
        flat_refs, refs = list(refs[: len(flat)]), refs[len(flat) :]
        operand_refs = [[flat_refs.pop(0) for _ in operand] for operand in operands]
        table_ref, refs = refs[len(more)], [*refs[: len(more)], *refs[len(more) + 1 :]]
        scratch = _Scratch.of(scratch, tiles.staged, parts > 0)
        ready, free = scratch.ready, scratch.free
        block, warpgroup = lax.axis_index("blocks"), lax.axis_index("warpgroup")
        mine = lax.div(table_ref[0, COUNT] - block + (blocks - 1), jnp.int32(blocks))

        def item(n, *fields):
            """This block's n-th line of the table and fields of it: read a tile early."""
            line = jnp.minimum(block + n * blocks, table.shape[0] - 1)
            return line, *(table_ref[line, field] for field in (GROUP, COLUMN, *fields))

        def products_of(group):
            return jnp.where(group < groups, sum(depths) // DEPTH, 0)

        @pl.when(warpgroup < WARPGROUPS)
        def _compute():
            plgpu.set_max_registers(232, action="increase")
            fields = FIRST + warpgroup, STORED + warpgroup

            def tile(n, carry):
                visited, (line, group, column, first, stored) = carry
                steps, following = products_of(group), item(n + 1, *fields)

                def slot_of(part):
                    return lax.rem(visited + steps + part, jnp.int32(stages))

                @pl.when(stored > 0)
                def _multiply():
                    sums = multiply_slots(
                        scratch.tiles, scratch.weights, ready, free, visited, steps, columns, transposed
                    )
                    place = _Place(line, column, first, stored, warpgroup, slot_of)
                    finish(sums, scratch, refs, place)

                @pl.when(stored == 0)
                def _pass():
                    def step(k, _):
                        slot = lax.rem(visited + k, jnp.int32(stages))
                        plgpu.barrier_wait(ready.at[slot])
                        plgpu.barrier_arrive(free.at[slot])

                    lax.fori_loop(0, steps + parts, step, None)

                return visited + steps + parts, following

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
                        plgpu.copy_gmem_to_smem(source, scratch.rows.at[slot, half], ready.at[slot])
                    load_weights(operand, slot, scratch, group, k, column)

                before = jnp.int32(0)
                for x_ref, operand, depth in zip(x_refs, operand_refs, depths, strict=True):
                    count = jnp.where(group < groups, depth // DEPTH, 0)
                    one = functools.partial(load, x_ref=x_ref, operand=operand, before=before)
                    lax.fori_loop(0, count, one, None)
                    before += count

                if load_gated is not None:

                    def load_part(part, _):
                        load_gated(refs, next_slot(visited + steps + part), scratch, firsts, part, column)

                    lax.fori_loop(0, parts, load_part, None)
                return visited + steps + parts, following

            visited, _ = lax.fori_loop(0, mine, tile, (jnp.int32(0), item(0, FIRST, FIRST + 1)))
            drain(visited, stages, free)

    return launch(
        kernel,
        _Scratch.types(dtype, tiles, transposed, parts > 0),
        *(*xs, *flat, *more, table),
        out_type=out,
        grid={"blocks": blocks},
        reduction_bytes=0,
    )


class _Place(NamedTuple):
    """Where a warpgroup's tile is: its line of the table, its column, its first row and how many are stored."""

    line: Any
    column: Any
    first: Any
    stored: Any
    warpgroup: Any
    slot_of: Any  # of the tile's parts of gate and up


class _Scratch(NamedTuple):
    """Shared memory and barriers.

    The copy engine must not see tiles of 8 rows, between which it could not start; the tensor cores must: `rows` and
    `tiles` are two views, of the weights' slots `others` and `other_tiles` two more. The interpreter knows none.
    """

    rows: Any
    tiles: Any
    weights: Any
    others: Any
    other_tiles: Any
    buffers: Any
    ready: Any
    free: Any

    @classmethod
    def types(cls, dtype, tiles: Tiles, transposed: bool, gated: bool):
        """What `of` takes apart."""
        stages, columns = tiles.stages, tiles.columns
        half, w_tile = (stages, WARPGROUPS, HALF, DEPTH), (columns, DEPTH) if transposed else (DEPTH, columns)
        as_tiles = plgpu.SMEM(half, dtype, transforms=swizzled(DEPTH))
        as_rows = plgpu.SMEM(half, dtype, transforms=swizzled(DEPTH)[1:])
        weights = plgpu.SMEM((stages, *w_tile), dtype, transforms=swizzled(w_tile[1]))
        if gated and not tiles.staged:
            slots = stages, columns // PART, HALF, DEPTH  # a slot's bytes, of which the first two 64 rows are used
            views = (plgpu.SMEM(slots, dtype, transforms=swizzled(DEPTH)[first:]) for first in (1, 0))
            weights = plgpu.RefUnion(weights, *views)
        return (
            as_tiles if tiles.staged else plgpu.RefUnion(as_rows, as_tiles),
            weights,
            as_tiles if gated and tiles.staged else None,
            store_buffers(dtype, tiles.stores),
            plgpu.Barrier(num_arrivals=ARRIVALS, num_barriers=stages),
            plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
        )

    @classmethod
    def of(cls, scratch, staged: bool, gated: bool):
        """The scratch of a kernel."""
        x_smem, w_smem, others, *rest = scratch
        rows, tiles = (x_smem, x_smem) if staged else x_smem
        others, other_tiles = (others, others) if staged or not gated else w_smem[1:]
        return cls(rows, tiles, w_smem[0] if gated and not staged else w_smem, others, other_tiles, *rest)
