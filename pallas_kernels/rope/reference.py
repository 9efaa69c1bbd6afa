"""Rotary position embedding in plain jnp."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def rotate(
    x: Float[Array, "B T N H"], cos: Float[Array, "B T R/2"], sin: Float[Array, "B T R/2"], interleaved: bool
) -> Array:
    """Rotate pairs of channels of each head by the angle of their position; f32 inside, x.dtype out.

    The pairs are (x[i], x[i + R/2]) or, interleaved, (x[2i], x[2i + 1]).

    Channels from R on pass unchanged.
    """
    rotated, passed = jnp.split(x, [2 * cos.shape[-1]], axis=-1)
    if interleaved and passed.shape[-1]:  # XLA joins the swapped neighbours and what passes in one kernel
        cos, sin = (jnp.repeat(table, 2, axis=-1)[:, :, None] for table in (cos, sin))
        wide = rotated.astype(jnp.float32)
        swapped = jnp.stack([-wide[..., 1::2], wide[..., ::2]], axis=-1).reshape(wide.shape)
        return jnp.concatenate([(wide * cos + swapped * sin).astype(x.dtype), passed], axis=-1)
    # One multiply-add over both halves: XLA reads the swapped operand backwards, where joining two results is a slow
    # kernel of its own.
    axis = -1 if interleaved else -2
    pairs = (cos.shape[-1], 2) if interleaved else (2, cos.shape[-1])
    halves = rotated.astype(jnp.float32).reshape(*rotated.shape[:-1], *pairs)
    cos, sin = jnp.expand_dims(cos, (2, axis)), jnp.stack([-sin, sin], axis=axis)[:, :, None]
    turned = halves * cos + jnp.flip(halves, axis=axis) * sin
    turned = turned.astype(x.dtype).reshape(rotated.shape)
    return turned if passed.shape[-1] == 0 else jnp.concatenate([turned, passed], axis=-1)
