"""Public grouped matrix product: argument checks and the gradient's wiring."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels import Implementation, _dispatch
from pallas_kernels.grouped_matmul import reference

_REFUSALS: _dispatch.Refusals = {"xla": None}


def grouped_matmul(
    x: Float[Array, "M D"],
    w: Float[Array, "E F D"],
    group_sizes: Int[Array, " E"],
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "M F"]:
    """Multiply consecutive groups of rows, each with its own weight: `y[m] = x[m] @ w[e].T` for m in group e.

    Group e is the rows from `sum(group_sizes[:e])` on, `group_sizes[e]` of them, which may be none. Rows at and beyond
    `sum(group_sizes)` belong to no group: they give zeros and pass no gradient. The backward pass keeps the arguments.
    Source: arXiv 2211.15841, section 5.1 (dropless experts); there the groups are blocks of a sparse matrix.

    Args:
        x: rows sorted by group; f32, bf16 or f16.
        w: one (F, D) weight a group, cast to x.dtype for the product.
        group_sizes: rows of each group; their sum is at most M, which cannot be checked here.
        implementation: "xla", or None for the fastest that accepts the arguments on this device.

    Returns:
        The products, summed in f32 and rounded once to x.dtype; the gradient of w has its dtype and is summed in f32.

    Raises:
        ValueError: shapes do not fit together, x or w is not floating-point, group_sizes not integer.
        NotImplementedError: the named implementation does not exist for this operation.
    """
    if x.ndim != 2 or w.ndim != 3 or x.shape[1] != w.shape[2]:
        raise ValueError(f"grouped_matmul: x must be (M, D) and w (E, F, D); got {x.shape} and {w.shape}")
    if group_sizes.shape != w.shape[:1] or not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise ValueError(
            f"grouped_matmul: group_sizes must be integers of shape {w.shape[:1]}; "
            f"got {group_sizes.dtype}{group_sizes.shape}"
        )
    if not (jnp.issubdtype(x.dtype, jnp.floating) and jnp.issubdtype(w.dtype, jnp.floating)):
        raise ValueError(f"grouped_matmul: x and w must be floating-point; got {x.dtype} and {w.dtype}")
    _dispatch.choose("grouped_matmul", implementation, _REFUSALS)
    return _grouped_matmul(x, w, group_sizes)


def explain() -> str:
    """Say which implementation runs."""
    return _dispatch.explain("grouped_matmul", _REFUSALS)


@jax.custom_vjp
def _grouped_matmul(x: Array, w: Array, group_sizes: Array) -> Array:
    return reference.forward(x, w, group_sizes)


def _grouped_matmul_fwd(x: Array, w: Array, group_sizes: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    return reference.forward(x, w, group_sizes), (x, w, group_sizes)


def _grouped_matmul_bwd(residuals: tuple[Array, Array, Array], dy: Array) -> tuple[Array, Array, np.ndarray]:
    x, w, group_sizes = residuals
    dx = reference.backward_x(dy, w, group_sizes)
    dw = reference.backward_w(x, dy, group_sizes, w.dtype)
    return dx, dw, np.zeros(group_sizes.shape, jax.dtypes.float0)


_grouped_matmul.defvjp(_grouped_matmul_fwd, _grouped_matmul_bwd)
