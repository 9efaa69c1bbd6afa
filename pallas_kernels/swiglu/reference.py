"""SwiGLU in plain jnp: forward and backward, all arithmetic in f32."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def forward(gate: Float[Array, "*B F"], up: Float[Array, "*B F"]) -> Float[Array, "*B F"]:
    """Return silu(gate) * up in gate's dtype."""
    return (jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(gate.dtype)


def backward(gate: Array, up: Array, dy: Array) -> tuple[Array, Array]:
    """Return the gradients of gate and up: dup = dy * silu(gate), dgate = dy * up * s * (1 + gate * (1 - s)).

    s is sigmoid(gate); nothing but gate and up is kept from the forward pass.
    """
    gate_f32, dy_f32 = gate.astype(jnp.float32), dy.astype(jnp.float32)
    sigmoid = jax.nn.sigmoid(gate_f32)
    dup = dy_f32 * gate_f32 * sigmoid
    dgate = dy_f32 * up.astype(jnp.float32) * sigmoid * (1 + gate_f32 * (1 - sigmoid))
    return dgate.astype(gate.dtype), dup.astype(up.dtype)
