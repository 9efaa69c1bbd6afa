"""Mixtral (arXiv 2401.04088): Mistral with experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gymjax.models.decoder_config import DecoderConfig, LayerKind
from gymjax.models.hf_config import read_decoder, read_experts
from gymjax.nn.moe import MoEConfig

ARCHITECTURE = "MixtralForCausalLM"
DEFAULTS: dict[str, Any] = {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_local_experts": 8, "num_experts_per_tok": 2}


def decoder_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """DecoderConfig of a config.json whose model_type is "mixtral"; router_jitter_noise acts in no frozen base."""
    hf = DEFAULTS | dict(hf)
    experts, top_k = read_experts(hf, "num_local_experts")
    moe = MoEConfig(experts, top_k, hf["intermediate_size"], renormalize=True, layout="block_sparse_moe")
    return read_decoder(hf, kinds=(LayerKind(hf.get("sliding_window"), experts=moe),) * hf["num_hidden_layers"])
