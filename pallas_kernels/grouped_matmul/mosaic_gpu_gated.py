"""The Hopper kernels of gated experts: products of grouped rows whose results are gated before they leave.

Forward, gate and up are the two halves of one tile's columns, so that a warpgroup has both of an element and stores
`silu(gate) * up * weight` beside them. Backward, the product that makes that array's gradient gets gate and up through
four more slots of the ring behind its own and stores their gradients, never that array's. Schedule and tiles are those
of mosaic_gpu_schedule.
"""

import math
from collections.abc import Sequence

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels._hopper import WARPGROUPS, by_assembly, number, rounded
from pallas_kernels._tiles import DEPTH, HALF, Tiles, send, stores_behind
from pallas_kernels.grouped_matmul.mosaic_gpu_schedule import check, run
from pallas_kernels.grouped_matmul.mosaic_gpu_work import row_items

PART = 64  # columns that are gated at a time
COPIES = 2  # of weights a slot, so that there are as many as of gate and up
LOG2E = math.log2(math.e)
SIGMOID = (  # a division takes five instructions more
    f"{{ .reg .f32 e; mul.rn.f32 e, $1, {number(-LOG2E)}; ex2.approx.ftz.f32 e, e; "
    f"add.rn.f32 e, e, {number(1.0)}; rcp.approx.ftz.f32 $0, e; }}"
)
_OF_ROW = plgpu.Layout.WGMMA.reduce(1)


def silu_parts(gate, up, *, staged: bool):
    """sigmoid(gate), silu(gate) and silu(gate) * up, in f32; `staged` is for the interpreter."""
    gate, up = gate.astype(jnp.float32), up.astype(jnp.float32)
    sigmoid = 1.0 / (1.0 + jnp.exp2(gate * -LOG2E)) if staged else by_assembly(SIGMOID, gate)
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
    rows, dtype, width = xs[0].shape[0], xs[0].dtype, gates[0].shape[1]
    half = tiles.columns // 2
    _check(xs, width, tiles)
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
            gate, up = (sums[:, start : start + PART] for start in (at, half + at))
            gate, up = (one.astype(dtype) if tiles.staged else rounded(one, dtype) for one in (gate, up))
            _, _, product = silu_parts(gate, up, staged=tiles.staged)
            for value, ref in zip((gate, up, product * scale), out_refs, strict=True):
                put(value, ref, place.column * half + at)

    return run(
        xs,
        list(zip(gates, ups, strict=True)),
        (weight,),
        table,
        len(sizes),
        out=[jax.ShapeDtypeStruct((rows, width), dtype)] * 3,
        load_weights=load_weights,
        finish=finish,
        copies=COPIES,
        transposed=True,
        tiles=tiles,
    )


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
    rows, dtype, width = xs[0].shape[0], xs[0].dtype, gate.shape[1]
    columns = tiles.columns
    _check(xs, width, tiles)
    table = row_items(sizes, rows, -(-width // columns), tiles.band)

    def load_weights(operand, slot, scratch, group, k, column):
        for i in range(COPIES):
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
            sigmoid, active, product = silu_parts(gate, up, staged=tiles.staged)
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
    results = run(
        xs,
        [(w,) for w in ws],
        (gate, up, weight),
        table,
        len(sizes),
        out=[like, like, like, partial],
        load_weights=load_weights,
        finish=finish,
        load_behind=load_gated,
        behind=columns // PART,
        copies=COPIES,
        transposed=False,
        tiles=tiles,
    )
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


def _check(xs: Sequence[jax.Array], width: int, tiles: Tiles) -> None:
    if tiles.pair:
        raise ValueError("gated products have no pairs of blocks")
    check(xs, width)


def _by_row(ref, first):
    """The numbers of 64 rows, for each of a part's columns."""
    values = plgpu.load(ref.at[pl.ds(first, HALF)], layout=_OF_ROW, optimized=False)
    return lax.broadcast_in_dim(values, (HALF, PART), [0])
