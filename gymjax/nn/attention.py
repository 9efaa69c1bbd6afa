"""Self-attention with grouped queries, rotary positions, an optional window, and a static key-value cache."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

import pallas_kernels.flash_attention as flash
import pallas_kernels.rope as rope_kernel
from gymjax.nn.linear import Linear
from gymjax.nn.norm import RMSNorm
from pallas_kernels import Implementation

RopeTables = tuple[Float[Array, "B T H2"], Float[Array, "B T H2"]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """Keys and values of stacked layers, and which of them this layer is.

    Attributes:
        k: (L, B, S, K, H), rotated keys; slots at and beyond `length` hold leftovers that no query attends to.
        v: (L, B, S, K, H).
        length: (B,) int32, tokens already stored in each row.
        layer: () int32, row of the leading axis that belongs to the layer at hand.
    """

    k: Float[Array, "L B S K H"]
    v: Float[Array, "L B S K H"]
    length: Int[Array, " B"]
    layer: Int[Array, ""]

    def prefill(self, k_BTKH: Array, v_BTKH: Array) -> LayerCache:
        """Stores a whole prompt at slots [0, T)."""
        at = (self.layer, 0, 0, 0, 0)
        k = jax.lax.dynamic_update_slice(self.k, k_BTKH[None].astype(self.k.dtype), at)
        v = jax.lax.dynamic_update_slice(self.v, v_BTKH[None].astype(self.v.dtype), at)
        return dataclasses.replace(self, k=k, v=v)

    def append(self, k_B1KH: Array, v_B1KH: Array) -> LayerCache:
        """Stores one token a row, each at its own row's length."""
        rows = jnp.arange(self.length.shape[0])
        k = self.k.at[self.layer, rows, self.length].set(k_B1KH[:, 0].astype(self.k.dtype))
        v = self.v.at[self.layer, rows, self.length].set(v_B1KH[:, 0].astype(self.v.dtype))
        return dataclasses.replace(self, k=k, v=v)


def decode_attention(
    q_B1NH: Float[Array, "B 1 N H"], cache: LayerCache, *, window: int | None
) -> Float[Array, "B 1 N H"]:
    """One query a row against the row's cached keys [0, length]; softmax in f32.

    The row's own token must already be stored at slot `length`.
    """
    k_BSKH, v_BSKH = cache.k[cache.layer], cache.v[cache.layer]
    B, _, N, H = q_B1NH.shape
    q_BKGH = q_B1NH.reshape(B, k_BSKH.shape[2], N // k_BSKH.shape[2], H)
    score_BKGS = jnp.einsum("BKGH,BSKH->BKGS", q_BKGH, k_BSKH, preferred_element_type=jnp.float32) * H**-0.5
    slot_S, last_B1 = jnp.arange(k_BSKH.shape[1]), cache.length[:, None]
    seen_BS = slot_S <= last_B1
    if window is not None:
        seen_BS &= slot_S > last_B1 - window
    score_BKGS = jnp.where(seen_BS[:, None, None], score_BKGS, -jnp.inf)
    weight_BKGS = jax.nn.softmax(score_BKGS, axis=-1).astype(v_BSKH.dtype)
    return jnp.einsum("BKGS,BSKH->BKGH", weight_BKGS, v_BSKH).reshape(B, 1, N, H)


class Attention(nnx.Module):
    """`o(attend(rope(q(x)), rope(k(x)), v(x)))`, causal; q and k may be normalised over the head width first."""

    def __init__(
        self,
        *,
        width: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        qkv_bias: bool,
        out_bias: bool,
        qk_norm_eps: float | None,
        window: int | None,
        dtype: jnp.dtype,
        leading: tuple[int, ...] = (),
    ):
        self.heads, self.kv_heads, self.head_dim, self.window = heads, kv_heads, head_dim, window
        self.q = Linear(width, heads * head_dim, use_bias=qkv_bias, dtype=dtype, leading=leading)
        self.k = Linear(width, kv_heads * head_dim, use_bias=qkv_bias, dtype=dtype, leading=leading)
        self.v = Linear(width, kv_heads * head_dim, use_bias=qkv_bias, dtype=dtype, leading=leading)
        self.o = Linear(heads * head_dim, width, use_bias=out_bias, dtype=dtype, leading=leading)
        eps = qk_norm_eps
        self.q_norm = None if eps is None else RMSNorm(head_dim, eps=eps, dtype=dtype, leading=leading)
        self.k_norm = None if eps is None else RMSNorm(head_dim, eps=eps, dtype=dtype, leading=leading)

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        tables: RopeTables,
        segment_ids_BT: Int[Array, "B T"] | None,
        *,
        key: jax.Array | None = None,
        implementation: Implementation | None = None,
        cache: LayerCache | None = None,
    ) -> tuple[Float[Array, "B T D"], LayerCache | None]:
        """Attends within segments; with a cache, T > 1 fills it from slot 0 and T = 1 continues from it."""
        B, T, _ = x_BTD.shape
        keys = [None] * 4 if key is None else jax.random.split(key, 4)
        q_BTNH = self.q(x_BTD, keys[0]).reshape(B, T, self.heads, self.head_dim)
        k_BTKH = self.k(x_BTD, keys[1]).reshape(B, T, self.kv_heads, self.head_dim)
        v_BTKH = checkpoint_name(self.v(x_BTD, keys[2]).reshape(B, T, self.kv_heads, self.head_dim), "v")
        if self.q_norm is not None and self.k_norm is not None:
            q_BTNH, k_BTKH = self.q_norm(q_BTNH), self.k_norm(k_BTKH)
        q_BTNH, k_BTKH = rope_kernel.rope(q_BTNH, k_BTKH, *tables)
        q_BTNH, k_BTKH = checkpoint_name(q_BTNH, "q"), checkpoint_name(k_BTKH, "k")
        if cache is not None and T == 1:
            cache = cache.append(k_BTKH, v_BTKH)
            out_BTNH = decode_attention(q_BTNH, cache, window=self.window)
        else:
            cache = None if cache is None else cache.prefill(k_BTKH, v_BTKH)
            out_BTNH = flash.flash_attention(
                q_BTNH,
                k_BTKH,
                v_BTKH,
                causal=True,
                window=self.window,
                segment_ids=segment_ids_BT,
                implementation=implementation,
            )
        out_BTNH = checkpoint_name(out_BTNH, "attention")
        return self.o(out_BTNH.reshape(B, T, -1), keys[3]), cache
