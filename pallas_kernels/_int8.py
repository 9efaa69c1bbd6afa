"""Weights in 8 bits with one scale a row (arXiv 2208.07339, section 2.1, its absmax of vectors)."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int8


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Int8Weight:
    """A weight (O, I) whose element is `codes[o, i] * scale[o]`.

    Attributes:
        codes: int8 (O, I), from -127 to 127.
        scale: f32 (O,), the row's largest magnitude over 127.
    """

    codes: Int8[Array, "O I"]
    scale: Float[Array, " O"]

    @property
    def shape(self) -> tuple[int, ...]:
        """(O, I)."""
        return self.codes.shape


def pack_int8(w: Float[Array, "O I"]) -> Int8Weight:
    """Round each row to 255 levels between plus and minus its largest magnitude; a row of zeros stays one.

    Raises:
        ValueError: w is no matrix of floating-point numbers.
    """
    if w.ndim != 2 or not jnp.issubdtype(w.dtype, jnp.floating):
        raise ValueError(f"pack_int8: w must be a floating-point matrix (O, I); got {w.dtype}{w.shape}")
    wide = w.astype(jnp.float32)
    scale = jnp.max(jnp.abs(wide), axis=1) / 127
    codes = jnp.round(wide / jnp.where(scale > 0, scale, 1)[:, None])
    return Int8Weight(codes.astype(jnp.int8), scale)


def unpack_int8(w: Int8Weight, dtype: jax.typing.DTypeLike) -> Float[Array, "O I"]:
    """The array that w stands for, multiplied in f32 and rounded once."""
    return (w.codes.astype(jnp.float32) * w.scale[:, None]).astype(dtype)
