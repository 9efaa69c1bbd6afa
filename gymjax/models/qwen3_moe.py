"""Qwen3-MoE (arXiv 2505.09388): Qwen3 with experts in some or all layers, none of them shared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gymjax.models.decoder_config import DecoderConfig
from gymjax.models.hf_config import read_decoder, read_experts
from gymjax.models.qwen2_moe import sparse_kinds
from gymjax.nn.moe import MoEConfig

ARCHITECTURE = "Qwen3MoeForCausalLM"
DEFAULTS: dict[str, Any] = {
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
    "moe_intermediate_size": 768,
    "sliding_window": 4096,
}


def decoder_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """DecoderConfig of a config.json whose model_type is "qwen3_moe"; a window is every layer's."""
    hf = DEFAULTS | {"num_experts": hf.get("num_local_experts", 128)} | dict(hf)
    experts, top_k = read_experts(hf, "num_experts")
    moe = MoEConfig(experts, top_k, hf["moe_intermediate_size"], renormalize=bool(hf["norm_topk_prob"]))
    window = hf["sliding_window"] if hf.get("use_sliding_window") else None
    kinds = sparse_kinds(hf, [window] * hf["num_hidden_layers"], moe)
    bias = bool(hf.get("attention_bias"))
    return read_decoder(hf, kinds=kinds, qkv_bias=bias, out_bias=bias, qk_norm="head")
