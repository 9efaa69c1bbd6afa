"""Hugging Face weight names of a decoder, and where each weight lives in our tree."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from gymjax.models.decoder import Decoder
from gymjax.models.decoder_config import DecoderConfig
from gymjax.nn.linear import Linear

_PROJECTIONS = {
    "self_attn.q_proj": ("attn", "q"),
    "self_attn.k_proj": ("attn", "k"),
    "self_attn.v_proj": ("attn", "v"),
    "self_attn.o_proj": ("attn", "o"),
    "mlp.gate_proj": ("mlp", "gate"),
    "mlp.up_proj": ("mlp", "up"),
    "mlp.down_proj": ("mlp", "down"),
}
_FUSED_PROJECTIONS = {
    "self_attn.qkv_proj": ("attn", "qkv"),
    "self_attn.o_proj": ("attn", "o"),
    "mlp.gate_up_proj": ("mlp", "gate_up"),
    "mlp.down_proj": ("mlp", "down"),
}
# Names tell where a norm stands only in part: "post_attention" is what stands before the feed-forward block in "pre".
_NORMS = {
    "pre": {"input_layernorm": "attn_norm", "post_attention_layernorm": "mlp_norm"},
    "post": {"post_attention_layernorm": "attn_out_norm", "post_feedforward_layernorm": "mlp_out_norm"},
    "sandwich": {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "attn_out_norm",
        "pre_feedforward_layernorm": "mlp_norm",
        "post_feedforward_layernorm": "mlp_out_norm",
    },
}


@dataclasses.dataclass(frozen=True)
class HFWeight:
    """One tensor of a Hugging Face folder.

    Attributes:
        name: as in safetensors, "model.layers.3.self_attn.q_proj.weight".
        path: of the variable in our tree, ("stacks", 0, 0, "attn", "q", "w").
        index: row of the variable's leading axis, None for a variable that is not stacked.
        shape: of the tensor.
        quantizable: whether a quantized base stores it packed.
    """

    name: str
    path: tuple[str | int, ...]
    index: int | None
    shape: tuple[int, ...]
    quantizable: bool = False


def layer_places(cfg: DecoderConfig) -> list[tuple[int, int, int]]:
    """(stack, place in its group, repetition) of every layer, first to last."""
    return [
        (s, p, r) for s, stack in enumerate(cfg.stacks) for r in range(stack.repeats) for p in range(len(stack.pattern))
    ]


def block_linears(cfg: DecoderConfig) -> dict[str, tuple[str, str]]:
    """Hugging Face module name inside a layer -> (part of our block, projection) of every linear layer."""
    return _FUSED_PROJECTIONS if cfg.fused else _PROJECTIONS


def _block_weights(cfg: DecoderConfig, prefix: str, base: tuple, index: int) -> Iterator[HFWeight]:
    q, kv = cfg.heads * cfg.head_dim, cfg.kv_heads * cfg.head_dim
    shapes = {"q": (q, cfg.width), "k": (kv, cfg.width), "v": (kv, cfg.width), "o": (cfg.width, q)}
    shapes |= {"gate": (cfg.ffn_width, cfg.width), "up": (cfg.ffn_width, cfg.width), "down": (cfg.width, cfg.ffn_width)}
    shapes |= {"qkv": (q + 2 * kv, cfg.width), "gate_up": (2 * cfg.ffn_width, cfg.width)}
    biased = dict.fromkeys(("q", "k", "v", "qkv"), cfg.qkv_bias) | {"o": cfg.out_bias}
    for name, path in block_linears(cfg).items():
        shape = shapes[path[-1]]
        yield HFWeight(f"{prefix}.{name}.weight", (*base, *path, "w"), index, shape, quantizable=True)
        if biased.get(path[-1], cfg.mlp_bias):
            yield HFWeight(f"{prefix}.{name}.bias", (*base, *path, "b"), index, shape[:1])
    for name, norm in _NORMS[cfg.norms].items():
        yield HFWeight(f"{prefix}.{name}.weight", (*base, norm, "scale"), index, (cfg.width,))
    if cfg.qk_norm != "none":
        widths = {"q_norm": q, "k_norm": kv} if cfg.qk_norm == "projection" else {}
        for norm in ("q_norm", "k_norm"):
            shape = (widths.get(norm, cfg.head_dim),)
            yield HFWeight(f"{prefix}.self_attn.{norm}.weight", (*base, "attn", norm, "scale"), index, shape)


def hf_weights(cfg: DecoderConfig) -> list[HFWeight]:
    """Every tensor that a folder of this model holds, in the order of the layers."""
    weights = [HFWeight("model.embed_tokens.weight", ("embed",), None, (cfg.vocab_size, cfg.width))]
    for i, (s, p, r) in enumerate(layer_places(cfg)):
        weights += _block_weights(cfg, f"model.layers.{i}", ("stacks", s, p), r)
    weights.append(HFWeight("model.norm.weight", ("norm", "scale"), None, (cfg.width,)))
    if not cfg.tie_embeddings:
        weights.append(HFWeight("lm_head.weight", ("head", "w"), None, (cfg.vocab_size, cfg.width)))
    return weights


def node_at(model: Decoder, path: tuple[str | int, ...]) -> Any:
    """The module or variable at a path of the tree."""
    node: Any = model
    for part in path:
        node = node[part] if isinstance(part, int) else getattr(node, part)
    return node


def linears(model: Decoder) -> Iterator[tuple[Linear, dict[int | None, str]]]:
    """Every linear layer of the model with the Hugging Face module name of each of its rows.

    Yields:
        (stacked layer, {row of its leading axis: "model.layers.3.self_attn.q_proj"}); the head, where there is one,
        comes last as (head, {None: "lm_head"}).
    """
    places = layer_places(model.cfg)
    for s, blocks in enumerate(model.stacks):
        for p, block in enumerate(blocks):
            rows = {r: i for i, (s_, p_, r) in enumerate(places) if (s_, p_) == (s, p)}
            for name, (part, projection) in block_linears(model.cfg).items():
                layer = getattr(getattr(block, part), projection)
                yield layer, {r: f"model.layers.{i}.{name}" for r, i in rows.items()}
    if model.head is not None:
        yield model.head, {None: "lm_head"}
