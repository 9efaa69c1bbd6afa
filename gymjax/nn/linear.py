"""A linear layer whose weight may be stored in any format and whose adapter slot may be filled."""

from __future__ import annotations

from collections.abc import Sequence
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


class JointAdapter(Adapter, Protocol):
    """An adapter that can do several layers of one input at once."""

    @staticmethod
    def together(
        x: Array, ws: Sequence[Any], adapters: Sequence[Any], keys: Sequence[jax.Array | None]
    ) -> tuple[Array, ...]:
        """What each layer's own call would return; a layer's adapter may be None, not all of them."""
        ...

    @staticmethod
    def room(x: Array, ws: Sequence[Any], adapters: Sequence[Any]) -> int:
        """How many columns, of any content, `together` would like behind x."""
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
        return self.with_bias(matmul(x, w) if self.adapter is None else self.adapter(x, w, key))

    def with_bias(self, y: Float[Array, "*B O"]) -> Float[Array, "*B O"]:
        """Adds the bias to the layer's product, where it has one."""
        return y if self.b is None else y + self.b.get_value().astype(y.dtype)


def project(
    x: Float[Array, "*B I"] | Float[Array, "*B I+"], layers: Sequence[Linear], keys: Sequence[jax.Array | None]
) -> tuple[Float[Array, "*B O"], ...]:
    """Applies several layers to one input: in one call where their adapters are of one kind that can do so.

    x may have `room(x, layers)` columns behind it.
    """
    joint = _joint(layers)
    if joint is None:
        return tuple(layer(x, key) for layer, key in zip(layers, keys, strict=True))
    ys = joint.together(x, *_weights_and_adapters(layers), keys)
    return tuple(layer.with_bias(y) for layer, y in zip(layers, ys, strict=True))


def room(x: Float[Array, "*B I"], layers: Sequence[Linear]) -> int:
    """How many columns behind x `project` has a use for; whoever makes x may leave them there, whatever they hold."""
    joint = _joint(layers)
    return 0 if joint is None else joint.room(x, *_weights_and_adapters(layers))


def _joint(layers: Sequence[Linear]) -> type[JointAdapter] | None:
    """The kind of the layers' adapters, where they have one and it is joint."""
    kinds = {type(layer.adapter) for layer in layers if layer.adapter is not None}
    kind: Any = kinds.pop() if len(kinds) == 1 else None
    return kind if hasattr(kind, "together") else None


def _weights_and_adapters(layers: Sequence[Linear]) -> tuple[list[Any], list[Adapter | None]]:
    return [layer.w.get_value() for layer in layers], [layer.adapter for layer in layers]
