"""OLMo 2 (arXiv 2501.00656): norms after each branch, q and k normalised over all heads together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gymjax.models.decoder_config import DecoderConfig
from gymjax.models.hf_config import read_decoder

ARCHITECTURE = "Olmo2ForCausalLM"
DEFAULTS: dict[str, Any] = {"rms_norm_eps": 1e-5}


def decoder_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """DecoderConfig of a config.json whose model_type is "olmo2"."""
    bias = bool(hf.get("attention_bias"))
    return read_decoder({**DEFAULTS, **hf}, qkv_bias=bias, out_bias=bias, qk_norm="projection", norms="post")
