"""Gemma 3, text (arXiv 2503.19786): five windowed layers to a full one, each kind with its own RoPE base, QK-norm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gymjax.models import gemma
from gymjax.models.decoder_config import DecoderConfig
from gymjax.models.hf_config import local_global_kinds, read_decoder, refuse
from gymjax.models.hf_rope import read_layer_ropes

ARCHITECTURE = "Gemma3ForCausalLM"
DEFAULTS: dict[str, Any] = {
    **gemma.DEFAULTS,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "max_position_embeddings": 131072,
}


def decoder_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """DecoderConfig of a config.json whose model_type is "gemma3_text".

    An attention soft-cap is refused: transformers' Gemma 3 reads the key but does not apply it.
    """
    refuse(hf, "use_bidirectional_attention", "attn_logit_softcapping")
    hf = {**DEFAULTS, **hf}
    bias = bool(hf.get("attention_bias"))
    local = float(hf.get("rope_local_base_freq") or 10000.0)
    return read_decoder(
        hf,
        kinds=local_global_kinds(hf, hf.get("sliding_window_pattern") or 6, local_rope=1),
        ropes=read_layer_ropes(hf, full_theta=1e6, sliding_theta=local),
        activation_key="hidden_activation",
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="head",
        norms="sandwich",
        norm_offset=1.0,
        embed_scale=hf["hidden_size"] ** 0.5,
        attn_scale=hf["query_pre_attn_scalar"] ** -0.5,
        logit_softcap=hf.get("final_logit_softcapping"),
    )
