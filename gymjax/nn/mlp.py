"""Gated feed-forward block (SwiGLU, arXiv 2002.05202, eq. 6)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

import pallas_kernels.swiglu as kernel
from gymjax.nn.linear import Linear


class GatedMLP(nnx.Module):
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(self, width: int, ffn_width: int, *, use_bias: bool, dtype: jnp.dtype, leading: tuple[int, ...] = ()):
        options = {"use_bias": use_bias, "dtype": dtype, "leading": leading}
        self.gate = Linear(width, ffn_width, **options)
        self.up = Linear(width, ffn_width, **options)
        self.down = Linear(ffn_width, width, **options)

    def __call__(self, x_BTD: Float[Array, "B T D"], key: jax.Array | None = None) -> Float[Array, "B T D"]:
        """Applies the block; `key` feeds the projections' adapters."""
        keys = [None] * 3 if key is None else jax.random.split(key, 3)
        gate_BTF = checkpoint_name(self.gate(x_BTD, keys[0]), "gate")
        up_BTF = checkpoint_name(self.up(x_BTD, keys[1]), "up")
        return self.down(kernel.swiglu(gate_BTF, up_BTF), keys[2])
