"""OLMo 3: OLMo 2 with three windowed layers to a full one; only full layers extend their RoPE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gymjax.models import olmo2
from gymjax.models.decoder_config import DecoderConfig
from gymjax.models.hf_config import local_global_kinds, read_decoder
from gymjax.models.hf_rope import read_layer_ropes

ARCHITECTURE = "Olmo3ForCausalLM"
DEFAULTS: dict[str, Any] = {**olmo2.DEFAULTS, "sliding_window": 4096}
THETA = 500000.0  # transformers gives it to sliding layers whatever rope_theta says


def decoder_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """DecoderConfig of a config.json whose model_type is "olmo3"."""
    hf = {**DEFAULTS, **hf}
    bias = bool(hf.get("attention_bias"))
    return read_decoder(
        hf,
        kinds=local_global_kinds(hf, 4, local_rope=1),
        ropes=read_layer_ropes(hf, full_theta=THETA, sliding_theta=THETA),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="projection",
        norms="post",
    )
