"""A linear layer whose weight may be stored in any format and whose adapter slot may be filled."""

from __future__ import annotations

from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from gymjax.quant.matmul import matmul


class Adapter(Protocol):
    """What may fill a linear layer's slot."""

    def __call__(self, x: Array, w: Any, key: jax.Array | None) -> Array:
        """The whole product of the layer, base included."""
        ...

    def effective(self, w: Any) -> Array:
        """The dense weight that the product amounts to, without dropout."""
        ...


class Linear(nnx.Module):
    """`y = x @ w.T + b`; when the adapter slot is filled, `y = adapter(x, w, key) + b`.

    `w` is (out, in), as Hugging Face stores it, as a dense array or a quantized pytree; `leading` axes (stacked layers)
    come before it and are gone inside the scan over layers.
    """

    def __init__(
        self, in_width: int, out_width: int, *, use_bias: bool, dtype: jnp.dtype, leading: tuple[int, ...] = ()
    ):
        self.w = nnx.Param(jnp.zeros((*leading, out_width, in_width), dtype))
        self.b = nnx.Param(jnp.zeros((*leading, out_width), dtype)) if use_bias else None
        self.adapter: Adapter | None = nnx.data(None)

    def effective_weight(self):
        """The weight that the layer multiplies with, its adapter's low-rank product added; for heads inside a loss."""
        w = self.w.get_value()
        return w if self.adapter is None else self.adapter.effective(w)

    def __call__(self, x: Float[Array, "*B I"], key: jax.Array | None = None) -> Float[Array, "*B O"]:
        """Applies the layer in x.dtype; `key` is the adapter's randomness (None: no dropout)."""
        w = self.w.get_value()
        y = matmul(x, w) if self.adapter is None else self.adapter(x, w, key)
        return y if self.b is None else y + self.b.get_value().astype(y.dtype)
