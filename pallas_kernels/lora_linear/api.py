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

_KERNELS = {"mosaic_gpu": mosaic_gpu.KERNELS, "xla": reference.XLA}


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
        implementation: "mosaic_gpu", "xla", or None for the fastest that accepts the arguments on this device. The
            former's products with adapters are one pass over their wide operand where it has whole tiles and a rank of
            at most 64, and it unpacks packed weights; the base's product is XLA's, but for packed weights and few rows.

    Returns:
        The sum in x.dtype; gradients of a and b have their dtypes and are summed in f32.

    Raises:
        ValueError: shapes do not fit together, dropout_rate is outside [0, 1), or it has no key.
        NotImplementedError: the named implementation refuses these arguments or does not exist for this operation.
    """
    layer = Projection(w, a, b, jnp.asarray(scale, jnp.float32))
    keys = None if key is None else (key,)
    return lora_linears(x, (layer,), dropout_rate=dropout_rate, keys=keys, implementation=implementation)[0]


def lora_linears(
    x: Float[Array, "*B I"] | Float[Array, "*B I+"],
    layers: Sequence[Projection],
    *,
    dropout_rate: float = 0.0,
    keys: Sequence[Key[Array, ""]] | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "*B O"], ...]:
    """Several adapted linear layers of one input, read once: as lora_linear for each.

    Args:
        x: f32, bf16 or f16, any leading axes; may have `room(x, layers)` more columns, whatever they hold, for what
            is put there in place.
        layers: at least one with an adapter; ranks and scales may differ.
        dropout_rate: probability of zeroing an element of the adapters' input; the rest are divided by 1 - rate.
        keys: random key of each layer's dropout mask; needed where dropout_rate > 0.
        implementation: "mosaic_gpu", "xla", or None for the fastest that accepts the arguments on this device. The
            former's products with adapters are one pass over their wide operand where it has whole tiles and a rank of
            at most 64, and it unpacks packed weights; the base's product is XLA's, but for packed weights and few rows.

    Returns:
        Each layer's sum in x.dtype; gradients of a and b have their dtypes and are summed in f32.

    Raises:
        ValueError: shapes do not fit together, no layer has an adapter, dropout_rate is outside [0, 1), or it has no
            key for each layer.
        NotImplementedError: the named implementation refuses these arguments or does not exist for this operation.
    """
    for layer in layers:
        _check(*layer)
    if all(layer.a is None for layer in layers):
        raise ValueError(f"lora_linear: none of the {len(layers)} layers has an adapter")
    if not 0 <= dropout_rate < 1 or (dropout_rate > 0 and keys is None):
        raise ValueError(
            f"lora_linear: dropout_rate must be in [0, 1), with a key if positive; got {dropout_rate} and key={keys}"
        )
    if keys is not None and len(keys) != len(layers):
        raise ValueError(f"lora_linear: each layer needs a key; got {len(keys)} for {len(layers)} layers")
    behind = _columns_behind(x, layers, room(x, layers, implementation=implementation))
    chosen = _choose(x, layers, implementation)
    keys = tuple(keys) if keys and dropout_rate > 0 else None
    return _lora_linears(dropout_rate, chosen, behind, x, tuple(layers), keys)


def room(x: Float[Array, "*B I"], layers: Sequence[Projection], *, implementation: Implementation | None = None) -> int:
    """Return how many columns behind x `lora_linears` has a use for; 0 where it does better without.

    Who makes x by a kernel should leave them there (`rms_norm(room=)`): products with packed weights, which are
    unpacked with room for b anyway, are then cuBLAS' with the adapters' inside.

    Args:
        x: as in `lora_linears`; only its shape and dtype count.
        layers: likewise.
        implementation: likewise.
    """
    if _choose(x, layers, implementation) == "xla":
        return 0
    return reference.room(x, layers, mosaic_gpu.KERNELS.weights) if mosaic_gpu.puts_last(x) else 0


def explain(ws: Sequence[Array | NF4Weight] = (), rows: int = 8192) -> str:
    """Say which implementation runs for bf16 inputs of so many rows and layers of these weights, and why."""
    return _dispatch.explain("lora_linear", _refusals(jax.ShapeDtypeStruct((rows, 1), jnp.bfloat16), ws))


def _refusals(x: Array | jax.ShapeDtypeStruct, ws: Sequence[Array | NF4Weight]) -> _dispatch.Refusals:
    return {"mosaic_gpu": mosaic_gpu.refuses(x, ws), "xla": None}


def _choose(x: Array, layers: Sequence[Projection], implementation: Implementation | None) -> Implementation:
    return _dispatch.choose("lora_linear", implementation, _refusals(x, [layer.w for layer in layers]))


def _columns_behind(x: Array, layers: Sequence[Projection], more: int) -> int:
    """How many columns x has beyond those that the layers multiply: `more`, or none."""
    behind = more if x.ndim and x.shape[-1] == layers[0].w.shape[1] + more else 0
    for layer in layers:
        width = layer.w.shape[1]
        if x.ndim < 1 or x.shape[-1] - behind != width or not jnp.issubdtype(x.dtype, jnp.floating):
            also = f" (or {width + more}, with room behind)" if more else ""
            raise ValueError(
                f"lora_linear: x must be floating-point of width {width}{also} to meet w; got {x.dtype}{x.shape}"
            )
    return behind


def _check(w: Array | NF4Weight, a: Array | None, b: Array | None, scale: Array) -> None:
    if len(w.shape) != 2 or (isinstance(w, NF4Weight) and w.codes.ndim != 1):
        raise ValueError(f"lora_linear: w must be one layer's (O, I) weight; got {w.shape}")
    out, width = w.shape
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
    given = {
        name: z.dtype for name, z in (("w", w), ("a", a), ("b", b)) if z is not None and not isinstance(z, NF4Weight)
    }
    whole = [f"{name} {dtype}" for name, dtype in given.items() if not jnp.issubdtype(dtype, jnp.floating)]
    if whole:
        raise ValueError(
            f"lora_linear: w, a and b must be floating-point, w packed as NF4Weight; got {', '.join(whole)}"
        )
    if jnp.ndim(scale) != 0:
        raise ValueError(f"lora_linear: scale must be a scalar; got shape {jnp.shape(scale)}")


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _lora_linears(
    rate: float,
    chosen: Implementation,
    behind: int,
    x: Array,
    layers: tuple[Projection, ...],
    keys: reference.Keys,
) -> tuple[Array, ...]:
    del behind
    return reference.forward(x, layers, rate, keys, _KERNELS[chosen])[0]


def _lora_linears_fwd(
    rate: float,
    chosen: Implementation,
    behind: int,
    x: Array,
    layers: tuple[Projection, ...],
    keys: reference.Keys,
) -> tuple[tuple[Array, ...], tuple]:
    del behind
    ys, kept = reference.forward(x, layers, rate, keys, _KERNELS[chosen])
    return ys, (kept, layers, keys)


def _lora_linears_bwd(
    rate: float, chosen: Implementation, behind: int, residuals: tuple, dys: tuple[Array, ...]
) -> tuple:
    kept, layers, keys = residuals
    dx, of_adapters = reference.backward(kept, layers, rate, keys, dys, _KERNELS[chosen])
    frozen: Any = None
    none = (None, None)
    of_layers = tuple(Projection(frozen, *(grads or none), frozen) for grads in of_adapters)
    return jnp.pad(dx, [(0, 0)] * (dx.ndim - 1) + [(0, behind)]), of_layers, None


_lora_linears.defvjp(_lora_linears_fwd, _lora_linears_bwd)
