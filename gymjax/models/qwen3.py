"""Qwen3: no biases by default, q and k normalised over the head width (QK-norm)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gymjax.models.decoder_config import DecoderConfig
from gymjax.models.hf_config import read_decoder
from gymjax.models.qwen2 import layer_kinds

ARCHITECTURE = "Qwen3ForCausalLM"


def decoder_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """DecoderConfig of a config.json whose model_type is "qwen3"."""
    bias = bool(hf.get("attention_bias"))
    hf = {**hf, "head_dim": hf.get("head_dim") or 128}
    return read_decoder(hf, kinds=layer_kinds(hf), qkv_bias=bias, out_bias=bias, qk_norm="head")
