"""Low-rank adapted linear layer in plain jnp: forward and backward.

Products with the adapter are bracketed so that every intermediate has rank width. The adapter's product is added to
the base's in x.dtype, a form that XLA folds into one matrix product with an accumulator.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key


def drop(x: Float[Array, "*B I"], rate: float, key: Key[Array, ""] | None) -> Float[Array, "*B I"]:
    """Zero each element with probability rate, divide the others by 1 - rate; a linear map that is its own adjoint."""
    if key is None:  # as the caller has it where rate is 0
        return x
    keep = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate), 0).astype(x.dtype)


def forward(
    x: Float[Array, "*B I"],
    base: Float[Array, "*B O"],
    a: Float[Array, "R I"],
    b: Float[Array, "O R"],
    scale: Float[Array, ""],
    rate: float,
    key: Key[Array, ""] | None,
) -> tuple[Float[Array, "*B O"], Float[Array, "*B R"]]:
    """Return base + scale * (drop(x) @ a.T) @ b.T, and drop(x) @ a.T in x.dtype."""
    low = _f32_product("...i,ri->...r", drop(x, rate, key), a.astype(x.dtype))
    y = base + jnp.einsum("...r,or->...o", (scale * low).astype(x.dtype), b.astype(x.dtype))
    return y, low.astype(x.dtype)


def backward(
    x: Float[Array, "*B I"],
    dx_base: Float[Array, "*B I"],
    low: Float[Array, "*B R"],
    a: Float[Array, "R I"],
    b: Float[Array, "O R"],
    scale: Float[Array, ""],
    rate: float,
    key: Key[Array, ""] | None,
    dy: Float[Array, "*B O"],
) -> tuple[Array, Array, Array]:
    """Return the gradients of x (dx_base included), a and b; the adapters' are summed in f32."""
    dlow = (scale * _f32_product("...o,or->...r", dy, b.astype(dy.dtype))).astype(dy.dtype)
    da = _f32_product("...r,...i->ri", dlow, drop(x, rate, key))
    db = scale * _f32_product("...o,...r->or", dy, low)
    dx = dx_base + drop(jnp.einsum("...r,ri->...i", dlow, a.astype(dy.dtype)), rate, key)
    return dx, da.astype(a.dtype), db.astype(b.dtype)


def _f32_product(dims: str, left: Array, right: Array) -> Array:
    return jnp.einsum(dims, left, right, preferred_element_type=jnp.float32)
