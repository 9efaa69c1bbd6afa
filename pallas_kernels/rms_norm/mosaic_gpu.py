"""RMSNorm on Hopper: forward and the gradient of x in one pass each, where XLA reads its input twice.

A warpgroup of 128 threads takes a row, or several short ones, loads its pieces of all operands before it uses any, of
16 bytes where they divide a thread's part of a row (8 at a width of 3584), and is done: rows stay in registers
between their sum and their use, and the hardware's queue of blocks is the schedule. Where the scale is trained, as many
blocks as there is room for stay, and sum its gradient beside x's. Short rows are mosaic_gpu_narrow.py's.
"""

import functools
import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels import _platform
from pallas_kernels._hopper import launch_alone
from pallas_kernels.rms_norm import mosaic_gpu_narrow, reference

_THREADS = 128
_MULTIPLE = 2 * _THREADS  # of widths: loads of 4 bytes
WIDEST = 8192  # beyond, a thread's share of the operands leaves no registers
FEWEST_ROWS = 1024  # below, a launch costs more than a second reading, and XLA's part joins its neighbours'
_VECTOR = 8
WIDEST_SUMMED = 4096  # of rows whose part of the scale's gradient is summed beside them: beyond, registers spill
_SUMMED = 8192  # elements of all rows that a multiprocessor then works on at once
_SHARE = 4096  # elements that a block takes at least, of as many rows as have them


def refuses(x: Array | jax.ShapeDtypeStruct, room: int = 0) -> str | None:
    """Return why the kernels cannot take x (*B, D), with an output of D + room columns, or None."""
    width, rows = x.shape[-1], math.prod(x.shape[:-1])
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it needs bfloat16 or float16, and x is {x.dtype}"
    if not narrow(width) and (width % _MULTIPLE or not 0 < width <= WIDEST):
        short = f"{mosaic_gpu_narrow.MULTIPLE} of at most {mosaic_gpu_narrow.WIDEST}"
        return f"the width must be a multiple of {short}, or of {_MULTIPLE} of at most {WIDEST}, and is {width}"
    if narrow(width) and rows % (at_a_time := mosaic_gpu_narrow.rows_at_a_time(width)):
        return f"rows of {width} must be a multiple of {at_a_time}, and x has {rows}"
    if room % _VECTOR:
        return f"room must be a multiple of {_VECTOR}, and is {room}"
    if rows < FEWEST_ROWS:
        return f"it is for at least {FEWEST_ROWS} rows, and x has {rows}"
    if rows * (width + room) >= 2**31:
        return f"the result must have fewer than 2**31 elements, and has {rows * (width + room)}"
    return _platform.why_not_hopper(one_device=True)


def narrow(width: int) -> bool:
    """Return whether rows are mosaic_gpu_narrow's: short, and not such that a warpgroup's loads are of 16 bytes."""
    return width <= mosaic_gpu_narrow.WIDEST and width % mosaic_gpu_narrow.MULTIPLE == 0 < width % (_THREADS * _VECTOR)


@functools.partial(jax.jit, static_argnames=("eps", "room"), inline=True)  # of equal calls one is compiled
def forward(
    x: Float[Array, "*B D"], scale: Float[Array, " D"], eps: float, room: int = 0
) -> tuple[Float[Array, "*B D+room"], Float[Array, "*B 1"]]:
    """As reference.forward, but that nothing is written to the `room` columns behind the result."""
    return _forward(x, None, scale, eps, room)[1:]


def forward_added(
    x: Float[Array, "*B D"], added: Float[Array, "*B D"], scale: Float[Array, " D"], eps: float, room: int = 0
) -> tuple[Float[Array, "*B D"], Float[Array, "*B D+room"], Float[Array, "*B 1"]]:
    """As reference.forward_added, with `room` as in `forward`."""
    return _forward(x, added, scale, eps, room)


def _forward(x: Array, added: Array | None, scale: Array, eps: float, room: int) -> tuple[Array, Array, Array]:
    """The normalised input, which is x, or x + added in x.dtype; result and reciprocal root mean square."""
    width = x.shape[-1]
    arrays = tuple(array.reshape(-1, width) for array in (x, added) if array is not None)
    of_rows = mosaic_gpu_narrow.forward if narrow(width) else _wide_forward
    total, y, rrms = of_rows(arrays, scale, eps, room)
    return total.reshape(x.shape), y.reshape(*x.shape[:-1], width + room), rrms.reshape(*x.shape[:-1], 1)


def _wide_forward(arrays: tuple[Array, ...], scale: Array, eps: float, room: int) -> tuple[Array, Array, Array]:
    """As mosaic_gpu_narrow.forward."""
    (rows, width), sums = arrays[0].shape, arrays[1:]
    taken = _rows_of_block(rows, width)

    def kernel(*refs):
        *in_refs, scale_ref, y_ref, rrms_ref = refs[: len(arrays) + 3]
        sum_refs = refs[len(arrays) + 3 :]
        first = lax.axis_index("tiles") * taken
        whole = [[_load(ref.at[first + i]) for ref in in_refs] for i in range(taken)]
        scale_f32 = _load(scale_ref).astype(jnp.float32)
        for i, (x, *more) in enumerate(whole):
            x_f32 = x.astype(jnp.float32)
            for one, sum_ref in zip(more, sum_refs, strict=True):
                total = (x_f32 + one.astype(jnp.float32)).astype(x.dtype)
                sum_ref[first + i] = total
                x_f32 = total.astype(jnp.float32)
            rrms = lax.rsqrt(jnp.sum(x_f32 * x_f32) / width + eps)
            y_ref[first + i, pl.ds(0, width)] = (x_f32 * rrms * scale_f32).astype(x.dtype)
            rrms_ref[first + i] = rrms

    out = [jax.ShapeDtypeStruct((rows, width + room), arrays[0].dtype), jax.ShapeDtypeStruct((rows,), jnp.float32)]
    out += [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in sums]
    y, rrms, *total = launch_alone(kernel, rows // taken, *arrays, scale, out_type=out)
    return (total or arrays)[0], y, rrms


@functools.partial(jax.jit, static_argnames="trained", inline=True)
def backward(
    x: Array, scale: Array, rrms: Array, dy: Array, dresidual: Array | None = None, *, trained: bool
) -> tuple[Array, Array | None]:
    """As reference.backward, but that dresidual is added before dx is rounded."""
    arrays = tuple(array.reshape(-1, x.shape[-1]) for array in (x, dy, dresidual) if array is not None)
    of_rows = mosaic_gpu_narrow.backward if narrow(x.shape[-1]) else _wide_backward
    dx, dscale = of_rows(arrays, scale, rrms.reshape(-1), trained=trained)
    return dx.reshape(x.shape), dscale


def _wide_backward(
    arrays: tuple[Array, ...], scale: Array, rrms: Array, *, trained: bool
) -> tuple[Array, Array | None]:
    """As mosaic_gpu_narrow.backward."""
    x, dy, *_ = arrays
    rows, width = x.shape
    operands, dx_type = (*arrays, scale, rrms), jax.ShapeDtypeStruct(x.shape, x.dtype)
    if trained and width > WIDEST_SUMMED:
        dx, _ = _wide_backward(arrays, scale, rrms, trained=False)
        return dx, reference.backward_scale(x, scale, rrms[:, None], dy)
    if not trained:
        taken = _rows_of_block(rows, width)
        (dx,) = launch_alone(functools.partial(_input_gradient, taken), rows // taken, *operands, out_type=[dx_type])
        return dx, None
    blocks = min(rows, _platform.multiprocessors() * (_SUMMED // width))
    sums_type = jax.ShapeDtypeStruct((blocks, width), jnp.float32)
    dx, sums = launch_alone(
        functools.partial(_gradients, rows, blocks), blocks, *operands, out_type=[dx_type, sums_type]
    )
    return dx, jnp.sum(sums, axis=0).astype(scale.dtype)


def _input_gradient(taken: int, *refs) -> None:
    """A block's rows, next to each other: x, dy and perhaps dresidual, scale, rrms -> dx."""
    *row_refs, scale_ref, rrms_ref, dx_ref = refs
    first = lax.axis_index("tiles") * taken
    whole = [[_load(ref.at[first + i]) for ref in row_refs] for i in range(taken)]
    rrmss = [rrms_ref[first + i] for i in range(taken)]
    scale_f32 = _load(scale_ref).astype(jnp.float32)
    for i, (row, rrms) in enumerate(zip(whole, rrmss, strict=True)):
        dx_ref[first + i], _ = _row_gradients(*row, scale=scale_f32, rrms=rrms)


def _gradients(rows: int, blocks: int, *refs) -> None:
    """A block's rows, `blocks` apart: as _input_gradient, and a block's sum of the scale's gradient."""
    *row_refs, scale_ref, rrms_ref, dx_ref, sums_ref = refs
    block = lax.axis_index("tiles")
    scale_f32 = _load(scale_ref).astype(jnp.float32)

    def step(i, total):
        at = block + i * blocks
        dx_ref[at], dscale = _row_gradients(
            *[_load(ref.at[at]) for ref in row_refs], scale=scale_f32, rrms=rrms_ref[at]
        )
        return total + dscale

    none = plgpu.layout_cast(jnp.zeros(scale_ref.shape, jnp.float32), _layout(scale_ref.shape))
    sums_ref[block] = lax.fori_loop(0, (rows - block + blocks - 1) // blocks, step, none)


def _row_gradients(x: Array, dy: Array, *added: Array, scale: Array, rrms: Array) -> tuple[Array, Array]:
    """A row's dx in x.dtype, and its part of the scale's gradient in f32."""
    x_f32, dy_f32 = x.astype(jnp.float32), dy.astype(jnp.float32)
    dx, dscale = reference.gradients(x_f32, dy_f32, scale, rrms, lambda row: jnp.sum(row) / row.shape[0])
    for one in added:
        dx += one.astype(jnp.float32)
    return dx.astype(x.dtype), dscale


def _rows_of_block(rows: int, width: int) -> int:
    return math.gcd(rows, 1 << (max(1, _SHARE // width).bit_length() - 1))


def _load(ref) -> Array:
    return plgpu.load(ref, layout=_layout(ref.shape))


def _layout(shape: tuple[int, ...]):
    return plgpu.Layout.WG_STRIDED(shape, vec_size=math.gcd(_VECTOR, shape[0] // _THREADS))
