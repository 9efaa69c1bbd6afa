"""Low-rank adapters of experts: a pair of factors for each, applied as grouped products."""

from __future__ import annotations

from typing import Any

import jax
from jaxtyping import Array, Float, Int

from gymjax.quant.grouped import grouped


def grouped_lora(
    x: Float[Array, "rows I"],
    w: Any,
    a: Float[Array, "E R I"],
    b: Float[Array, "E O R"],
    factor: Float[Array, " E"],
    sizes: Int[Array, " E"],
) -> Float[Array, "rows O"]:
    """`x @ w[e].T + factor[e] * (x @ a[e].T) @ b[e].T` for the rows of expert e.

    No product b @ a is ever made: adapters cost two grouped products of rank width. Source: arXiv 2106.09685, eq. 3.

    Args:
        x: rows sorted by expert, f32, bf16 or f16.
        w: frozen base weights (E, O, I), dense or packed; no gradient.
        a: down-projections, f32, cast to x.dtype for the product.
        b: up-projections, likewise, multiplied by `factor` in f32 first.
        factor: alpha / rank, or alpha / sqrt(rank), of each expert.
        sizes: rows of each expert.

    Returns:
        The sum in x.dtype; gradients of a and b are summed in f32.
    """
    low = grouped(x, a, sizes)
    return grouped(x, jax.lax.stop_gradient(w), sizes) + grouped(low, factor[:, None, None] * b, sizes)
