"""Public NF4 weight, its dequantization and the linear layer over it."""

import math
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

from pallas_kernels import Implementation, _dispatch
from pallas_kernels.nf4_linear import mosaic_gpu, reference
from pallas_kernels.nf4_linear.mosaic_gpu_join import write_edge
from pallas_kernels.nf4_linear.reference import DYNAMIC_CODE, NESTED_BLOCK, NF4_CODE

__all__ = [
    "DYNAMIC_CODE",
    "NF4_CODE",
    "NF4Weight",
    "decodes_inside",
    "dense",
    "dequantize",
    "explain",
    "join",
    "nf4_linear",
    "product",
    "refuses",
]

_DTYPES = ("bfloat16", "float32", "float16")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NF4Weight:
    """A weight (O, I) in bitsandbytes' NF4 format; stacked layers put leading axes before every array's own.

    The row-major elements are cut into blocks of block_size, across row ends. Element i is
    `NF4_CODE[code_i] * absmax[i // block_size]`, code_i in the high nibble of byte i//2 for even i, else in the low.
    With double quantization absmax itself is `DYNAMIC_CODE[absmax] * nested_absmax[block // 256] + offset`.
    Source: arXiv 2305.14314, sections 3 and appendix E.

    Attributes:
        codes: uint8 (..., ceil(O*I/2)).
        absmax: f32 (..., blocks), or uint8 where double-quantized.
        nested_absmax: f32 (..., ceil(blocks/256)), or None without double quantization.
        offset: f32 (...,), or None without double quantization.
        shape: (O, I).
        block_size: elements that share one absmax.
        dtype: name of the dtype that it dequantizes to.
    """

    codes: UInt8[Array, "... bytes"]
    absmax: Array
    nested_absmax: Float[Array, "... nested"] | None
    offset: Float[Array, "..."] | None
    shape: tuple[int, int] = field(metadata={"static": True})
    block_size: int = field(default=64, metadata={"static": True})
    dtype: str = field(default="bfloat16", metadata={"static": True})


def dequantize(
    w: NF4Weight, dtype: jax.typing.DTypeLike | None = None, *, implementation: Implementation | None = None
) -> Float[Array, "*L O I"]:
    """Return the weight as an array, rounded once from f32 as bitsandbytes does.

    Args:
        w: the packed weight; leading (stacked) axes are kept.
        dtype: of the result; None for the one that w names.
        implementation: "mosaic_gpu", "xla", or None for the fastest that accepts the arguments on this device.

    Returns:
        The (O, I) array.

    Raises:
        ValueError: w's arrays do not fit its shape and block size.
        NotImplementedError: the named implementation refuses these arguments; the message says why.
    """
    return _dequantize(w, jnp.dtype(dtype or w.dtype), implementation)


def dense(
    w: Float[Array | np.ndarray, "*L O I"] | NF4Weight,
    dtype: jax.typing.DTypeLike,
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "*L O I"]:
    """The array that a weight stands for, whatever it is stored as; leading axes are kept.

    Args:
        w: an array or a packed weight.
        dtype: of the result.
        implementation: as in `dequantize`.
    """
    return dequantize(w, dtype, implementation=implementation) if isinstance(w, NF4Weight) else jnp.asarray(w, dtype)


def join(
    w: NF4Weight, more: Float[Array, "O C"], *, implementation: Implementation | None = None
) -> Float[Array, "O I_C"]:
    """`concatenate([dense(w), more], 1)` in more's dtype, w unpacked into its place.

    Args:
        w: the packed weight of one layer.
        more: columns that follow w's.
        implementation: as in `dequantize`.
    """
    if _choose(w, more.dtype, implementation) == "xla":
        return jnp.concatenate([dequantize(w, more.dtype, implementation="xla"), more], axis=1)
    return write_edge(_dequantize(w, more.dtype, implementation, room=more.shape[1]), more)


def nf4_linear(
    x: Float[Array, "*B I"], w: NF4Weight, *, implementation: Implementation | None = None
) -> Float[Array, "*B O"]:
    """Linear layer `x @ dequantize(w).T` over a frozen NF4 weight.

    The backward pass is `dy @ dequantize(w)`; it keeps the packed weight only, neither x nor a dequantized matrix.
    The weight has no gradient. Source: arXiv 2305.14314, eq. 5.

    Args:
        x: f32, bf16 or f16, any leading axes; the weight is dequantized to this dtype.
        w: the packed weight of one layer, without leading axes.
        implementation: "mosaic_gpu", "xla", or None for the fastest that accepts the arguments on this device.

    Returns:
        The product in x.dtype.

    Raises:
        ValueError: x's width differs from the weight's, or the weight's arrays do not fit its shape.
        NotImplementedError: the named implementation refuses these arguments; the message says why.
    """
    _check_weight(w)
    if w.codes.ndim != 1:
        raise ValueError(f"nf4_linear: w must be one layer's weight; its codes have leading axes: {w.codes.shape}")
    if x.ndim < 1 or x.shape[-1] != w.shape[1] or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            f"nf4_linear: x must be floating-point of width {w.shape[1]} to meet w {w.shape}; got {x.dtype}{x.shape}"
        )
    return _nf4_linear(_choose(w, x.dtype, implementation), x, w)


def explain(w: NF4Weight | None = None, dtype: jax.typing.DTypeLike = jnp.bfloat16) -> str:
    """Say which implementation runs for a weight and dtype, or for one that no kernel refuses, and why."""
    return _dispatch.explain("nf4_linear", _refusals(w, dtype))


def refuses(w: NF4Weight, dtype: jax.typing.DTypeLike) -> str | None:
    """Return why "mosaic_gpu" cannot decode w to dtype on the default device, or None."""
    stacked = {"layers": math.prod(w.codes.shape[:-1]), "double": w.nested_absmax is not None}
    return mosaic_gpu.refuses(w.shape, w.block_size, dtype, **stacked)


def _refusals(w: NF4Weight | None, dtype: jax.typing.DTypeLike) -> _dispatch.Refusals:
    ours = mosaic_gpu.refuses((64, 2048), 64, dtype) if w is None else refuses(w, dtype)
    return {"mosaic_gpu": ours, "xla": None}


def _choose(w: NF4Weight, dtype: jax.typing.DTypeLike, wanted: Implementation | None) -> Implementation:
    return _dispatch.choose("nf4_linear", wanted, _refusals(w, dtype))


def _dequantize(w: NF4Weight, dtype: jnp.dtype, implementation: Implementation | None, room: int = 0) -> Array:
    _check_weight(w)
    if _choose(w, dtype, implementation) == "mosaic_gpu":
        return mosaic_gpu.dequantize(*_packed(w), w.shape, dtype, room=room)
    return reference.dequantize(*_packed(w), w.shape, w.block_size, dtype=dtype)


def _check_weight(w: NF4Weight) -> None:
    size = math.prod(w.shape)
    blocks = -(-size // w.block_size)
    leading = w.codes.shape[:-1]
    if w.block_size < 2 or w.block_size % 2 or w.dtype not in _DTYPES:
        raise ValueError(
            f"NF4Weight: block_size must be even and dtype one of {_DTYPES}; got {w.block_size} and {w.dtype!r}"
        )
    want = {"codes": (*leading, -(-size // 2)), "absmax": (*leading, blocks)}
    dtypes = {"codes": np.uint8, "absmax": np.float32}
    if w.nested_absmax is not None:
        want |= {"nested_absmax": (*leading, -(-blocks // NESTED_BLOCK)), "offset": leading}
        dtypes |= {"absmax": np.uint8, "nested_absmax": np.float32, "offset": np.float32}
    for name, shape in want.items():
        array = getattr(w, name)
        if array is None or array.shape != shape or array.dtype != dtypes[name]:
            got = None if array is None else f"{array.dtype}{array.shape}"
            raise ValueError(
                f"NF4Weight of shape {w.shape}, block_size {w.block_size}: {name} must be "
                f"{np.dtype(dtypes[name])}{shape}; got {got}"
            )


def product(
    x: Float[Array, "*B I"],
    w: Float[Array | np.ndarray, "O I"] | NF4Weight,
    *,
    transpose: bool = False,
    extra: tuple[Array, Array] | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "*B O"]:
    """`x @ dense(w).T + low @ up.T`, or `x @ dense(w) + low @ up`, without gradients of its own.

    Args:
        x: (*B, I), or (*B, O) with `transpose`.
        w: an array or a packed weight, of one layer.
        transpose: whether the sum runs over O.
        extra: None, or (low (*B, R), up (O, R)); with `transpose` up is (R, I).
        implementation: as in `dequantize`, of a packed weight.
    """
    if isinstance(w, NF4Weight) and decodes_inside(x, w, implementation):
        return mosaic_gpu.fused(x, _packed(w), w.shape, transpose=transpose, extra=extra)
    low, up = extra or (None, None)
    dims = ("...o,oi->...i", "...r,ri->...i") if transpose else ("...i,oi->...o", "...r,or->...o")
    y = jnp.einsum(dims[0], x, dense(w, x.dtype, implementation=implementation))
    return y if low is None or up is None else y + jnp.einsum(dims[1], low, up)


def decodes_inside(x: Array, w: Array | np.ndarray | NF4Weight, implementation: Implementation | None) -> bool:
    """Whether `product` of x, or its like, unpacks w piece by piece inside the product, as x has few rows."""
    return (
        isinstance(w, NF4Weight)
        and _choose(w, x.dtype, implementation) == "mosaic_gpu"
        and mosaic_gpu.fuses(math.prod(x.shape[:-1]), w.shape)
    )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _nf4_linear(implementation: Implementation, x: Array, w: NF4Weight) -> Array:
    return product(x, w, implementation=implementation)


def _nf4_linear_fwd(implementation: Implementation, x: Array, w: NF4Weight) -> tuple[Array, NF4Weight]:
    return _nf4_linear(implementation, x, w), w


def _nf4_linear_bwd(implementation: Implementation, w: NF4Weight, dy: Array) -> tuple[Array, None]:
    return product(dy, w, transpose=True, implementation=implementation), None


_nf4_linear.defvjp(_nf4_linear_fwd, _nf4_linear_bwd)


def _packed(w: NF4Weight) -> mosaic_gpu.Packed:
    return w.codes, w.absmax, w.nested_absmax, w.offset
