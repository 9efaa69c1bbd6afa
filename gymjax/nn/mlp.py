"""Gated feed-forward block (arXiv 2002.05202, eq. 6)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

import pallas_kernels.swiglu as kernel
from gymjax.nn.linear import Linear, project


class GatedMLP(nnx.Module):
    """`down(activation(gate(x)) * up(x))`; `fused` keeps gate and up in one matrix, gate's rows first."""

    def __init__(
        self,
        width: int,
        ffn_width: int,
        *,
        use_bias: bool,
        activation: kernel.Activation = "silu",
        fused: bool = False,
        dtype: jnp.dtype,
        leading: tuple[int, ...] = (),
    ):
        options = {"use_bias": use_bias, "dtype": dtype, "leading": leading}
        if fused:
            self.gate_up = Linear(width, 2 * ffn_width, **options)
        else:
            self.gate = Linear(width, ffn_width, **options)
            self.up = Linear(width, ffn_width, **options)
        self.down = Linear(ffn_width, width, **options)
        self.activation: kernel.Activation = activation
        self.fused = fused

    def __call__(self, x_BTD: Float[Array, "B T D"], key: jax.Array | None = None) -> Float[Array, "B T D"]:
        """Applies the block; `key` feeds the projections' adapters."""
        keys = [None] * 3 if key is None else list(jax.random.split(key, 3))
        if self.fused:
            gate_BTF, up_BTF = jnp.split(self.gate_up(x_BTD, keys[0]), 2, axis=-1)
        else:
            gate_BTF, up_BTF = project(x_BTD, (self.gate, self.up), keys[:2])
        gate_BTF, up_BTF = checkpoint_name(gate_BTF, "gate"), checkpoint_name(up_BTF, "up")
        return self.down(kernel.swiglu(gate_BTF, up_BTF, activation=self.activation), keys[2])
