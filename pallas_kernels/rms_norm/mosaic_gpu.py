"""RMSNorm on Hopper: forward and the gradient of x in one pass each, where XLA reads its input twice.

A warpgroup of 128 threads takes a row, or several short ones, loads its 16-byte pieces of all operands before it uses
any, and is done: rows stay in registers between their sum and their use, and the hardware's queue of blocks is the
schedule. The gradient of the scale is XLA's, an operation of its own that costs nothing where nobody asks for it.
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
from pallas_kernels.rms_norm import reference

MULTIPLE = 1024  # of widths: 16 bytes for each of 128 threads
WIDEST = 8192  # beyond, a thread's share of the operands leaves no registers
FEWEST_ROWS = 1024  # below, a launch costs more than a second reading, and XLA's part joins its neighbours'
_VECTOR = 8
_SHARE = 4096  # elements that a block takes at least, of as many rows as have them


def refuses(x: Array | jax.ShapeDtypeStruct, room: int = 0) -> str | None:
    """Return why the kernels cannot take x (*B, D), with an output of D + room columns, or None."""
    width, rows = x.shape[-1], math.prod(x.shape[:-1])
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it needs bfloat16 or float16, and x is {x.dtype}"
    if width % MULTIPLE or not 0 < width <= WIDEST:
        return f"the width must be a multiple of {MULTIPLE} of at most {WIDEST}, and is {width}"
    if room % _VECTOR:
        return f"room must be a multiple of {_VECTOR}, and is {room}"
    if rows < FEWEST_ROWS:
        return f"it is for at least {FEWEST_ROWS} rows, and x has {rows}"
    if rows * (width + room) >= 2**31:
        return f"the result must have fewer than 2**31 elements, and has {rows * (width + room)}"
    return _platform.why_not_hopper(one_device=True)


@functools.partial(jax.jit, static_argnames=("eps", "room"), inline=True)  # of equal calls one is compiled
def forward(
    x: Float[Array, "*B D"], scale: Float[Array, " D"], eps: float, room: int = 0
) -> tuple[Float[Array, "*B D+room"], Float[Array, "*B 1"]]:
    """As reference.forward, but that nothing is written to the `room` columns behind the result."""
    width, rows = x.shape[-1], math.prod(x.shape[:-1])
    taken = _rows_of_block(rows, width)

    def kernel(x_ref, scale_ref, y_ref, rrms_ref):
        first = lax.axis_index("tiles") * taken
        xs = [_load(x_ref.at[first + i]) for i in range(taken)]
        scale_f32 = _load(scale_ref).astype(jnp.float32)
        for i, x in enumerate(xs):
            x_f32 = x.astype(jnp.float32)
            rrms = lax.rsqrt(jnp.sum(x_f32 * x_f32) / width + eps)
            y_ref[first + i, pl.ds(0, width)] = (x_f32 * rrms * scale_f32).astype(x.dtype)
            rrms_ref[first + i] = rrms

    out = [jax.ShapeDtypeStruct((rows, width + room), x.dtype), jax.ShapeDtypeStruct((rows,), jnp.float32)]
    y, rrms = _launch(kernel, rows // taken, out, x.reshape(rows, width), scale)
    return y.reshape(*x.shape[:-1], width + room), rrms.reshape(*x.shape[:-1], 1)


@functools.partial(jax.jit, inline=True)
def backward(x: Array, scale: Array, rrms: Array, dy: Array, dresidual: Array | None = None) -> tuple[Array, Array]:
    """As reference.backward, but that dresidual is added before dx is rounded."""
    width, rows = x.shape[-1], math.prod(x.shape[:-1])
    taken = _rows_of_block(rows, width)

    def kernel(x_ref, dy_ref, *refs):
        *added_ref, scale_ref, rrms_ref, dx_ref = refs
        first = lax.axis_index("tiles") * taken
        whole = [[_load(ref.at[first + i]) for ref in (x_ref, dy_ref, *added_ref)] for i in range(taken)]
        rrmss = [rrms_ref[first + i] for i in range(taken)]
        scale_f32 = _load(scale_ref).astype(jnp.float32)
        for i, ((x, dy, *added), rrms) in enumerate(zip(whole, rrmss, strict=True)):
            normed, dnormed = x.astype(jnp.float32) * rrms, dy.astype(jnp.float32) * scale_f32
            along = jnp.sum(dnormed * normed) / width
            dx = rrms * (dnormed - normed * along)
            for one in added:
                dx += one.astype(jnp.float32)
            dx_ref[first + i] = dx.astype(x.dtype)

    added = [] if dresidual is None else [dresidual]
    arrays = [array.reshape(rows, width) for array in (x, dy, *added)]
    out = [jax.ShapeDtypeStruct((rows, width), x.dtype)]
    (dx,) = _launch(kernel, rows // taken, out, *arrays, scale, rrms.reshape(rows))
    return dx.reshape(x.shape), reference.backward_scale(x, scale, rrms, dy)


def _rows_of_block(rows: int, width: int) -> int:
    return math.gcd(rows, 1 << (max(1, _SHARE // width).bit_length() - 1))


def _load(ref) -> Array:
    return plgpu.load(ref, layout=plgpu.Layout.WG_STRIDED(ref.shape, vec_size=_VECTOR))


def _launch(kernel, blocks: int, out: list[jax.ShapeDtypeStruct], *arrays: Array) -> list[Array]:
    run = plgpu.kernel(
        kernel,
        out_type=out,
        grid=(blocks,),
        grid_names=("tiles",),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    return run(*arrays)
