"""Weight-decomposed low-rank adaptation (DoRA, arXiv 2402.09353): a trained magnitude for every output row."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from gymjax.adapters.tensors import MAGNITUDE
from gymjax.optim.labels import Trained
from gymjax.quant.matmul import matmul
from pallas_kernels.lora_linear import lora_linear
from pallas_kernels.lora_linear.reference import drop
from pallas_kernels.nf4_linear import dense

if TYPE_CHECKING:
    from gymjax.adapters.lora import Lora

_TINY = 1e-30  # keeps a row that is zero throughout from dividing by zero


class Magnitude(Trained):
    """Length of every row of the adapted weight, (L, O)."""

    label = "lora_magnitude"


class BaseNorm(nnx.Variable):
    """Squared length of every row of the frozen base, (L, O), f32; constant."""


class Dora(nnx.Module):
    """Fills a linear layer's adapter slot with a low-rank adapter whose rows have trained lengths.

    `y = g * (w + s b a) x` with `g = m / |w + s b a|` for each row (eq. 5); the norm is a constant of the gradient
    (section 4.3). Rows of stacked layers without an adapter keep g = 1.
    """

    def __init__(self, lora: Lora, w: Any, *, stacked: bool):
        """Starts with the lengths that the rows have.

        Args:
            lora: adapter, its factors already as training starts.
            w: the layer's base as it is stored, (L, O, I) or (O, I).
            stacked: whether a leading axis counts layers.
        """
        self.lora = lora
        self.rows = lora.rows
        self.base_norm = BaseNorm(_squared_rows(w, stacked=stacked))
        factors = (lora.a.get_value(), lora.b.get_value(), lora.factor.get_value())
        norm = _stacked_norm if stacked else row_norm
        self.magnitude = Magnitude(norm(w, self.base_norm.get_value(), *factors))

    def parts(self):
        """The adapter's factors and the magnitudes; see `tensors.Slot`."""
        return {**self.lora.parts(), MAGNITUDE: (self.magnitude, lambda magnitude, rank: magnitude)}

    def __call__(self, x: Float[Array, "*B I"], w: Any, key: jax.Array | None) -> Float[Array, "*B O"]:
        """`w x + (g - 1) w d + g s b a d`, where d is dropout(x); without a key `g (w + s b a) x`.

        That the base meets x undropped once is PEFT's form.
        """
        lora = self.lora
        factors = (lora.a.get_value(), lora.b.get_value(), lora.factor.get_value())
        norm_O = row_norm(w, self.base_norm.get_value(), *map(jax.lax.stop_gradient, factors), dtype=x.dtype)
        gain_O = self._gain(norm_O)
        drops = key is not None and lora.dropout > 0
        dropped = drop(x, lora.dropout, key) if drops else x
        y = (gain_O * lora_linear(dropped, w, *factors).astype(jnp.float32)).astype(x.dtype)
        return y + matmul(x - dropped, w) if drops else y

    def effective(self, w: Float[Array, "*L O I"]) -> Float[Array, "*L O I"]:
        """`g (w + s b a)` in f32; g's norm is a constant of the gradient."""
        whole = self.lora.effective(w)
        norm = jax.lax.stop_gradient(jnp.linalg.norm(whole, axis=-1))
        return self._gain(norm)[..., None] * whole

    def _gain(self, norm: Float[Array, "*L O"]) -> Float[Array, "*L O"]:
        adapted = self.lora.factor.get_value()[..., None] != 0
        return jnp.where(adapted, self.magnitude.get_value() / jnp.maximum(norm, _TINY), 1.0)


def row_norm(
    w: Any,
    base_norm: Float[Array, " O"],
    a: Float[Array, "R I"],
    b: Float[Array, "O R"],
    factor: Float[Array, ""],
    *,
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> Float[Array, " O"]:
    """Length of every row of `w + s b a` in f32, without forming that matrix.

    `|w + s b a|^2 = |w|^2 + 2 s (w a') . b + s^2 |b a|^2`, the last from the R x R matrix a a'. In a dtype of 16 bits
    a meets w in two parts, whose sum is exact to 2^-16: w is never widened.

    Args:
        w: one layer's base as it is stored.
        base_norm: squared lengths of its rows.
        a: down-projection.
        b: up-projection.
        factor: s.
        dtype: in which w is multiplied elsewhere, so that it is unpacked once for both.
    """
    parts = [a.astype(dtype)]
    if jnp.dtype(dtype).itemsize < a.dtype.itemsize:
        parts.append((a - parts[0].astype(a.dtype)).astype(dtype))
    with jax.default_matmul_precision("highest"):
        product_PO = jnp.einsum(
            "pi,oi->po", jnp.concatenate(parts), dense(w, dtype), preferred_element_type=jnp.float32
        )
        cross_O = jnp.sum(product_PO.reshape(len(parts), *b.T.shape).sum(0).T * b, axis=-1)
        low_O = jnp.sum((b @ (a @ a.T)) * b, axis=-1)
    return jnp.sqrt(jnp.maximum(base_norm + 2 * factor * cross_O + factor**2 * low_O, 0.0))


@jax.jit
def _stacked_norm(w: Any, base_norm: Array, a: Array, b: Array, factor: Array) -> Float[Array, "L O"]:
    """`row_norm` layer by layer, so that one layer is unpacked at a time."""
    return jax.lax.map(lambda layer: row_norm(*layer), (w, base_norm, a, b, factor))


@partial(jax.jit, static_argnames="stacked")
def _squared_rows(w: Any, *, stacked: bool) -> Float[Array, "*L O"]:
    def one(w: Any) -> Float[Array, " O"]:
        return jnp.sum(jnp.square(dense(w, jnp.float32)), axis=-1)

    return jax.lax.map(one, w) if stacked else one(w)
