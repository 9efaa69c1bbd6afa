"""Public low-rank adapted linear layers: argument checks and the gradient's wiring."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from pallas_kernels import Implementation, _dispatch
from pallas_kernels.lora_linear import mosaic_gpu, reference
from pallas_kernels.lora_linear.reference import Projection
from pallas_kernels.nf4_linear import NF4Weight


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

    Gradients flow to x, a and b; w and scale get none. The backward pass keeps x, the low product and the arguments as
    they are: a packed weight is dequantized again there, a dropout mask drawn again. Source: arXiv 2106.09685, eq. 3.

    Args:
        x: f32, bf16 or f16, any leading axes.
        w: frozen base weight, cast to x.dtype for the product; or packed.
        a: down-projection, any float dtype (f32 while training), cast to x.dtype for the product.
        b: up-projection, likewise.
        scale: alpha / rank, or alpha / sqrt(rank).
        dropout_rate: probability of zeroing an element of the adapter's input; the rest are divided by 1 - rate.
        key: random key of the dropout mask; needed where dropout_rate > 0.
        implementation: "mosaic_gpu", "xla", or None for the fastest that accepts the arguments on this device.

    Returns:
        The sum in x.dtype; gradients of a and b have their dtypes and are summed in f32.

    Raises:
        ValueError: shapes do not fit together, dropout_rate is outside [0, 1), or it has no key.
        NotImplementedError: the named implementation refuses these arguments; the message says why.
    """
    layer = Projection(w, a, b, jnp.asarray(scale, jnp.float32))
    keys = None if key is None else (key,)
    return lora_linears(x, (layer,), dropout_rate=dropout_rate, keys=keys, implementation=implementation)[0]


def lora_linears(
    x: Float[Array, "*B I"],
    layers: Sequence[Projection],
    *,
    dropout_rate: float = 0.0,
    keys: Sequence[Key[Array, ""]] | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "*B O"], ...]:
    """Several adapted linear layers of one input, read once: as lora_linear for each.

    Args:
        x: f32, bf16 or f16, any leading axes.
        layers: at least one with an adapter; ranks and scales may differ.
        dropout_rate: probability of zeroing an element of the adapters' input; the rest are divided by 1 - rate.
        keys: random key of each layer's dropout mask; needed where dropout_rate > 0.
        implementation: "mosaic_gpu", "xla", or None for the fastest that accepts the arguments on this device.

    Returns:
        Each layer's sum in x.dtype; gradients of a and b have their dtypes and are summed in f32.

    Raises:
        ValueError: shapes do not fit together, no layer has an adapter, dropout_rate is outside [0, 1), or it has no
            key for each layer.
        NotImplementedError: the named implementation refuses these arguments; the message says why.
    """
    for layer in layers:
        _check(x, *layer)
    if all(layer.a is None for layer in layers):
        raise ValueError(f"lora_linear: none of the {len(layers)} layers has an adapter")
    if not 0 <= dropout_rate < 1 or (dropout_rate > 0 and keys is None):
        raise ValueError(
            f"lora_linear: dropout_rate must be in [0, 1), with a key if positive; got {dropout_rate} and key={keys}"
        )
    if keys is not None and len(keys) != len(layers):
        raise ValueError(f"lora_linear: each layer needs a key; got {len(keys)} for {len(layers)} layers")
    chosen = _dispatch.choose("lora_linear", implementation, _refusals([layer.w for layer in layers], x.dtype))
    drawn = tuple(keys) if keys and dropout_rate > 0 else None
    return _lora_linears(dropout_rate, chosen, x, tuple(layers), drawn)


def explain(ws: Sequence[Array | NF4Weight] = (), dtype: jax.typing.DTypeLike = jnp.bfloat16) -> str:
    """Say which implementation runs for layers of these weights, and why."""
    return _dispatch.explain("lora_linear", _refusals(ws, dtype))


def _refusals(ws: Sequence[Array | NF4Weight], dtype: jax.typing.DTypeLike) -> _dispatch.Refusals:
    return {"mosaic_gpu": mosaic_gpu.refuses(ws, dtype), "xla": None}


def _check(x: Array, w: Array | NF4Weight, a: Array | None, b: Array | None, scale: Array) -> None:
    if len(w.shape) != 2 or (isinstance(w, NF4Weight) and w.codes.ndim != 1):
        raise ValueError(f"lora_linear: w must be one layer's (O, I) weight; got {w.shape}")
    out, width = w.shape
    if x.ndim < 1 or x.shape[-1] != width or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"lora_linear: x must be floating-point of width {width} to meet w; got {x.dtype}{x.shape}")
    if (a is None) != (b is None):
        raise ValueError(f"lora_linear: a and b go together; got {'only b' if a is None else 'only a'}")
    if (
        a is not None
        and b is not None
        and (a.ndim != 2 or b.ndim != 2 or a.shape[1] != width or b.shape != (out, a.shape[0]))
    ):
        raise ValueError(
            f"lora_linear: a must be (R, {width}) and b ({out}, R) to meet w {w.shape}; got {a.shape} and {b.shape}"
        )
    if jnp.ndim(scale) != 0:
        raise ValueError(f"lora_linear: scale must be a scalar; got shape {jnp.shape(scale)}")


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _lora_linears(
    rate: float, implementation: Implementation, x: Array, layers: tuple[Projection, ...], keys: reference.Keys
) -> tuple[Array, ...]:
    return reference.forward(x, layers, rate, keys, implementation)[0]


def _lora_linears_fwd(
    rate: float, implementation: Implementation, x: Array, layers: tuple[Projection, ...], keys: reference.Keys
) -> tuple[tuple[Array, ...], tuple]:
    ys, low = reference.forward(x, layers, rate, keys, implementation)
    return ys, (x, low, layers, keys)


def _lora_linears_bwd(rate: float, implementation: Implementation, residuals: tuple, dys: tuple[Array, ...]) -> tuple:
    x, low, layers, keys = residuals
    dx, of_adapters = reference.backward(x, low, layers, rate, keys, dys, implementation)
    frozen: Any = None
    none = (None, None)
    return dx, tuple(Projection(frozen, *(grads or none), frozen) for grads in of_adapters), None


_lora_linears.defvjp(_lora_linears_fwd, _lora_linears_bwd)
