"""One transformer layer: attention and a feed-forward block on the residual stream."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from gymjax.models.decoder_config import DecoderConfig, LayerKind
from gymjax.nn.attention import Attention, LayerCache, RopeTables
from gymjax.nn.mlp import GatedMLP
from gymjax.nn.moe import MoE
from gymjax.nn.norm import RMSNorm
from gymjax.nn.routing import RouterStats
from pallas_kernels import Implementation


class Block(nnx.Module):
    """Transformer layer: `x + attn(x)`, then `x + mlp(x)`, with norms before or after each branch, or both."""

    def __init__(self, cfg: DecoderConfig, kind: LayerKind, *, dtype: jnp.dtype, leading: tuple[int, ...]):
        shared = {"dtype": dtype, "leading": leading}
        norm = functools.partial(RMSNorm, cfg.width, eps=cfg.norm_eps, offset=cfg.norm_offset, **shared)
        before, after = cfg.norms != "post", cfg.norms != "pre"
        self.attn_norm = norm() if before else None
        self.attn = Attention(
            width=cfg.width,
            heads=cfg.heads,
            kv_heads=cfg.kv_heads,
            head_dim=cfg.head_dim,
            qkv_bias=cfg.qkv_bias,
            out_bias=cfg.out_bias,
            qk_norm=cfg.qk_norm,
            norm_eps=cfg.norm_eps,
            norm_offset=cfg.norm_offset,
            window=kind.window,
            rope=kind.rope,
            scale=cfg.attn_scale,
            softcap=cfg.attn_softcap,
            sinks=cfg.attn_sinks,
            fused=cfg.fused,
            clip=cfg.qkv_clip,
            **shared,
        )
        self.attn_out_norm = norm() if after else None
        self.mlp_norm = norm() if before else None
        self.mlp = _mlp(cfg, kind, **shared)
        self.mlp_out_norm = norm() if after else None
        self.residual_scale = cfg.residual_scale

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        tables: tuple[RopeTables, ...],
        segment_ids_BT: Int[Array, "B T"] | None,
        *,
        key: jax.Array | None,
        attention: Implementation | None,
        cache: LayerCache | None,
        counted_BT: Bool[Array, "B T"] | None,
        fused_ops: bool = True,
    ) -> tuple[Float[Array, "B T D"], LayerCache | None, RouterStats | None]:
        """One layer; see Attention for the cache, MoE for the tokens that are counted, `layer_ops` for `fused_ops`."""
        attn_key, mlp_key = (None, None) if key is None else jax.random.split(key)
        x_BTD, h_BTD = _branch(x_BTD, self.attn_norm, self.attn, fused_ops)
        options = {"implementation": attention, "cache": cache, "fused_ops": fused_ops}
        h_BTD, cache = self.attn(h_BTD, tables, segment_ids_BT, key=attn_key, **options)
        x_BTD = checkpoint_name(self._add(x_BTD, h_BTD, self.attn_out_norm, fused_ops), "middle")
        x_BTD, h_BTD = _branch(x_BTD, self.mlp_norm, self.mlp, fused_ops)
        stats = None
        if isinstance(self.mlp, MoE):
            h_BTD, stats = self.mlp(h_BTD, mlp_key, counted_BT=counted_BT, fused_ops=fused_ops)
        else:
            h_BTD = self.mlp(h_BTD, mlp_key, fused_ops=fused_ops)
        return self._add(x_BTD, h_BTD, self.mlp_out_norm, fused_ops), cache, stats

    def _add(self, x_BTD: Array, h_BTD: Array, norm: RMSNorm | None, fused_ops: bool) -> Array:
        """The residual stream with a branch's output added."""
        h_BTD = h_BTD if norm is None else norm(h_BTD, fused_ops=fused_ops)
        return x_BTD + (h_BTD if self.residual_scale == 1 else _times(h_BTD, self.residual_scale))


def _branch(
    x_BTD: Array, norm: RMSNorm | None, block: Attention | GatedMLP | MoE, fused_ops: bool
) -> tuple[Array, Array]:
    """The residual stream, and the block's input that leaves it here."""
    if norm is None:
        return x_BTD, x_BTD
    return norm.branch(x_BTD, 0 if isinstance(block, MoE) else block.room(x_BTD), fused_ops=fused_ops)


def _mlp(cfg: DecoderConfig, kind: LayerKind, *, dtype: jnp.dtype, leading: tuple[int, ...]) -> GatedMLP | MoE:
    """The feed-forward block of a layer."""
    if kind.experts is not None:
        return MoE(cfg.width, kind.experts, dtype=dtype, leading=leading)
    return GatedMLP(
        cfg.width,
        cfg.ffn_width,
        use_bias=cfg.mlp_bias,
        activation=cfg.activation,
        fused=cfg.fused,
        dtype=dtype,
        leading=leading,
    )


def _times(x: Array, factor: float) -> Array:
    """A product with a factor that is not rounded to x's dtype."""
    return (x.astype(jnp.float32) * factor).astype(x.dtype)
