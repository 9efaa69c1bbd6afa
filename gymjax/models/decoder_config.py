"""What a decoder is: its shape, its features, and its layers grouped into stacks that are scanned."""

from __future__ import annotations

import dataclasses
from typing import Literal

from gymjax.nn.attention import QKNorm
from gymjax.nn.moe import MoEConfig
from gymjax.nn.rope import RopeConfig
from pallas_kernels.swiglu import Activation


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """What may differ between the layers of one model; static, so that kernels can specialise on it.

    Attributes:
        window: keys that a query sees at most, itself included; None: all before it.
        rope: which of DecoderConfig.ropes turns q and k; None: none does.
        experts: of the feed-forward block; None: it is dense.
    """

    window: int | None = None
    rope: int | None = 0
    experts: MoEConfig | None = None


@dataclasses.dataclass(frozen=True)
class Stack:
    """`repeats` repetitions of a group of layers; one scan runs over the repetitions."""

    pattern: tuple[LayerKind, ...]
    repeats: int


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Shape and features of a decoder; widths in elements.

    Attributes:
        vocab_size: rows of the embedding.
        width: of the residual stream.
        ffn_width: of the dense feed-forward blocks.
        heads: query heads.
        kv_heads: key heads.
        head_dim: width of a head.
        stacks: the layers.
        ropes: rotary settings, of which each layer's kind names one.
        norm_eps: of every norm.
        max_positions: longest sequence the model is made for.
        qkv_bias: whether q, k and v add a bias; likewise out_bias, mlp_bias.
        qk_norm: over what q and k are normalised.
        qkv_clip: bound on the elements of q, k and v; None: there is none.
        tie_embeddings: the head is the embedding.
        norms: each branch is normalised before ("pre"), after, just before it is added ("post"), or both ("sandwich").
        norm_offset: added to every norm's stored scale.
        activation: of the feed-forward blocks' gate.
        fused: q, k, v are one matrix and gate, up another.
        attn_scale: factor on attention scores; None: 1/sqrt(head_dim).
        attn_sinks: whether heads have sinks, see flash_attention.
        attn_softcap: bound on them, `cap * tanh(score / cap)`.
        embed_scale: factor on embeddings, rounded to the compute dtype as transformers rounds it.
        residual_scale: factor on what each branch adds.
        logit_scale: factor on logits.
        logit_softcap: bound on logits, after the factor.
    """

    vocab_size: int
    width: int
    ffn_width: int
    heads: int
    kv_heads: int
    head_dim: int
    stacks: tuple[Stack, ...]
    ropes: tuple[RopeConfig, ...]
    norm_eps: float
    max_positions: int
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: QKNorm = "none"
    qkv_clip: float | None = None
    tie_embeddings: bool = False
    norms: Literal["pre", "post", "sandwich"] = "pre"
    norm_offset: float = 0.0
    activation: Activation = "silu"
    fused: bool = False
    attn_scale: float | None = None
    attn_sinks: bool = False
    attn_softcap: float | None = None
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kind of every layer, first to last."""
        return tuple(kind for stack in self.stacks for _ in range(stack.repeats) for kind in stack.pattern)

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.kinds)

    @property
    def experts(self) -> MoEConfig | None:
        """Of the layers that have some, which are alike; None for a dense model."""
        return next((kind.experts for kind in self.kinds if kind.experts is not None), None)

    @property
    def sparse_layers(self) -> int:
        """Number of layers whose feed-forward block is a mixture of experts."""
        return sum(kind.experts is not None for kind in self.kinds)


def stack_layers(kinds: tuple[LayerKind, ...], cut: int | None = None) -> tuple[Stack, ...]:
    """Groups layers into as few scans as their kinds allow; `cut` forces a boundary before that layer.

    A kind sequence of period p <= 8 becomes one stack of groups of p and, where p does not divide it, one more for the
    rest; any other sequence becomes runs of equal layers.
    """
    if cut:
        return stack_layers(kinds[:cut]) + stack_layers(kinds[cut:])
    for period in range(1, min(8, len(kinds)) + 1):
        pattern, whole = kinds[:period], len(kinds) // period
        if all(kind == pattern[i % period] for i, kind in enumerate(kinds)) and (period == 1 or whole > 1):
            rest = kinds[whole * period :]
            return (Stack(pattern, whole), *((Stack(rest, 1),) if rest else ()))
    runs: list[Stack] = []
    for kind in kinds:
        if runs and runs[-1].pattern == (kind,):
            runs[-1] = Stack((kind,), runs[-1].repeats + 1)
        else:
            runs.append(Stack((kind,), 1))
    return tuple(runs)
