"""Llama 2, 3, 3.1, 3.2 and models that share their architecture (SmolLM2, ...)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gymjax.models.decoder_config import DecoderConfig
from gymjax.models.hf_config import read_decoder

ARCHITECTURE = "LlamaForCausalLM"


def decoder_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """DecoderConfig of a config.json whose model_type is "llama"."""
    bias = bool(hf.get("attention_bias"))
    return read_decoder(hf, qkv_bias=bias, out_bias=bias, mlp_bias=bool(hf.get("mlp_bias")))
