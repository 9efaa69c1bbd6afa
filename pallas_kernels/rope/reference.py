"""Rotary position embedding in plain jnp."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def rotate(x: Float[Array, "B T N H"], cos: Float[Array, "B T R/2"], sin: Float[Array, "B T R/2"]) -> Array:
    """Rotate the pairs (x[i], x[i + R/2]) of each head by the angle of their position; f32 inside, x.dtype out.

    Channels from R on pass unchanged.
    """
    rotated, passed = jnp.split(x, [2 * cos.shape[-1]], axis=-1)
    first, second = jnp.split(rotated.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
    return turned if passed.shape[-1] == 0 else jnp.concatenate([turned, passed], axis=-1)
