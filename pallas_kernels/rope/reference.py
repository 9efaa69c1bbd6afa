"""Rotary position embedding in plain jnp."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def rotate(x: Float[Array, "B T N H"], cos: Float[Array, "B T H/2"], sin: Float[Array, "B T H/2"]) -> Array:
    """Rotate the pairs (x[i], x[i + H/2]) of each head by the angle of their position; f32 inside, x.dtype out."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
