"""A layer's small operations, as kernels with gradients of their own or as plain jnp that JAX differentiates."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.rms_norm import rms_norm, rms_norm_residual
from pallas_kernels.rope import rope
from pallas_kernels.swiglu import Activation, swiglu


@dataclasses.dataclass(frozen=True)
class LayerOps:
    """The operations that a layer is made of beside its products and attention; see the kernels of these names."""

    rms_norm: Callable[..., Array]
    rms_norm_residual: Callable[..., tuple[Array, Array]]
    rope: Callable[..., tuple[Array, Array]]
    swiglu: Callable[..., Array]


def layer_ops(fused_ops: bool) -> LayerOps:
    """Kernels, or plain jnp: what a model does without them, to compare with."""
    return _FUSED if fused_ops else _PLAIN


def _rms_norm(
    x: Float[Array, "*B D"], scale: Float[Array, " D"], *, eps: float, offset: float = 0.0, room: int = 0
) -> Array:
    del room  # nobody joins anything behind
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (normed * (scale.astype(jnp.float32) + offset)).astype(x.dtype)


def _rms_norm_residual(x: Array, scale: Array, **options: Any) -> tuple[Array, Array]:
    return x, _rms_norm(x, scale, **options)


def _rope(q: Array, k: Array, cos: Array, sin: Array) -> tuple[Array, Array]:
    cos, sin = (table[:, :, None] for table in (cos, sin))
    width = cos.shape[-1]

    def turn(x: Array) -> Array:
        first, second, passed = jnp.split(x, (width, 2 * width), axis=-1)
        turned = first * cos - second * sin, second * cos + first * sin
        return jnp.concatenate([*(part.astype(x.dtype) for part in turned), passed], axis=-1)

    return turn(q), turn(k)


def _swiglu(gate: Array, up: Array, *, activation: Activation = "silu") -> Array:
    wide = gate.astype(jnp.float32)
    active = jax.nn.silu(wide) if activation == "silu" else jax.nn.gelu(wide, approximate=activation == "gelu_tanh")
    return (active * up.astype(jnp.float32)).astype(gate.dtype)


# In a layer XLA's rotation also takes q and k out of the joint product, and rounds and transposes the gradient of q
# that attention sums in f32, for which the kernel needs passes of 64 MiB and more before it. Its SwiGLU gives both
# gradients and the product that is made again in one pass, where the kernel, a few percent faster, makes it alone.
_FUSED = LayerOps(
    rms_norm,
    rms_norm_residual,
    functools.partial(rope, implementation="xla"),
    functools.partial(swiglu, implementation="xla"),
)
_PLAIN = LayerOps(_rms_norm, _rms_norm_residual, _rope, _swiglu)
