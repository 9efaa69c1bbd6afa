"""RMSNorm in plain jnp: forward and backward, all arithmetic in f32."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def forward(x: Float[Array, "*B D"], scale: Float[Array, " D"], eps: float) -> tuple[Array, Float[Array, "*B 1"]]:
    """Return the normalised x in x.dtype and the reciprocal root mean square in f32."""
    x_f32 = x.astype(jnp.float32)
    rrms = jax.lax.rsqrt(jnp.mean(x_f32 * x_f32, axis=-1, keepdims=True) + eps)
    return (x_f32 * rrms * scale.astype(jnp.float32)).astype(x.dtype), rrms


def backward(x: Array, scale: Array, rrms: Array, dy: Array) -> tuple[Array, Array]:
    """Return the gradients of x and of scale, each in its own dtype, from the gradient of the output.

    With n = x * rrms and g = dy * scale: dx = rrms * (g - n * mean(g * n)), dscale = sum over rows of dy * n.
    """
    normed = x.astype(jnp.float32) * rrms
    dy_f32 = dy.astype(jnp.float32)
    dnormed = dy_f32 * scale.astype(jnp.float32)
    dx = rrms * (dnormed - normed * jnp.mean(dnormed * normed, axis=-1, keepdims=True))
    dscale = jnp.sum(dy_f32 * normed, axis=tuple(range(x.ndim - 1)))
    return dx.astype(x.dtype), dscale.astype(scale.dtype)
