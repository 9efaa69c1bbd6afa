"""Public grouped matrix product: argument checks and the gradient's wiring."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels import Implementation, _dispatch
from pallas_kernels.grouped_matmul import mosaic_gpu, reference

_KERNELS = {"mosaic_gpu": mosaic_gpu, "xla": reference}


def grouped_matmul(
    x: Float[Array, "M D"],
    w: Float[Array, "E F D"],
    group_sizes: Int[Array, " E"],
    *,
    transposed: bool = True,
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
        transposed: whether the product is with w's transpose; without, w is (E, D, F) and `y[m] = x[m] @ w[e]`.
        implementation: "mosaic_gpu", "xla", or None for the first of them that accepts the arguments on this device.

    Returns:
        The products, summed in f32 and rounded once to x.dtype; the gradient of w has its dtype and is summed in f32.

    Raises:
        ValueError: shapes do not fit together, x or w is not floating-point, group_sizes not integer.
        NotImplementedError: the named implementation refuses these arguments; the message says why and what is usable.
    """
    if x.ndim != 2 or w.ndim != 3 or x.shape[1] != w.shape[2 if transposed else 1]:
        axes = "(E, F, D)" if transposed else "(E, D, F)"
        raise ValueError(f"grouped_matmul: x must be (M, D) and w {axes}; got {x.shape} and {w.shape}")
    if group_sizes.shape != w.shape[:1] or not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise ValueError(
            f"grouped_matmul: group_sizes must be integers of shape {w.shape[:1]}; "
            f"got {group_sizes.dtype}{group_sizes.shape}"
        )
    if not (jnp.issubdtype(x.dtype, jnp.floating) and jnp.issubdtype(w.dtype, jnp.floating)):
        raise ValueError(f"grouped_matmul: x and w must be floating-point; got {x.dtype} and {w.dtype}")
    name = choose(x, w, implementation)
    return _grouped_matmul(x, w, group_sizes, transposed, name)


def explain(x: Float[Array, "M D"] | jax.ShapeDtypeStruct, w: Float[Array, "E F D"] | jax.ShapeDtypeStruct) -> str:
    """Say which implementation None picks for these arguments (arrays or jax.ShapeDtypeStruct) and why."""
    return _dispatch.explain("grouped_matmul", _refusals(x, w))


def choose(x: Array, w: Any, implementation: Implementation | None) -> Implementation:
    """Return the implementation that runs; of w, dense or packed, only its shape counts."""
    return _dispatch.choose("grouped_matmul", implementation, _refusals(x, w))


def product(
    name: Implementation, xs: Sequence[Array], ws: Sequence[Array], group_sizes: Array, *, transposed: bool
) -> Float[Array, "M F"]:
    """Return the sum over i of `xs[i][m] @ ws[i][e].T`, rounded once, by a chosen implementation; no gradient."""
    return _KERNELS[name].products(xs, ws, group_sizes, transposed=transposed)


def weights_gradient(name: Implementation, x: Array, dy: Array, group_sizes: Array, dtype: jnp.dtype) -> Array:
    """Return the sum of `dy[m] x[m].T` over each group's rows, (E, F, D), by a chosen implementation."""
    return _KERNELS[name].backward_w(x, dy, group_sizes, dtype)


def kernels(name: Implementation):
    """The module of a chosen implementation."""
    return _KERNELS[name]


def _refusals(x: Array | jax.ShapeDtypeStruct, w: Array | jax.ShapeDtypeStruct) -> _dispatch.Refusals:
    return {"mosaic_gpu": mosaic_gpu.refuses(x, w), "xla": None}


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _grouped_matmul(x: Array, w: Array, group_sizes: Array, transposed: bool, name: str) -> Array:
    kernels = _KERNELS[name]
    return (kernels.forward if transposed else kernels.backward_x)(x, w, group_sizes)


def _grouped_matmul_fwd(
    x: Array, w: Array, group_sizes: Array, transposed: bool, name: str
) -> tuple[Array, tuple[Array, Array, Array]]:
    return _grouped_matmul(x, w, group_sizes, transposed, name), (x, w, group_sizes)


def _grouped_matmul_bwd(
    transposed: bool, name: str, residuals: tuple[Array, Array, Array], dy: Array
) -> tuple[Array, Array, np.ndarray]:
    x, w, group_sizes = residuals
    dx = _grouped_matmul(dy, w, group_sizes, not transposed, name)
    rows, columns = (x, dy) if transposed else (dy, x)
    dw = _KERNELS[name].backward_w(rows, columns, group_sizes, w.dtype)
    return dx, dw, np.zeros(group_sizes.shape, jax.dtypes.float0)


_grouped_matmul.defvjp(_grouped_matmul_fwd, _grouped_matmul_bwd)
