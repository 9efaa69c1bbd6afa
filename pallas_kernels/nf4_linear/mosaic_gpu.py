"""NF4 by this project's Hopper kernels: what they refuse, dequantization at the speed of memory, and the products.

Dequantization: a tile of the weight is a block of 128 threads, as many of them at a time as fit. Each thread asks for
its 32 bytes of codes and for one scale before it waits, and writes 8 elements at a time. No shared memory, no barrier
but between the loads and their use; the hardware's queue of blocks is the schedule.
"""

import functools
import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from pallas_kernels import _platform
from pallas_kernels._hopper import padded
from pallas_kernels.nf4_linear.mosaic_gpu_decode import (
    BLOCK,
    TILE,
    Scales,
    code_values,
    codes_layout,
    decode,
    finish_scales,
    kernel_scales,
    load_scales,
    loads_first,
)
from pallas_kernels.nf4_linear.mosaic_gpu_fragments import DEPTH
from pallas_kernels.nf4_linear.mosaic_gpu_turned import multiply_turned
from pallas_kernels.nf4_linear.mosaic_gpu_turned_tiles import WIDTH, TurnedTiles, suitable_turned
from pallas_kernels.nf4_linear.reference import NESTED_BLOCK

WIDEST = 2048  # elements of a tile's row, which are 4 KiB of the result in one piece
DTYPES = ("bfloat16", "float16")
FUSED_ROWS = 1024  # of x, up to which decoding inside the product costs less than writing the decoded weight

Packed = tuple[Array, Array, Array | None, Array | None]
"""NF4Weight's codes, absmax, nested_absmax and offset, of one layer."""


def refuses(
    shape: tuple[int, int], block_size: int, dtype: DTypeLike, *, layers: int = 1, double: bool = True
) -> str | None:
    """Return why the kernels cannot decode such a weight on the default device, or None.

    Args:
        shape: (O, I) of the weight.
        block_size: elements that share a scale.
        dtype: of the result.
        layers: how many are stacked.
        double: whether scales are double-quantized.
    """
    if jnp.dtype(dtype).name not in DTYPES:
        return f"it makes {' or '.join(DTYPES)}, and the dtype is {jnp.dtype(dtype).name}"
    if block_size != BLOCK:
        return f"blocks must have {BLOCK} elements, and have {block_size}"
    if shape[1] % BLOCK:
        return f"a row must be whole blocks of {BLOCK}, and has {shape[1]} elements"
    rows, _ = tile_shape(shape)
    if shape[0] % rows:
        return f"the rows of a weight of width {shape[1]} must be a multiple of {rows}, and are {shape[0]}"
    if double and layers > 1 and math.prod(shape) % (BLOCK * NESTED_BLOCK):
        return f"stacked weights must have a multiple of {BLOCK * NESTED_BLOCK} elements, and have shape {shape}"
    return _platform.why_not_hopper(one_device=True)


def tile_shape(shape: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of a tile of the weight: TILE elements, in rows as long as powers of two divide its width."""
    columns = math.gcd(shape[1], WIDEST)
    return TILE // columns, columns


def fuses(rows: int, shape: tuple[int, int]) -> bool:
    """Whether a product with so many rows of x should decode the weight itself."""
    return rows <= FUSED_ROWS and shape[0] % WIDTH == 0 and shape[1] % WIDTH == 0


def fused(
    x: Array,
    packed: Packed,
    shape: tuple[int, int],
    *,
    transpose: bool,
    extra: tuple[Array, Array] | None = None,
    tiles: TurnedTiles | None = None,
) -> Array:
    """x @ W.T, or x @ W with `transpose`, decoding the weight inside the product.

    Args:
        x: (*B, I), or (*B, O) with `transpose`; bfloat16 or float16.
        packed: the weight.
        shape: (O, I).
        transpose: whether the sum runs over O.
        extra: None, or (low (*B, R), up (O, R)) for `+ low @ up.T`; with `transpose` up is (R, I), for `+ low @ up`.
        tiles: sizes; None for what suits the shapes.

    Returns:
        (*B, O), or (*B, I) with `transpose`, in x.dtype, summed in f32.
    """
    weight = [array for array in packed if array is not None]
    of_rows, of_weight = ([x], weight) if extra is None else ([x, extra[0]], [*weight, extra[1]])
    out = shape[1] if transpose else shape[0]

    @custom_vmap
    def run(*arrays):
        x, *low = arrays[: len(of_rows)]
        codes, absmax, *others = arrays[len(of_rows) :]
        up = others.pop() if low else None
        nested_absmax, offset = others or (None, None)
        rows = math.prod(x.shape[:-1])
        sizes = tiles or suitable_turned(rows, x.shape[-1], out)
        x_flat, *low_flat = (padded(one.reshape(rows, -1), sizes.rows, DEPTH) for one in (x, *low))
        both = None if up is None else (low_flat[0], padded(up.T if transpose else up, 1, DEPTH))
        arrays = x_flat, codes, absmax, nested_absmax, offset, both
        y = multiply_turned(*arrays, shape=shape, transpose=transpose, tiles=sizes)
        return y[:rows].reshape(*x.shape[:-1], out)

    @run.def_vmap
    def _more_rows(size: int, mapped: list[bool], *arrays):
        each = [x if is_mapped else jnp.broadcast_to(x, (size, *x.shape)) for x, is_mapped in zip(arrays, mapped)]
        rows, weight = each[: len(of_rows)], arrays[len(of_rows) :]
        if not any(mapped[len(of_rows) :]):
            return run(*rows, *weight), True
        return lax.map(lambda one: run(*one), each), True

    return run(*of_rows, *of_weight)


def dequantize(
    codes: UInt8[Array, "*L bytes"],
    absmax: Array,
    nested_absmax: Float[Array, "*L nested"] | None,
    offset: Float[Array, "*L"] | None,
    shape: tuple[int, int],
    dtype: DTypeLike,
    *,
    room: int = 0,
    staged: bool = False,
) -> Float[Array, "*L O I"]:
    """The weight as an array, as `reference.dequantize` makes it, bit for bit; for blocks of 64 elements.

    Args:
        codes: as NF4Weight has them, and so the next three.
        absmax: of the blocks.
        nested_absmax: of double quantization.
        offset: of double quantization.
        shape: (O, I).
        dtype: bfloat16 or float16.
        room: columns more than the weight's that the result has; what they hold is left open. Not for stacks.
        staged: whether plain array operations decode, for the interpreter.
    """
    arrays = [x for x in (codes, absmax, nested_absmax, offset) if x is not None]
    dtype = jnp.dtype(dtype)

    @custom_vmap
    def run(*arrays):
        nested = arrays[2:] or (None, None)
        return _dequantize(*arrays[:2], *nested, shape=shape, dtype=dtype, room=room, staged=staged)

    @run.def_vmap
    def _more_layers(size: int, mapped: list, *arrays):
        each = [x if is_mapped else jnp.broadcast_to(x, (size, *x.shape)) for x, is_mapped in zip(arrays, mapped)]
        return run(*each), True

    return run(*arrays)


@functools.partial(jax.jit, static_argnames=("shape", "dtype", "room", "staged"), inline=True)  # for calls one by one
def _dequantize(codes, absmax, nested_absmax, offset, *, shape, dtype, room, staged):
    leading, (height, width) = codes.shape[:-1], shape
    rows, columns = tile_shape(shape)
    layers, across, stride = math.prod(leading), width // columns, width // BLOCK

    def kernel(codes_ref, *refs):
        *of_scales, out_ref = refs
        scales = Scales(*of_scales)
        tile = lax.axis_index("tiles")
        row, part = lax.div(tile, jnp.int32(across)) * rows, lax.rem(tile, jnp.int32(across))
        values = code_values(scales)
        at = codes_ref.at[pl.ds(row, rows), pl.ds(part * (columns // 2), columns // 2)]
        codes = plgpu.load(at, layout=codes_layout(rows))
        first = row * stride + part * (columns // BLOCK)
        raw = load_scales(scales, first, stride, columns // BLOCK, staged=staged)
        offset = scales.offset[lax.div(row, jnp.int32(height)) if layers > 1 else 0]
        if not staged:
            loads_first()
        found = finish_scales(scales, *raw, offset, staged=staged)
        out_ref[pl.ds(row, rows), pl.ds(part * columns, columns)] = decode(
            codes, values, found, dtype=dtype, staged=staged
        )

    out = jax.ShapeDtypeStruct((layers * height, width + room), dtype)
    tiles = layers * height // rows * across
    run = plgpu.kernel(kernel, out_type=out, grid=(tiles,), grid_names=("tiles",))
    result = run(codes.reshape(layers * height, width // 2), *kernel_scales(absmax, nested_absmax, offset))
    return result.reshape(*leading, *shape) if leading else result
