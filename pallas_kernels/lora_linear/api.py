"""Public low-rank adapted linear layer: argument checks and the gradient's wiring."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from pallas_kernels import Implementation, _dispatch
from pallas_kernels.lora_linear import reference
from pallas_kernels.nf4_linear import NF4Weight, dequantize

_REFUSALS: _dispatch.Refusals = {"xla": None}


def lora_linear(
    x: Float[Array, "*B I"],
    w: Float[Array, "O I"] | NF4Weight,
    a: Float[Array, "R I"],
    b: Float[Array, "O R"],
    scale: float | Float[Array, ""],
    *,
    dropout_rate: float = 0.0,
    key: Key[Array, ""] | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "*B O"]:
    """Linear layer with a low-rank adapter: `x @ w.T + scale * (dropout(x) @ a.T) @ b.T`.

    Gradients flow to x, a and b; w and scale get none. The backward pass keeps x, x @ a.T and the arguments as they
    are: a packed weight is dequantized again there, a dropout mask drawn again. Source: arXiv 2106.09685, eq. 3.

    Args:
        x: f32, bf16 or f16, any leading axes.
        w: frozen base weight, cast to x.dtype for the product; or packed.
        a: down-projection, any float dtype (f32 while training), cast to x.dtype for the product.
        b: up-projection, likewise.
        scale: alpha / rank, or alpha / sqrt(rank).
        dropout_rate: probability of zeroing an element of the adapter's input; the rest are divided by 1 - rate.
        key: random key of the dropout mask; needed where dropout_rate > 0.
        implementation: "xla", or None for the fastest that accepts the arguments on this device.

    Returns:
        The sum in x.dtype; gradients of a and b have their dtypes and are summed in f32.

    Raises:
        ValueError: shapes do not fit together, dropout_rate is outside [0, 1), or it has no key.
        NotImplementedError: the named implementation does not exist for this operation.
    """
    _check(x, w, a, b, scale)
    if not 0 <= dropout_rate < 1 or (dropout_rate > 0 and key is None):
        raise ValueError(
            f"lora_linear: dropout_rate must be in [0, 1), with a key if positive; got {dropout_rate} and key={key}"
        )
    _dispatch.choose("lora_linear", implementation, _REFUSALS)
    scale = jnp.asarray(scale, jnp.float32)
    return _lora_linear(dropout_rate, x, w, a, b, scale, key if dropout_rate > 0 else None)


def explain() -> str:
    """Say which implementation runs."""
    return _dispatch.explain("lora_linear", _REFUSALS)


def _check(x: Array, w: Array | NF4Weight, a: Array, b: Array, scale: float | Array) -> None:
    if len(w.shape) != 2 or (isinstance(w, NF4Weight) and w.codes.ndim != 1):
        raise ValueError(f"lora_linear: w must be one layer's (O, I) weight; got {w.shape}")
    out, width = w.shape
    if x.ndim < 1 or x.shape[-1] != width or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"lora_linear: x must be floating-point of width {width} to meet w; got {x.dtype}{x.shape}")
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != width or b.shape != (out, a.shape[0]):
        raise ValueError(
            f"lora_linear: a must be (R, {width}) and b ({out}, R) to meet w {w.shape}; got {a.shape} and {b.shape}"
        )
    if jnp.ndim(scale) != 0:
        raise ValueError(f"lora_linear: scale must be a scalar; got shape {jnp.shape(scale)}")


def _array(w: Array | NF4Weight, dtype: jnp.dtype) -> Array:
    return dequantize(w, dtype) if isinstance(w, NF4Weight) else w.astype(dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _lora_linear(
    rate: float, x: Array, w: Array | NF4Weight, a: Array, b: Array, scale: Array, key: Array | None
) -> Array:
    return _lora_linear_fwd(rate, x, w, a, b, scale, key)[0]


def _lora_linear_fwd(
    rate: float, x: Array, w: Array | NF4Weight, a: Array, b: Array, scale: Array, key: Array | None
) -> tuple[Array, tuple]:
    base = jnp.einsum("...i,oi->...o", x, _array(w, x.dtype))
    y, low = reference.forward(x, base, a, b, scale, rate, key)
    return y, (x, w, a, b, scale, key, low)


def _lora_linear_bwd(rate: float, residuals: tuple, dy: Array) -> tuple:
    x, w, a, b, scale, key, low = residuals
    dx_base = jnp.einsum("...o,oi->...i", dy, _array(w, dy.dtype))
    dx, da, db = reference.backward(x, dx_base, low, a, b, scale, rate, key, dy)
    return dx, None, da, db, None, None


_lora_linear.defvjp(_lora_linear_fwd, _lora_linear_bwd)
