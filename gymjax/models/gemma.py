"""Gemma (arXiv 2403.08295): norm scales stored around 0, scaled embeddings, GELU gates, a tied head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gymjax.models.decoder_config import DecoderConfig
from gymjax.models.hf_config import read_decoder, refuse

ARCHITECTURE = "GemmaForCausalLM"
DEFAULTS: dict[str, Any] = {"head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True}


def decoder_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """DecoderConfig of a config.json whose model_type is "gemma".

    Its first files say "gelu" and mean the tanh form, as transformers reads them.
    """
    refuse(hf, "use_bidirectional_attention")
    hf = {**DEFAULTS, **hf}
    if hf["hidden_act"] == "gelu":
        hf["hidden_act"] = "gelu_pytorch_tanh"
    bias = bool(hf.get("attention_bias"))
    return read_decoder(hf, qkv_bias=bias, out_bias=bias, norm_offset=1.0, embed_scale=hf["hidden_size"] ** 0.5)
