"""Root-mean-square normalisation with a learned scale."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from gymjax.nn.ops import layer_ops


class RMSNorm(nnx.Module):
    """`x * rsqrt(mean(x**2) + eps) * (scale + offset)` over the last axis, in f32 (arXiv 1910.07467, eq. 4).

    `offset` is 1 where a family stores scales around 0 (Gemma), else 0; the scale is stored as the family stores it.
    """

    def __init__(self, width: int, *, eps: float, offset: float = 0.0, dtype: jnp.dtype, leading: tuple[int, ...] = ()):
        self.scale = nnx.Param(jnp.full((*leading, width), 1.0 - offset, dtype))
        self.eps, self.offset = eps, offset

    def __call__(self, x: Float[Array, "*B D"], *, fused_ops: bool = True) -> Float[Array, "*B D"]:
        """Normalises in f32 and returns x.dtype; `fused_ops` as in `layer_ops`."""
        return layer_ops(fused_ops).rms_norm(x, self.scale.get_value(), eps=self.eps, offset=self.offset)

    def branch(
        self, x: Float[Array, "*B D"], room: int = 0, *, fused_ops: bool = True
    ) -> tuple[Float[Array, "*B D"], Float[Array, "*B D+room"]]:
        """x and the normalised x, for a residual stream that goes on with the former: gradients meet in the norm's.

        `room` columns are left behind the second by the kernel (`fused_ops`, see `layer_ops`), none without it.
        """
        return layer_ops(fused_ops).rms_norm_residual(
            x, self.scale.get_value(), eps=self.eps, offset=self.offset, room=room
        )
