"""Root-mean-square normalisation with a learned scale."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

import pallas_kernels.rms_norm as kernel


class RMSNorm(nnx.Module):
    """`x * rsqrt(mean(x**2) + eps) * scale` over the last axis, computed in f32 (arXiv 1910.07467, eq. 4)."""

    def __init__(self, width: int, *, eps: float, dtype: jnp.dtype, leading: tuple[int, ...] = ()):
        self.scale = nnx.Param(jnp.ones((*leading, width), dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        """Normalises in f32 and returns x.dtype."""
        return kernel.rms_norm(x, self.scale.get_value(), eps=self.eps)
