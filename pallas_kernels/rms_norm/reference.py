"""RMSNorm in plain jnp: forward and backward, all arithmetic in f32."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def forward(
    x: Float[Array, "*B D"], scale: Float[Array, " D"], eps: float, room: int = 0
) -> tuple[Float[Array, "*B D+room"], Float[Array, "*B 1"]]:
    """Return the normalised x in x.dtype with `room` zeros behind it, and the reciprocal root mean square in f32."""
    x_f32 = x.astype(jnp.float32)
    rrms = jax.lax.rsqrt(jnp.mean(x_f32 * x_f32, axis=-1, keepdims=True) + eps)
    y = (x_f32 * rrms * scale.astype(jnp.float32)).astype(x.dtype)
    return jnp.pad(y, [(0, 0)] * (x.ndim - 1) + [(0, room)]) if room else y, rrms


def forward_added(
    x: Float[Array, "*B D"], added: Float[Array, "*B D"], scale: Float[Array, " D"], eps: float, room: int = 0
) -> tuple[Float[Array, "*B D"], Float[Array, "*B D+room"], Float[Array, "*B 1"]]:
    """Return x + added, and `forward` of it."""
    total = x + added
    return total, *forward(total, scale, eps, room)


def backward(
    x: Array, scale: Array, rrms: Array, dy: Array, dresidual: Array | None = None, *, trained: bool
) -> tuple[Array, Array | None]:
    """Return the gradients of x and, if trained, of scale, each in its own dtype, from the gradient of the output.

    With n = x * rrms and g = dy * scale: dx = rrms * (g - n * mean(g * n)), dscale = sum over rows of dy * n. What else
    x's gradient consists of, `dresidual`, is added to the rounded dx, as differentiation of a sum does.
    """
    mean = functools.partial(jnp.mean, axis=-1, keepdims=True)
    x_f32, dy_f32, scale_f32 = (array.astype(jnp.float32) for array in (x, dy, scale))
    dx = gradients(x_f32, dy_f32, scale_f32, rrms, mean)[0].astype(x.dtype)
    dx = dx if dresidual is None else dx + dresidual
    return dx, backward_scale(x, scale, rrms, dy) if trained else None


def gradients(x: Array, dy: Array, scale: Array, rrms: Array, mean: Callable[[Array], Array]) -> tuple[Array, Array]:
    """Return dx and each row's part of dscale, as in `backward`, all in f32; `mean` is that of a row."""
    normed, dnormed = x * rrms, dy * scale
    return rrms * (dnormed - normed * mean(dnormed * normed)), dy * normed


def backward_scale(x: Array, scale: Array, rrms: Array, dy: Array) -> Array:
    """Return the second of `backward`, whose sum over rows is in f32."""
    normed = x.astype(jnp.float32) * rrms
    return jnp.sum(dy.astype(jnp.float32) * normed, axis=tuple(range(x.ndim - 1))).astype(scale.dtype)
