"""gpt-oss (arXiv 2508.10925): experts with biases and a clamped SwiGLU, attention sinks, every other layer local."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gymjax.models.decoder_config import DecoderConfig, LayerKind
from gymjax.models.hf_config import read_decoder, read_experts, sliding_layers
from gymjax.nn.moe import ClampedSwiGLU, MoEConfig

ARCHITECTURE = "GptOssForCausalLM"
DEFAULTS: dict[str, Any] = {
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "sliding_window": 128,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "attention_bias": True,
}
ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def decoder_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """DecoderConfig of a config.json whose model_type is "gpt_oss"."""
    hf = DEFAULTS | dict(hf)
    if not (hf.get("rope_parameters") or hf.get("rope_scaling")):
        hf["rope_scaling"] = ROPE
    experts, top_k = read_experts(hf, "num_local_experts")
    moe = MoEConfig(
        experts,
        top_k,
        hf["intermediate_size"],
        renormalize=True,
        use_bias=True,
        activation=ClampedSwiGLU(float(hf["swiglu_alpha"]), float(hf["swiglu_limit"])),
        layout="fused",
    )
    default = ["full_attention" if i % 2 else "sliding_attention" for i in range(hf["num_hidden_layers"])]
    local, everywhere = LayerKind(hf["sliding_window"], experts=moe), LayerKind(experts=moe)
    kinds = tuple(local if slides else everywhere for slides in sliding_layers(hf, default))
    bias = bool(hf["attention_bias"])
    return read_decoder(hf, kinds=kinds, qkv_bias=bias, out_bias=bias, attn_sinks=True)
