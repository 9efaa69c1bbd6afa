"""Hugging Face weight names of a decoder, and where each weight lives in our tree."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from gymjax.models.decoder import Decoder, DecoderConfig
from gymjax.nn.linear import Linear

BLOCK_LINEARS = {
    "self_attn.q_proj": ("attn", "q"),
    "self_attn.k_proj": ("attn", "k"),
    "self_attn.v_proj": ("attn", "v"),
    "self_attn.o_proj": ("attn", "o"),
    "mlp.gate_proj": ("mlp", "gate"),
    "mlp.up_proj": ("mlp", "up"),
    "mlp.down_proj": ("mlp", "down"),
}
BLOCK_NORMS = {
    "input_layernorm": ("attn_norm",),
    "self_attn.q_norm": ("attn", "q_norm"),
    "self_attn.k_norm": ("attn", "k_norm"),
    "post_attention_layernorm": ("mlp_norm",),
}
TOP_MODULES = {"model.embed_tokens": (), "model.norm": ("norm",), "lm_head": ("head",)}


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


def _block_weights(cfg: DecoderConfig, prefix: str, base: tuple, index: int) -> Iterator[HFWeight]:
    q, kv = cfg.heads * cfg.head_dim, cfg.kv_heads * cfg.head_dim
    shapes = {"q": (q, cfg.width), "k": (kv, cfg.width), "v": (kv, cfg.width), "o": (cfg.width, q)}
    shapes |= {"gate": (cfg.ffn_width, cfg.width), "up": (cfg.ffn_width, cfg.width), "down": (cfg.width, cfg.ffn_width)}
    biased = {"q": cfg.qkv_bias, "k": cfg.qkv_bias, "v": cfg.qkv_bias, "o": cfg.out_bias}
    for name, path in BLOCK_LINEARS.items():
        shape = shapes[path[-1]]
        yield HFWeight(f"{prefix}.{name}.weight", (*base, *path, "w"), index, shape, quantizable=True)
        if biased.get(path[-1], cfg.mlp_bias):
            yield HFWeight(f"{prefix}.{name}.bias", (*base, *path, "b"), index, shape[:1])
    for name, path in BLOCK_NORMS.items():
        if len(path) == 2 and not cfg.qk_norm:
            continue
        width = cfg.head_dim if len(path) == 2 else cfg.width
        yield HFWeight(f"{prefix}.{name}.weight", (*base, *path, "scale"), index, (width,))


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
            for name, (part, projection) in BLOCK_LINEARS.items():
                layer = getattr(getattr(block, part), projection)
                yield layer, {r: f"model.layers.{i}.{name}" for r, i in rows.items()}
    if model.head is not None:
        yield model.head, {None: "lm_head"}
