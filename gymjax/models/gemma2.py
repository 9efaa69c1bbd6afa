"""Gemma 2 (arXiv 2408.00118): Gemma with norms around each branch, soft-caps, and a window on every other layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gymjax.models import gemma
from gymjax.models.decoder_config import DecoderConfig
from gymjax.models.hf_config import local_global_kinds, read_decoder, refuse

ARCHITECTURE = "Gemma2ForCausalLM"
DEFAULTS: dict[str, Any] = {
    **gemma.DEFAULTS,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}


def decoder_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """DecoderConfig of a config.json whose model_type is "gemma2"; the first layer slides a window."""
    refuse(hf, "use_bidirectional_attention")
    hf = {**DEFAULTS, **hf}
    bias = bool(hf.get("attention_bias"))
    return read_decoder(
        hf,
        kinds=local_global_kinds(hf, 2),
        activation_key="hidden_activation",
        qkv_bias=bias,
        out_bias=bias,
        norms="sandwich",
        norm_offset=1.0,
        embed_scale=hf["hidden_size"] ** 0.5,
        attn_scale=hf["query_pre_attn_scalar"] ** -0.5,
        attn_softcap=hf["attn_logit_softcapping"],
        logit_softcap=hf["final_logit_softcapping"],
    )
