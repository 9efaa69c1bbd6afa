"""x @ w.T whatever w is stored as."""

from typing import Any

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
    # In f32 the product's own transposes are right, and stay in the precision that it was asked for in.
    return _product(x, w) if x.dtype == jnp.float32 else _narrow_product(x, w)


def _product(x: Array, w: Array) -> Array:
    return jnp.einsum("...i,oi->...o", x, w.astype(x.dtype))


@jax.custom_vjp
def _narrow_product(x: Array, w: Array) -> Array:
    """The product of 16-bit numbers, whose gradients are products of 16-bit numbers too, summed in f32.

    The transpose of a product that returns f32 would meet dy in f32, and widen the other operand. The gradient of w is
    rounded to its own dtype alone, so that a weight in f32 gets all of it.
    """
    return _product(x, w)


def _narrow_product_fwd(x: Any, w: Any) -> tuple[Array, tuple[Array | None, Array]]:
    # A frozen weight needs nothing of x, which is as large as a layer's result.
    return _product(x.value, w.value), (x.value if w.perturbed else None, w.value)


def _narrow_product_bwd(residuals: tuple[Array | None, Array], dy: Array) -> tuple[Array, Array | None]:
    x, w = residuals
    dx = jnp.einsum("...o,oi->...i", dy, w.astype(dy.dtype))
    if x is None:
        return dx, None
    return dx, jnp.einsum("...o,...i->oi", dy, x, preferred_element_type=jnp.float32).astype(w.dtype)


_narrow_product.defvjp(_narrow_product_fwd, _narrow_product_bwd, symbolic_zeros=True)


def weight_bytes(tree: PyTree) -> int:
    """Bytes that the arrays of a tree take in memory; packed weights count as packed.

    Args:
        tree: any pytree of arrays or jax.ShapeDtypeStruct; NF4Weight is a pytree of its packed arrays.

    Returns:
        Sum of size times bytes an element over all leaves.
    """
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
