"""A scan over layers whose inputs wait for the backward pass in the host's memory, fetched a layer ahead."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array

from gymjax.models.stacks import empty, read, write

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
        _, out = jax.eval_shape(lambda x, layers: body(x, *read(layers, 0)), x, (trained, rest))
        inputs = jax.device_put(empty(1 + layers, x), jax.memory.Space.Host)  # the first stays empty, see `backward`
        outs = jax.tree.map(functools.partial(empty, layers), out)

        def step(index, carry):
            x, outs, inputs = carry
            inputs = write(inputs, jax.device_put(x, jax.memory.Space.Host), index + 1)
            x, out = body(x, *read((trained, rest), index))
            return x, jax.tree.map(lambda stack, value: write(stack, value, index), outs, out), inputs

        x, outs, inputs = jax.lax.fori_loop(0, layers, step, (x, outs, inputs))
        return (x, outs), (inputs, trained, rest)

    def backward(kept, cotangents):
        inputs, trained, rest = kept
        dx, douts = cotangents

        def fetch(place):
            return jax.device_put(read(inputs, place), jax.memory.Space.Device)

        def step(n, carry):
            dx, x, dtrained = carry
            index = layers - 1 - n
            ahead = fetch(index)  # the input of the layer before, and behind the first layer the empty one
            trained_layer, rest_layer, dout = read((trained, rest, douts), index)
            _, pull_back = jax.vjp(lambda x, trained: body(x, trained, rest_layer), x, trained_layer)
            dx, parts = pull_back((dx, dout))
            return dx, ahead, jax.tree.map(lambda stack, part: write(stack, part, index), dtrained, parts)

        dtrained = jax.tree.map(lambda leaf: empty(layers, leaf[0]), trained)
        dx, _, dtrained = jax.lax.fori_loop(0, layers, step, (dx, fetch(layers), dtrained))
        return dx, dtrained, None

    run.defvjp(forward, backward)
    return run(x, trained, rest)
