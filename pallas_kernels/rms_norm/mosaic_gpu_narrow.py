"""RMSNorm of short rows on Hopper: heads' norms, and widths that a warpgroup does not share out by 16 bytes a thread.

As in mosaic_gpu.py, but that a warpgroup of 128 threads takes some rows at a time: 8 to 32 neighbouring threads a row,
in pieces of 16 bytes each, so that a row's sum needs shuffles alone; of 8 bytes where the scale's gradient is summed,
whose part a thread keeps. Rows are seen as groups of those that a warp takes: arrays in the kernels are
(4 warps, rows, D).
"""

import functools
import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from pallas_kernels import _platform
from pallas_kernels._hopper import launch_alone
from pallas_kernels._lanes import PARAMS, load, spread, tiled
from pallas_kernels.rms_norm import reference

MULTIPLE, WIDEST = 64, 1152  # of widths; a thread has at most 72 elements of a row
_VECTOR, _VECTOR_SUMMED, _WARPS, _LANES = 8, 4, 4, 32
_SHARE = 32  # elements that a thread takes at least, of as many rows as have them
_STAYING = 12, 8  # warps of a multiprocessor that stay and sum: with at most _SHARE elements a thread, and with more


def rows_at_a_time(width: int, vector: int = _VECTOR) -> int:
    """Rows whose pieces of so many elements the threads hold at a time; a block takes a multiple of them."""
    return _WARPS * _LANES // _threads(width, vector)


def forward(arrays: tuple[Array, ...], scale: Array, eps: float, room: int) -> tuple[Array, Array, Array]:
    """Normalises rows (M, D), or the sum of two, rounded: that sum, the result (M, D + room), and rrms (M,)."""
    (rows, width), dtype = arrays[0].shape, arrays[0].dtype
    of_warp = _rows_of_warp(rows, width, _VECTOR)
    layout = _layout(width, _VECTOR)

    def kernel(*refs):
        *in_refs, scale_ref, y_ref, rrms_ref = refs[: len(arrays) + 3]
        at = _groups(lax.axis_index("tiles"))
        x, *added = (load(ref.at[at], layout) for ref in in_refs)
        scale_f32 = spread(load(scale_ref, layout.reduce((0, 1))).astype(jnp.float32), (2,), x.shape, layout)
        for one, sum_ref in zip(added, refs[len(arrays) + 3 :], strict=True):
            x = (x.astype(jnp.float32) + one.astype(jnp.float32)).astype(dtype)
            sum_ref[at] = x
        x_f32 = x.astype(jnp.float32)
        rrms = lax.rsqrt(jnp.sum(x_f32 * x_f32, axis=2) / width + eps)
        y_ref[at, :, pl.ds(0, width)] = (x_f32 * spread(rrms, (0, 1), x.shape, layout) * scale_f32).astype(dtype)
        rrms_ref[at] = rrms

    grouped = [array.reshape(-1, of_warp, width) for array in arrays]
    groups = rows // of_warp
    out = [jax.ShapeDtypeStruct((groups, of_warp, width + room), dtype)]
    out += [jax.ShapeDtypeStruct((groups, of_warp), jnp.float32)]
    out += [jax.ShapeDtypeStruct(array.shape, dtype) for array in grouped[1:]]
    y, rrms, *total = launch_alone(kernel, groups // _WARPS, *grouped, scale, out_type=out, params=PARAMS)
    return (total or arrays)[0].reshape(rows, width), y.reshape(rows, width + room), rrms.reshape(rows)


def backward(arrays: tuple[Array, ...], scale: Array, rrms: Array, *, trained: bool) -> tuple[Array, Array | None]:
    """Of x, dy and perhaps dresidual (M, D), and rrms (M,): dx, and if trained the scale's gradient in its dtype."""
    (rows, width), dtype = arrays[0].shape, arrays[0].dtype
    vector = _VECTOR_SUMMED if trained else _VECTOR
    of_warp = _rows_of_warp(rows, width, vector)
    tiles = rows // of_warp // _WARPS
    staying = _STAYING[of_warp * width > _SHARE * _LANES]
    blocks = min(tiles, _platform.multiprocessors() * staying // _WARPS) if trained else tiles
    layout = _layout(width, vector)

    def gradients(in_refs, scale_f32, rrms_ref, dx_ref, tile):
        at = _groups(tile)
        x, dy, *added = (load(ref.at[at], layout).astype(jnp.float32) for ref in in_refs)
        rrms = spread(load(rrms_ref.at[at], layout.reduce(2)), (0, 1), x.shape, layout)

        def mean(x):
            return spread(jnp.sum(x, axis=2) / width, (0, 1), x.shape, layout)

        dx, dscale = reference.gradients(x, dy, scale_f32, rrms, mean)
        dx_ref[at] = sum(added, dx).astype(dtype)
        return dscale

    def kernel(*refs):
        *in_refs, scale_ref, rrms_ref, dx_ref = refs[: len(arrays) + 3]
        block, shape = lax.axis_index("tiles"), (_WARPS, of_warp, width)
        scale_f32 = spread(load(scale_ref, layout.reduce((0, 1))).astype(jnp.float32), (2,), shape, layout)
        of_tile = functools.partial(gradients, in_refs, scale_f32, rrms_ref, dx_ref)
        if not trained:
            of_tile(block)
            return
        none = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)
        steps = (tiles - block + blocks - 1) // blocks
        total = lax.fori_loop(0, steps, lambda i, total: total + of_tile(block + i * blocks), none)
        refs[-1][block] = jnp.sum(jnp.sum(total, axis=1), axis=0)

    grouped = [array.reshape(-1, of_warp, width) for array in arrays]
    out = [jax.ShapeDtypeStruct(grouped[0].shape, dtype)]
    out += [jax.ShapeDtypeStruct((blocks, width), jnp.float32)] * trained
    dx, *sums = launch_alone(kernel, blocks, *grouped, scale, rrms.reshape(-1, of_warp), out_type=out, params=PARAMS)
    return dx.reshape(rows, width), jnp.sum(sums[0], axis=0).astype(scale.dtype) if sums else None


def _groups(tile):
    """Of a tile, one a warp."""
    return pl.ds(tile * _WARPS, _WARPS)


def _threads(width: int, vector: int) -> int:
    """Neighbouring threads that share a row."""
    return math.gcd(width // vector, _LANES)


def _rows_of_warp(rows: int, width: int, vector: int) -> int:
    """That a warp takes at a time, of so many in all."""
    fewest = rows_at_a_time(width, vector)
    most = max(1, _SHARE * _threads(width, vector) // width)
    return fewest // _WARPS * math.gcd(rows // fewest, 1 << (most.bit_length() - 1))


def _layout(width: int, vector: int):
    """Of (warps, rows, D): neighbouring threads have neighbouring pieces of a row, in as many turns as it takes."""
    threads = _threads(width, vector)
    rows, columns = _LANES // threads, threads * vector
    # warps, 1, 1; 1, and rows and columns by lanes; a vector
    tiles = (_WARPS, rows, columns), (1, rows, columns), (vector,)
    return tiled(*tiles, warps=(-7,), lanes=(-3, -2))
