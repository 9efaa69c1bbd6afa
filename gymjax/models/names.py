"""Hugging Face weight names of a decoder, and where each weight lives in our tree."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from gymjax.models.decoder import Decoder
from gymjax.models.decoder_config import DecoderConfig, LayerKind
from gymjax.models.expert_names import expert_linears, is_router, moe_linears, moe_shapes
from gymjax.nn.linear import Linear
from gymjax.nn.moe import ExpertLinear, MoEConfig

Index = int | tuple[int, int] | None
"""Row of a variable's leading axes: a layer's, or a layer's and an expert's; None where nothing is stacked."""

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
        index: row of the variable's leading axes.
        shape: of the tensor.
        quantizable: whether a quantized base stores it packed.
    """

    name: str
    path: tuple[str | int, ...]
    index: Index
    shape: tuple[int, ...]
    quantizable: bool = False

    @property
    def at(self) -> tuple[int, ...]:
        """The index as a tuple, empty where nothing is stacked."""
        return index_tuple(self.index)


def index_tuple(index: Index) -> tuple[int, ...]:
    """An index as a tuple, empty where nothing is stacked."""
    return () if index is None else index if isinstance(index, tuple) else (index,)


def layer_places(cfg: DecoderConfig) -> list[tuple[int, int, int]]:
    """(stack, place in its group, repetition) of every layer, first to last."""
    return [
        (s, p, r) for s, stack in enumerate(cfg.stacks) for r in range(stack.repeats) for p in range(len(stack.pattern))
    ]


def block_linears(cfg: DecoderConfig, kind: LayerKind) -> dict[str, tuple[str, ...]]:
    """Hugging Face module name inside a layer -> path in our block of every linear layer but the experts'."""
    projections: dict[str, tuple[str, ...]] = {**(_FUSED_PROJECTIONS if cfg.fused else _PROJECTIONS)}
    if kind.experts is None:
        return projections
    return {name: path for name, path in projections.items() if path[0] != "mlp"} | moe_linears(kind.experts)


def _block_weights(cfg: DecoderConfig, kind: LayerKind, prefix: str, base: tuple, index: int) -> Iterator[HFWeight]:
    shapes = _block_shapes(cfg, kind)
    for name, path in block_linears(cfg, kind).items():
        packed = not is_router(f"{prefix}.{name}")
        yield HFWeight(f"{prefix}.{name}.weight", (*base, *path, "w"), index, shapes[path], quantizable=packed)
        if _has_bias(cfg, kind, path):
            yield HFWeight(f"{prefix}.{name}.bias", (*base, *path, "b"), index, shapes[path][:1])
    if kind.experts is not None:
        yield from _expert_weights(kind.experts, cfg.width, prefix, base, index)
    for name, norm in _NORMS[cfg.norms].items():
        yield HFWeight(f"{prefix}.{name}.weight", (*base, norm, "scale"), index, (cfg.width,))
    if cfg.qk_norm != "none":
        widths = {"q_norm": cfg.heads * cfg.head_dim, "k_norm": cfg.kv_heads * cfg.head_dim}
        for norm, width in widths.items():
            shape = (width if cfg.qk_norm == "projection" else cfg.head_dim,)
            yield HFWeight(f"{prefix}.self_attn.{norm}.weight", (*base, "attn", norm, "scale"), index, shape)
    if cfg.attn_sinks:
        yield HFWeight(f"{prefix}.self_attn.sinks", (*base, "attn", "sinks"), index, (cfg.heads,))


def _block_shapes(cfg: DecoderConfig, kind: LayerKind) -> dict[tuple[str, ...], tuple[int, int]]:
    """Shape of every linear layer's weight by its path."""
    width, ffn = cfg.width, cfg.ffn_width
    q, kv = cfg.heads * cfg.head_dim, cfg.kv_heads * cfg.head_dim
    attention = {"q": (q, width), "k": (kv, width), "v": (kv, width), "o": (width, q), "qkv": (q + 2 * kv, width)}
    shapes: dict[tuple[str, ...], tuple[int, int]] = {("attn", name): shape for name, shape in attention.items()}
    if kind.experts is not None:
        return shapes | moe_shapes(kind.experts, width)
    dense = {"gate": (ffn, width), "up": (ffn, width), "down": (width, ffn), "gate_up": (2 * ffn, width)}
    shapes |= {("mlp", name): shape for name, shape in dense.items()}
    return shapes


def _has_bias(cfg: DecoderConfig, kind: LayerKind, path: tuple[str, ...]) -> bool:
    if path[0] == "attn":
        return cfg.out_bias if path[1] == "o" else cfg.qkv_bias
    if kind.experts is None:
        return cfg.mlp_bias
    return kind.experts.use_bias and path[1] == "router"


def _expert_weights(moe: MoEConfig, width: int, prefix: str, base: tuple, index: int) -> Iterator[HFWeight]:
    shapes = moe_shapes(moe, width)
    for expert in range(moe.experts):
        for name, path in expert_linears(moe, expert).items():
            at, shape = (index, expert), shapes[path]
            yield HFWeight(f"{prefix}.{name}.weight", (*base, *path, "w"), at, shape, quantizable=True)
            if moe.use_bias:
                yield HFWeight(f"{prefix}.{name}.bias", (*base, *path, "b"), at, shape[:1])


def hf_weights(cfg: DecoderConfig) -> list[HFWeight]:
    """Every tensor that a folder of this model holds, in the order of the layers."""
    weights = [HFWeight("model.embed_tokens.weight", ("embed",), None, (cfg.vocab_size, cfg.width))]
    for i, (s, p, r) in enumerate(layer_places(cfg)):
        weights += _block_weights(cfg, cfg.stacks[s].pattern[p], f"model.layers.{i}", ("stacks", s, p), r)
    weights.append(HFWeight("model.norm.weight", ("norm", "scale"), None, (cfg.width,)))
    if not cfg.tie_embeddings:
        weights.append(HFWeight("lm_head.weight", ("head", "w"), None, (cfg.vocab_size, cfg.width)))
    return weights


def _expert_layers(block: Any, moe: MoEConfig, rows: dict[int, int]) -> Iterator[tuple[ExpertLinear, dict[Index, str]]]:
    names: dict[tuple[str, ...], dict[Index, str]] = {}
    for r, i in rows.items():
        for expert in range(moe.experts):
            for name, path in expert_linears(moe, expert).items():
                names.setdefault(path, {})[r, expert] = f"model.layers.{i}.{name}"
    for path, modules in names.items():
        yield node_at(block, path), modules


def node_at(model: Any, path: tuple[str | int, ...]) -> Any:
    """The module or variable at a path of the tree."""
    node: Any = model
    for part in path:
        node = node[part] if isinstance(part, int) else getattr(node, part)
    return node


def linears(model: Decoder) -> Iterator[tuple[Linear | ExpertLinear, dict[Index, str]]]:
    """Every linear layer of the model with the Hugging Face module name of each of its rows.

    Yields:
        (stacked layer, {row of its leading axis: "model.layers.3.self_attn.q_proj"}); one projection of all experts as
        (stacked layer, {(row, expert): "model.layers.3.mlp.experts.5.up_proj"}); the head, where there is one, comes
        last as (head, {None: "lm_head"}).
    """
    places = layer_places(model.cfg)
    for s, blocks in enumerate(model.stacks):
        for p, block in enumerate(blocks):
            kind = model.cfg.stacks[s].pattern[p]
            rows = {r: i for i, (s_, p_, r) in enumerate(places) if (s_, p_) == (s, p)}
            for name, path in block_linears(model.cfg, kind).items():
                yield node_at(block, path), {r: f"model.layers.{i}.{name}" for r, i in rows.items()}
            if kind.experts is not None:
                yield from _expert_layers(block, kind.experts, rows)
    if model.head is not None:
        yield model.head, {None: "lm_head"}
