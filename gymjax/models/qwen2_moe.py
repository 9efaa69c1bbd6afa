"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with experts, one of them shared by all tokens, in some or all layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from gymjax.models.decoder_config import DecoderConfig, LayerKind
from gymjax.models.hf_config import read_decoder, read_experts, sliding_layers
from gymjax.nn.moe import MoEConfig

ARCHITECTURE = "Qwen2MoeForCausalLM"
DEFAULTS: dict[str, Any] = {
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "norm_topk_prob": False,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def decoder_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """DecoderConfig of a config.json whose model_type is "qwen2_moe"."""
    hf = DEFAULTS | dict(hf)
    experts, top_k = read_experts(hf, "num_experts")
    moe = MoEConfig(
        experts,
        top_k,
        hf["moe_intermediate_size"],
        renormalize=bool(hf["norm_topk_prob"]),
        shared_ffn_width=hf["shared_expert_intermediate_size"],
    )
    slides = bool(hf.get("use_sliding_window"))
    default = [
        "sliding_attention" if slides and i % 2 == 0 and i < hf["max_window_layers"] else "full_attention"
        for i in range(hf["num_hidden_layers"])
    ]
    windows = [hf["sliding_window"] if slides and local else None for local in sliding_layers(hf, default)]
    return read_decoder(hf, kinds=sparse_kinds(hf, windows, moe), qkv_bias=bool(hf.get("qkv_bias", True)))


def sparse_kinds(hf: Mapping[str, Any], windows: list[int | None], moe: MoEConfig) -> tuple[LayerKind, ...]:
    """Kinds of layers: every decoder_sparse_step-th has experts, but for mlp_only_layers."""
    step, dense = hf.get("decoder_sparse_step") or 1, hf.get("mlp_only_layers") or ()
    kinds = (LayerKind(window) for window in windows)
    return tuple(
        dataclasses.replace(kind, experts=moe) if i not in dense and (i + 1) % step == 0 else kind
        for i, kind in enumerate(kinds)
    )
