"""x @ w.T whatever w is stored as."""

import jax
from jax import numpy as jnp
from jaxtyping import Array, Float, PyTree

from pallas_kernels.nf4_linear import NF4Weight, nf4_linear


def matmul(x: Float[Array, "*B I"], w: Float[Array, "O I"] | NF4Weight) -> Float[Array, "*B O"]:
    """Multiply by a weight in Hugging Face's orientation: `y = x @ w.T`, accumulated in f32, returned in x.dtype.

    Args:
        x: any leading axes, f32, bf16 or f16.
        w: (O, I) array, cast to x.dtype, or a packed NF4Weight of that shape.

    Raises:
        ValueError: the last axis of x is not the width that w takes.
    """
    if x.shape[-1] != w.shape[-1]:
        raise ValueError(f"x of shape {x.shape} has width {x.shape[-1]}, but w of shape {w.shape} takes {w.shape[-1]}")
    if isinstance(w, NF4Weight):
        return nf4_linear(x, w)
    y = jax.lax.dot_general(x, w.astype(x.dtype), (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return y.astype(x.dtype)


def weight_bytes(tree: PyTree) -> int:
    """Bytes that the arrays of a tree take in memory; packed weights count as packed.

    Args:
        tree: any pytree of arrays or jax.ShapeDtypeStruct; NF4Weight is a pytree of its packed arrays.

    Returns:
        Sum of size times bytes an element over all leaves.
    """
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
