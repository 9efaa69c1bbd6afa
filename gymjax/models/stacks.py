"""Arrays stacked over layers, read and written a layer at a time by the counter of a loop over layers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array


def empty(layers: int, like: Any) -> Array:
    """Memory for an array of every layer, [layers, *like.shape] of like's dtype, which nobody has written."""
    return jax.lax.empty((layers, *like.shape), like.dtype)


def write(stack: Array, value: Array, index: Array | int) -> Array:
    """The stack with a layer's value in it.

    The maximum, which changes nothing, hides from XLA that what is read at the index is the value: it would be kept for
    its readers beside the stack, and copied there.
    """
    at = (jnp.maximum(index, 0), *[0] * value.ndim)
    return jax.lax.dynamic_update_slice(stack, value[None], at, allow_negative_indices=False)


def read(stacks: Any, index: Array | int) -> Any:
    """A layer's part of stacked arrays.

    The index is the loop's own, or differs from it by a constant, and never leaves the stack: then XLA knows before an
    iteration where the part lies. It hands kernels that place, and gets parts out of the host's memory by the copy
    engine; by an index that it has to compute on the GPU it copies, with a kernel of its own.
    """

    def one(stack: Array) -> Array:
        return jax.lax.dynamic_index_in_dim(stack, index, keepdims=False, allow_negative_indices=False)

    return jax.tree.map(one, stacks)
