"""A scan over layers whose inputs wait for the backward pass in the host's memory, fetched a layer ahead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

Body = Callable[[Array, Any, Any], tuple[Array, Any]]


def scan_offloaded(body: Body, x: Array, trained: Any, rest: Any) -> tuple[Array, Any]:
    """`lax.scan` of `x, out = body(x, trained[i], rest[i])`, differentiable by x and `trained`.

    The backward pass computes each layer again from its input, as full rematerialisation does. The inputs leave for
    pinned host memory while the next layer is computed, and each comes back while the layer behind it is: a scan that
    `jax.grad` turns around would fetch it in the iteration that begins with it, and wait.

    Args:
        body: one layer; reads what it closes over as constants.
        x: the first layer's input, an array of floating-point numbers.
        trained: pytree of arrays stacked over layers, floating-point.
        rest: pytree of arrays stacked over layers, without gradients.

    Returns:
        (the last layer's output, every layer's `out` stacked).
    """
    layers = len(jax.tree.leaves((trained, rest))[0])

    @jax.custom_vjp
    def run(x, trained, rest):
        return jax.lax.scan(lambda x, layer: body(x, *layer), x, (trained, rest))

    def forward(x, trained, rest):
        def step(x, layer):
            following, out = body(x, *layer)
            return following, (out, jax.device_put(x, jax.memory.Space.Host))

        x, (outs, inputs) = jax.lax.scan(step, x, (trained, rest))
        return (x, outs), (inputs, trained, rest)

    def backward(kept, cotangents):
        inputs, trained, rest = kept
        dx, douts = cotangents

        def fetch(layer):
            return jax.device_put(jax.lax.dynamic_index_in_dim(inputs, layer, keepdims=False), jax.memory.Space.Device)

        def step(carry, layer):
            dx, x = carry
            index, trained, rest, dout = layer
            ahead = fetch(jnp.maximum(index - 1, 0))
            _, pull_back = jax.vjp(lambda x, trained: body(x, trained, rest), x, trained)
            dx, dtrained = pull_back((dx, dout))
            return (dx, ahead), dtrained

        first = (dx, fetch(layers - 1))
        stacked = (jnp.arange(layers), trained, rest, douts)
        (dx, _), dtrained = jax.lax.scan(step, first, stacked, reverse=True)
        return dx, dtrained, None

    run.defvjp(forward, backward)
    return run(x, trained, rest)
