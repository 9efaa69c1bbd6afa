"""Granite 3: Llama with factors on embeddings, attention scores, branches and logits (muP, arXiv 2203.03466)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gymjax.models.decoder_config import DecoderConfig
from gymjax.models.hf_config import read_decoder

ARCHITECTURE = "GraniteForCausalLM"


def decoder_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """DecoderConfig of a config.json whose model_type is "granite"; logits are divided by logits_scaling."""
    bias = bool(hf.get("attention_bias"))
    return read_decoder(
        hf,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bool(hf.get("mlp_bias")),
        embed_scale=float(hf.get("embedding_multiplier", 1.0)),
        attn_scale=float(hf.get("attention_multiplier", 1.0)),
        residual_scale=float(hf.get("residual_multiplier", 1.0)),
        logit_scale=1.0 / float(hf.get("logits_scaling", 1.0)),
    )
