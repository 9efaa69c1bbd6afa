"""Self-attention with grouped queries, rotary positions, an optional window, and a static key-value cache."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

import pallas_kernels.flash_attention as flash
from gymjax.nn.linear import Linear, project, room
from gymjax.nn.norm import RMSNorm
from gymjax.nn.ops import layer_ops
from pallas_kernels import Implementation

RopeTables = tuple[Float[Array, "B T R2"], Float[Array, "B T R2"]]
QKNorm = Literal["none", "head", "projection"]


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
    q_B1NH: Float[Array, "B 1 N H"],
    cache: LayerCache,
    *,
    window: int | None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
) -> Float[Array, "B 1 N H"]:
    """One query a row against the row's cached keys [0, length]; scale, softcap and sinks as in flash_attention.

    The row's own token must already be stored at slot `length`. Scores and softmax are in f32.
    """
    k_BSKH, v_BSKH = cache.k[cache.layer], cache.v[cache.layer]
    B, _, N, H = q_B1NH.shape
    q_BKGH = q_B1NH.reshape(B, k_BSKH.shape[2], N // k_BSKH.shape[2], H)
    score_BKGS = jnp.einsum("BKGH,BSKH->BKGS", q_BKGH, k_BSKH, preferred_element_type=jnp.float32)
    score_BKGS *= H**-0.5 if scale is None else scale
    if softcap is not None:
        score_BKGS = softcap * jnp.tanh(score_BKGS / softcap)
    slot_S, last_B1 = jnp.arange(k_BSKH.shape[1]), cache.length[:, None]
    seen_BS = slot_S <= last_B1
    if window is not None:
        seen_BS &= slot_S > last_B1 - window
    score_BKGS = jnp.where(seen_BS[:, None, None], score_BKGS, -jnp.inf)
    if sinks is not None:
        sinks_BKG1 = jnp.broadcast_to(sinks.astype(jnp.float32).reshape(q_BKGH.shape[1:3]), q_BKGH.shape[:3])[..., None]
        score_BKGS = jnp.concatenate([score_BKGS, sinks_BKG1], axis=-1)
    weight_BKGS = jax.nn.softmax(score_BKGS, axis=-1)[..., : k_BSKH.shape[1]].astype(v_BSKH.dtype)
    return jnp.einsum("BKGS,BSKH->BKGH", weight_BKGS, v_BSKH).reshape(B, 1, N, H)


class Attention(nnx.Module):
    """`o(attend(rope(q(x)), rope(k(x)), v(x)))`, causal; q and k may be normalised first.

    Args:
        width: of the input and the output.
        heads: query heads.
        kv_heads: key heads.
        head_dim: width of a head.
        qkv_bias: whether q, k and v add a bias.
        out_bias: whether o does.
        qk_norm: "head" normalises q and k over each head, "projection" over all heads together.
        norm_eps: of these norms.
        norm_offset: of these norms, see RMSNorm.
        window: keys that a query sees at most; None: all before it.
        rope: which of the model's rotary tables turns q and k; None: none does (NoPE, arXiv 2305.19466).
        scale: factor on the scores; None: 1/sqrt(head_dim).
        softcap: bound on the scores, see flash_attention.
        sinks: whether each head has a learned sink, see flash_attention.
        fused: q, k and v are one matrix, in this order.
        clip: bound on the elements of q, k and v, before q and k are rotated; None: there is none.
        dtype: of the weights.
        leading: axes of stacked layers.
    """

    def __init__(
        self,
        *,
        width: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        qkv_bias: bool,
        out_bias: bool,
        qk_norm: QKNorm,
        norm_eps: float,
        norm_offset: float,
        window: int | None,
        rope: int | None,
        scale: float | None,
        softcap: float | None,
        sinks: bool,
        fused: bool,
        clip: float | None,
        dtype: jnp.dtype,
        leading: tuple[int, ...] = (),
    ):
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.window, self.rope, self.scale, self.softcap, self.fused = window, rope, scale, softcap, fused
        self.clip = clip
        shared = {"dtype": dtype, "leading": leading}
        q_width, kv_width = heads * head_dim, kv_heads * head_dim
        if fused:
            self.qkv = Linear(width, q_width + 2 * kv_width, use_bias=qkv_bias, **shared)
        else:
            self.q = Linear(width, q_width, use_bias=qkv_bias, **shared)
            self.k = Linear(width, kv_width, use_bias=qkv_bias, **shared)
            self.v = Linear(width, kv_width, use_bias=qkv_bias, **shared)
        self.o = Linear(q_width, width, use_bias=out_bias, **shared)
        self.sinks = nnx.Param(jnp.zeros((*leading, heads), dtype)) if sinks else None
        self.qk_norm: QKNorm = qk_norm
        if qk_norm != "none":
            whole = qk_norm == "projection"
            norm = functools.partial(RMSNorm, eps=norm_eps, offset=norm_offset, **shared)
            self.q_norm = norm(q_width if whole else head_dim)
            self.k_norm = norm(kv_width if whole else head_dim)

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        tables: tuple[RopeTables, ...],
        segment_ids_BT: Int[Array, "B T"] | None,
        *,
        key: jax.Array | None = None,
        implementation: Implementation | None = None,
        cache: LayerCache | None = None,
        fused_ops: bool = True,
    ) -> tuple[Float[Array, "B T D"], LayerCache | None]:
        """Attends within segments; with a cache, T > 1 fills it from slot 0 and T = 1 continues from it.

        `fused_ops` as in `layer_ops`.
        """
        B, T, _ = x_BTD.shape
        keys = [None] * 4 if key is None else list(jax.random.split(key, 4))
        q_BTNH, k_BTKH, v_BTKH = self._project(x_BTD, keys, fused_ops)
        if self.rope is not None:
            q_BTNH, k_BTKH = layer_ops(fused_ops).rope(q_BTNH, k_BTKH, *tables[self.rope])
        q_BTNH, k_BTKH = checkpoint_name(q_BTNH, "q"), checkpoint_name(k_BTKH, "k")
        options: dict[str, Any] = {"window": self.window, "scale": self.scale, "softcap": self.softcap}
        options["sinks"] = None if self.sinks is None else self.sinks.get_value()
        if cache is not None and T == 1:
            cache = cache.append(k_BTKH, v_BTKH)
            out_BTNH = decode_attention(q_BTNH, cache, **options)
        else:
            cache = None if cache is None else cache.prefill(k_BTKH, v_BTKH)
            out_BTNH: Any = flash.flash_attention(
                q_BTNH,
                k_BTKH,
                v_BTKH,
                causal=True,
                segment_ids=segment_ids_BT,
                implementation=implementation,
                **options,
            )
        return self.o(out_BTNH.reshape(B, T, -1), keys[3]), cache

    def room(self, x_BTD: Float[Array, "B T D"]) -> int:
        """Columns behind the input that the block has a use for, see `linear.room`."""
        return room(x_BTD, (self.qkv,) if self.fused else (self.q, self.k, self.v))

    def _project(self, x_BTD: Float[Array, "B T D"], keys, fused_ops: bool) -> tuple[Array, Array, Array]:
        """q, k and v by heads, normalised and clipped but not rotated."""
        B, T, _ = x_BTD.shape
        if self.fused:
            ends = (self.heads * self.head_dim, (self.heads + self.kv_heads) * self.head_dim)
            q, k, v = jnp.split(self.qkv(x_BTD, keys[0]), ends, axis=-1)
        else:
            q, k, v = project(x_BTD, (self.q, self.k, self.v), keys[:3])
            if self.qk_norm != "none":  # their norms' backward passes want what is normalised
                q, k = checkpoint_name(q, "q_product"), checkpoint_name(k, "k_product")
        if self.qk_norm == "projection":
            q, k = self.q_norm(q, fused_ops=fused_ops), self.k_norm(k, fused_ops=fused_ops)
        q_BTNH, k_BTKH, v_BTKH = (part.reshape(B, T, -1, self.head_dim) for part in (q, k, v))
        if self.qk_norm == "head":
            q_BTNH, k_BTKH = self.q_norm(q_BTNH, fused_ops=fused_ops), self.k_norm(k_BTKH, fused_ops=fused_ops)
        if self.clip is not None:
            q_BTNH, k_BTKH, v_BTKH = (jnp.clip(part, -self.clip, self.clip) for part in (q_BTNH, k_BTKH, v_BTKH))
        return q_BTNH, k_BTKH, checkpoint_name(v_BTKH, "v")
