"""Gated feed-forward block (arXiv 2002.05202, eq. 6)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from gymjax.nn.linear import Linear, project, room
from gymjax.nn.ops import layer_ops
from pallas_kernels.swiglu import Activation

CHUNK = 16384
"""Tokens of a row that go through a block at a time, at most.

The block's widest arrays belong to one chunk. Weights that are packed are unpacked for each, which costs a 50th of the
chunk's products in an 8B model.
"""


class GatedMLP(nnx.Module):
    """`down(activation(gate(x)) * up(x))`; `fused` keeps gate and up in one matrix, gate's rows first.

    Rows of more than CHUNK tokens go through chunk by chunk, and each chunk's activations are computed again in the
    backward pass (arXiv 2305.19370, section 3).
    """

    def __init__(
        self,
        width: int,
        ffn_width: int,
        *,
        use_bias: bool,
        activation: Activation = "silu",
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
        self.activation: Activation = activation
        self.fused = fused

    def __call__(
        self, x_BTD: Float[Array, "B T D"], key: jax.Array | None = None, *, fused_ops: bool = True
    ) -> Float[Array, "B T D"]:
        """Applies the block; `key` feeds the projections' adapters, `fused_ops` as in `layer_ops`."""
        B, T, D = x_BTD.shape
        chunks = -(-T // CHUNK)
        if chunks <= 1:
            return self._apply(x_BTD, key, fused_ops)
        padded_BTD = jnp.pad(x_BTD, ((0, 0), (0, -T % chunks), (0, 0)))
        chunks_NBCD = jnp.moveaxis(padded_BTD.reshape(B, chunks, -1, D), 1, 0)
        keys = None if key is None else jax.random.split(key, chunks)
        apply = jax.checkpoint(lambda chunk: self._apply(chunk[0], chunk[1], fused_ops), prevent_cse=False)
        return jnp.moveaxis(jax.lax.map(apply, (chunks_NBCD, keys)), 0, 1).reshape(B, -1, D)[:, :T]

    def room(self, x_BTD: Float[Array, "B T D"]) -> int:
        """Columns behind the input that the block has a use for, see `linear.room`; none where it goes in chunks."""
        layers = (self.gate_up,) if self.fused else (self.gate, self.up)
        return 0 if x_BTD.shape[1] > CHUNK else room(x_BTD, layers)

    def _apply(self, x_BTD: Float[Array, "B T D"], key: jax.Array | None, fused_ops: bool) -> Float[Array, "B T D"]:
        keys = [None] * 3 if key is None else list(jax.random.split(key, 3))
        if self.fused:
            gate_BTF, up_BTF = jnp.split(self.gate_up(x_BTD, keys[0]), 2, axis=-1)
        else:
            gate_BTF, up_BTF = project(x_BTD, (self.gate, self.up), keys[:2])
        gate_BTF, up_BTF = checkpoint_name(gate_BTF, "gate"), checkpoint_name(up_BTF, "up")
        return self.down(layer_ops(fused_ops).swiglu(gate_BTF, up_BTF, activation=self.activation), keys[2])
