"""Layers that follow each other in the program, where a scan would copy what they keep into stacked arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.nf4_linear import NF4Weight

Body = Callable[[Any, Any, Any], tuple[Any, Any]]


def run_unrolled(body: Body, carry: Any, trained: Any, rest: Any, policy: Callable[..., Any]) -> tuple[Any, Any]:
    """`lax.scan` of `carry, out = body(carry, trained[i], rest[i])`, layer after layer, each under `jax.checkpoint`.

    What a layer keeps stays where its kernel wrote it. In a scan it is copied into an array of all layers, which was
    filled with zeros before, and a kernel's result that is read at once cannot be written there. The program grows with
    the layers, and so does the time to compile it.

    What is kept goes through a barrier in the backward pass, so that nothing made of it is shared with the forward pass
    and held in between. Weights do not, as slices of stacked arrays are read in place by those that multiply with them,
    and barriers want them copied: what is made of weights alone (casts, joined adapters) is shared. Packed weights do:
    their tables are constants of the layer, and with such (jax 0.11) it is all arguments or none.

    Args:
        body: one layer.
        carry: the first layer's input, a pytree.
        trained: pytree of arrays stacked over layers, floating-point.
        rest: pytree of arrays stacked over layers, without gradients.
        policy: what is kept beside carry.

    Returns:
        (the last layer's carry, every layer's `out` stacked).
    """
    count = len(jax.tree.leaves((trained, rest))[0])
    packed = any(map(_is_packed, jax.tree.leaves(rest, is_leaf=_is_packed)))
    layer = jax.checkpoint(body, prevent_cse=packed or (True, False, False), policy=policy)
    split, tree = jax.tree.flatten(trained)
    layers = (
        [tree.unflatten(leaves) for leaves in zip(*map(_unstack, split), strict=True)] if split else [trained] * count
    )
    outs = []
    for index in range(count):
        carry, out = layer(carry, layers[index], jax.tree.map(lambda leaf, index=index: leaf[index], rest))
        outs.append(out)
    return carry, jax.tree.map(lambda *parts: jnp.stack(parts), *outs)


def _is_packed(leaf: Any) -> bool:
    return isinstance(leaf, NF4Weight)


@jax.custom_vjp
def _unstack(x: Array) -> tuple[Array, ...]:
    """The layers' arrays. Their gradients are joined once, not added up as arrays of all layers."""
    return tuple(x[index] for index in range(len(x)))


def _unstack_bwd(_: None, parts: tuple[Array, ...]) -> tuple[Array]:
    return (jnp.stack(parts),)


_unstack.defvjp(lambda x: (_unstack(x), None), _unstack_bwd)
