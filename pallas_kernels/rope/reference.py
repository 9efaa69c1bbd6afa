"""Rotary position embedding in plain jnp."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def rotate(x: Float[Array, "B T N H"], cos: Float[Array, "B T R/2"], sin: Float[Array, "B T R/2"]) -> Array:
    """Rotate the pairs (x[i], x[i + R/2]) of each head by the angle of their position; f32 inside, x.dtype out.

    Channels from R on pass unchanged.
    """
    rotated, passed = jnp.split(x, [2 * cos.shape[-1]], axis=-1)
    # One multiply-add over both halves: XLA reads the swapped operand backwards, where joining two results is a slow
    # kernel of its own.
    halves = rotated.astype(jnp.float32).reshape(*rotated.shape[:-1], 2, cos.shape[-1])
    cos, sin = cos[:, :, None, None, :], jnp.stack([-sin, sin], axis=-2)[:, :, None]
    turned = halves * cos + jnp.flip(halves, axis=-2) * sin
    turned = turned.astype(x.dtype).reshape(rotated.shape)
    return turned if passed.shape[-1] == 0 else jnp.concatenate([turned, passed], axis=-1)
