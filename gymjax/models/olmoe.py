"""OLMoE (arXiv 2409.02060): experts in every layer, q and k normalised over all heads together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gymjax.models.decoder_config import DecoderConfig, LayerKind
from gymjax.models.hf_config import read_decoder, read_experts
from gymjax.nn.moe import MoEConfig

ARCHITECTURE = "OlmoeForCausalLM"
DEFAULTS: dict[str, Any] = {"rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False}


def decoder_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """DecoderConfig of a config.json whose model_type is "olmoe"."""
    hf = DEFAULTS | dict(hf)
    experts, top_k = read_experts(hf, "num_experts")
    moe = MoEConfig(experts, top_k, hf["intermediate_size"], renormalize=bool(hf["norm_topk_prob"]))
    bias = bool(hf.get("attention_bias"))
    clip = None if hf.get("clip_qkv") is None else float(hf["clip_qkv"])
    kinds = (LayerKind(experts=moe),) * hf["num_hidden_layers"]
    return read_decoder(hf, kinds=kinds, qkv_bias=bias, out_bias=bias, qk_norm="projection", qkv_clip=clip)
