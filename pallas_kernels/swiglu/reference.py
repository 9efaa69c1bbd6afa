"""Gated activations in plain jnp: forward and backward, all arithmetic in f32."""

import math
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Activation = Literal["silu", "gelu", "gelu_tanh"]


def forward(gate: Float[Array, "*B F"], up: Float[Array, "*B F"], activation: Activation) -> Float[Array, "*B F"]:
    """Return activation(gate) * up in gate's dtype."""
    active, _ = _value_and_slope(gate.astype(jnp.float32), activation)
    return (active * up.astype(jnp.float32)).astype(gate.dtype)


def backward(gate: Array, up: Array, dy: Array, activation: Activation) -> tuple[Array, Array]:
    """Return the gradients of gate and up: dup = dy * f(gate), dgate = dy * up * f'(gate), f being the activation.

    Nothing but gate and up is kept from the forward pass.
    """
    active, slope = _value_and_slope(gate.astype(jnp.float32), activation)
    dy_f32 = dy.astype(jnp.float32)
    dgate = dy_f32 * up.astype(jnp.float32) * slope
    return dgate.astype(gate.dtype), (dy_f32 * active).astype(up.dtype)


def _value_and_slope(x: Array, activation: Activation) -> tuple[Array, Array]:
    """f(x) and f'(x); with f(x) = x * s(x), f' = s + x * s'."""
    if activation == "silu":
        share = jax.nn.sigmoid(x)
        return x * share, share * (1 + x * (1 - share))
    if activation == "gelu":  # s is the normal distribution's share below x, s' its density
        share = 0.5 * (1 + jax.lax.erf(x / math.sqrt(2)))
        return x * share, share + x * jnp.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
    tanh = jnp.tanh(inner)
    share, inner_slope = 0.5 * (1 + tanh), math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x * x)
    return x * share, share + 0.5 * x * (1 - tanh * tanh) * inner_slope
