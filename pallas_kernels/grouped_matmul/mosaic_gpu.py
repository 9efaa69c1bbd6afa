"""Grouped products by this project's Hopper kernels: what they refuse, padding, and sizes of tiles."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jaxtyping import Array, Float, Int

from pallas_kernels import _platform
from pallas_kernels._hopper import WARPGROUPS, padded, run_once
from pallas_kernels._tiles import DEPTH, HALF, Tiles
from pallas_kernels.grouped_matmul import mosaic_gpu_narrow
from pallas_kernels.grouped_matmul.mosaic_gpu_gated import gated_gradients, gated_rows
from pallas_kernels.grouped_matmul.mosaic_gpu_rows import group_rows
from pallas_kernels.grouped_matmul.mosaic_gpu_weights import ALIGNED, group_weights
from pallas_kernels.grouped_matmul.mosaic_gpu_work import places_of_rows

SHARED = 196_608  # bytes of shared memory for slots; the rest holds results on their way out, and barriers
COLUMNS = (256, 192, 128, 64)
MOST_STAGES = 8
# Traced and lowered once for each set of shapes, of which a layer has few.
_group_rows = jax.jit(group_rows, static_argnames=("transposed", "tiles"))
_group_weights = jax.jit(group_weights, static_argnames=("dtype", "tiles"))
_narrow_products = jax.jit(mosaic_gpu_narrow.narrow_products, static_argnames=("tiles",))
_NARROW = (256, 128)  # columns of a warpgroup in passes for adapters
_gated_rows = jax.jit(gated_rows, static_argnames=("tiles",))
_gated_gradients = jax.jit(gated_gradients, static_argnames=("tiles",))


def refuses(x: Array | jax.ShapeDtypeStruct, w: Array | jax.ShapeDtypeStruct) -> str | None:
    """Return why the kernels cannot do these arguments on the default device, or None."""
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it needs bfloat16 or float16, and x is {x.dtype}"
    if 0 in w.shape:
        return f"there is nothing to multiply with weights of shape {w.shape}"
    return _platform.why_not_hopper()


def forward(
    x: Float[Array, "M D"], w: Float[Array, "E F D"], sizes: Int[Array, " E"], *, staged: bool = False
) -> Float[Array, "M F"]:
    """Return x[m] @ w[e].T for every row m of group e, 0 for rows of no group, in x.dtype.

    `staged` is for the interpreter, see Tiles. Widths that are no multiple of 64 are padded, which copies x and w.
    """
    return products((x,), (w,), sizes, transposed=True, staged=staged)


def backward_x(
    dy: Float[Array, "M F"], w: Float[Array, "E F D"], sizes: Int[Array, " E"], *, staged: bool = False
) -> Float[Array, "M D"]:
    """Return the gradient of x, dy[m] @ w[e], in dy.dtype."""
    return products((dy,), (w,), sizes, transposed=False, staged=staged)


def products(
    xs: Sequence[Array], ws: Sequence[Array], sizes: Int[Array, " E"], *, transposed: bool, staged: bool = False
) -> Float[Array, "M F"]:
    """Return the sum over i of xs[i][m] @ ws[i][e].T, or @ ws[i][e] if not transposed, rounded once to x's dtype."""
    rows, dtype = len(xs[0]), xs[0].dtype
    axis = 1 if transposed else 2
    width = ws[0].shape[axis]
    xs = tuple(padded(x, _row_count(rows, 1), DEPTH) for x in xs)
    ws = tuple(padded(w.astype(dtype), 1, DEPTH, DEPTH) for w in ws)
    kernel = functools.partial(_group_rows, transposed=transposed, tiles=tiles_of(ws[0].shape[axis], staged))
    return run_once(sequential_vmap(kernel)(xs, ws, sizes))[:rows, :width]


def backward_w(
    x: Float[Array, "M D"], dy: Float[Array, "M F"], sizes: Int[Array, " E"], dtype: jnp.dtype, *, staged: bool = False
) -> Float[Array, "E F D"]:
    """Return the gradient of w, the sum of dy[m] x[m].T over each group's rows, summed in f32."""
    narrow = dtype if dtype in (jnp.bfloat16, jnp.float16, jnp.float32) else jnp.dtype(jnp.float32)
    width, height = x.shape[1], dy.shape[1]
    x, dy = (padded(array, _row_count(len(array), ALIGNED), DEPTH) for array in (x, dy))
    kernel = functools.partial(_group_weights, dtype=narrow, tiles=tiles_of(x.shape[1], staged))
    return sequential_vmap(kernel)(x, dy, sizes)[:, :height, :width].astype(dtype)


def gated(
    xs: Sequence[Array],
    gates: Sequence[Array],
    ups: Sequence[Array],
    weight: Float[Array, " M"],
    sizes,
    *,
    staged=False,
) -> tuple[Array, Array, Array]:
    """Return gate, up and `silu(gate) * up * weight`, (M, F).

    gate[m] is the sum over i of xs[i][m] @ gates[i][e].T, up likewise; both are rounded to x's dtype first.
    """
    rows, width = len(xs[0]), gates[0].shape[1]
    xs = tuple(padded(x, _row_count(rows, 1), DEPTH) for x in xs)
    gates, ups = (tuple(padded(w.astype(xs[0].dtype), 1, DEPTH, DEPTH) for w in ws) for ws in (gates, ups))
    kernel = functools.partial(_gated_rows, tiles=_gated_tiles(256, staged))
    results = run_once(sequential_vmap(kernel)(xs, gates, ups, _weights(weight, len(xs[0])), sizes))
    gate, up, product = (result[:rows, :width] for result in results)
    return gate, up, product


def gated_backward(
    xs: Sequence[Array], ws: Sequence[Array], gate: Array, up: Array, weight: Float[Array, " M"], sizes, *, staged=False
) -> tuple[Array, Array, Array, Float[Array, " M"]]:
    """Return gradients of gate and up, `silu(gate) * up * weight`, and the gradient of weight.

    That product's gradient is the sum over i of xs[i][m] @ ws[i][e], in f32.
    """
    rows, width = gate.shape
    xs = tuple(padded(x, _row_count(rows, 1), DEPTH) for x in xs)
    ws = tuple(padded(w.astype(gate.dtype), 1, DEPTH, DEPTH) for w in ws)
    gate, up = (padded(array, _row_count(rows, 1), DEPTH) for array in (gate, up))
    tiles = _gated_tiles(max(tiles_of(width, staged).columns, 128), staged)

    def kernel(xs, ws, gate, up, weight, sizes):
        *results, partial, table = _gated_gradients(xs, ws, gate, up, weight, sizes, tiles=tiles)
        lines, half, place = places_of_rows(table, sizes, len(gate), -(-gate.shape[1] // tiles.columns), tiles.band)
        return *results, jnp.sum(partial[lines, half[:, None], place[:, None]], axis=1)

    results = run_once(sequential_vmap(kernel)(xs, ws, gate, up, _weights(weight, len(gate)), sizes))
    dgate, dup, product = (result[:rows, :width] for result in results[:3])
    return dgate, dup, product, results[3][:rows]


class _Narrow:
    """Passes over a wide array for an adapter's low product and for its factor's gradient."""

    @staticmethod
    def fits(x: Array, rank: int) -> bool:
        """Whether the kernel takes an x of this shape, and this rank."""
        whole = x.shape[0] % mosaic_gpu_narrow.ALIGNED == 0 and x.shape[1] % (WARPGROUPS * _NARROW[-1]) == 0
        return whole and rank <= mosaic_gpu_narrow.MAX_RANK

    def __call__(
        self, x: Float[Array, "M N"], b: Float[Array, "E N R"], low: Float[Array, "M R"], sizes: Int[Array, " E"]
    ) -> tuple[Float[Array, "M R"], Float[Array, "E N R"]]:
        """Return `x[m] @ b[e]`, and the sum of x[m].T low[m] over each group's rows, in f32, by one pass over x.

        x must be finite in rows of no group too.
        """
        columns = next(columns for columns in _NARROW if x.shape[1] % (WARPGROUPS * columns) == 0)
        kernel = functools.partial(_narrow_products, tiles=mosaic_gpu_narrow.NarrowTiles(columns))
        b, wide_low = (padded(array, *[1] * (array.ndim - 1), mosaic_gpu_narrow.ALIGNED) for array in (b, low))
        # In one dimension, as compilers else give all layers' b another layout for this: a copy before the loop.
        flat = jax.lax.optimization_barrier(b.astype(x.dtype).reshape(-1))
        product, gradient = run_once(sequential_vmap(kernel)(x, flat.reshape(b.shape).swapaxes(1, 2), wide_low, sizes))
        return product[:, : low.shape[1]], gradient[..., : low.shape[1]]


narrow = _Narrow()


def _weights(weight: Array, rows: int) -> Array:
    """Each row's weight, and room for reading 64 behind every row."""
    return jnp.pad(weight.astype(jnp.float32), (0, rows + HALF - len(weight)))


def _gated_tiles(columns: int, staged: bool) -> Tiles:
    stages = SHARED // (2 * DEPTH * (2 * HALF + columns))
    if staged:
        return Tiles(columns, stages=3, blocks=2, staged=True)
    return Tiles(columns, min(MOST_STAGES, stages), blocks=_platform.multiprocessors())


def tiles_of(width: int, staged: bool) -> Tiles:
    """Tile sizes for a result of `width` columns.

    A tile of c columns costs as c + 64: wider ones read less for each product, but may reach beyond the edge.
    """
    columns = min(COLUMNS, key=lambda c: -(-width // c) * (c + 64))
    stages = min(MOST_STAGES, SHARED // (2 * DEPTH * (2 * HALF + columns)))
    # few blocks in the interpreter, so that it meets one with several tiles, and few slots, so that it reuses them
    if staged:
        return Tiles(columns, stages=3, blocks=2, staged=True)
    return Tiles(columns, stages, blocks=_platform.multiprocessors())


def _row_count(rows: int, multiple: int) -> int:
    """What the rows must be a multiple of: at least HALF of them, as copies have fixed sizes."""
    return HALF if rows < HALF else multiple
