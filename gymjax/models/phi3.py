"""Phi-3, Phi-3.5 and Phi-4 (arXiv 2404.14219): Llama with fused projections, LongRoPE and partly rotated heads.

q, k, v stay one matrix here and gate, up another, as the files hold them. PEFT sees those modules, so that an adapter
is one product of rank R over all of qkv_proj, which three adapters of rank R on its parts are not; and NF4 computes the
offset of its block scales over the whole matrix, so that only the whole matrix packs into bitsandbytes' bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gymjax.models.decoder_config import DecoderConfig, LayerKind
from gymjax.models.hf_config import read_decoder, refuse
from gymjax.models.hf_rope import read_rope, rope_parameters

ARCHITECTURE = "Phi3ForCausalLM"
DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "sliding_window": None,
}


def decoder_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """DecoderConfig of a config.json whose model_type is "phi3"."""
    refuse(hf, "attention_bias", "mlp_bias", "lm_head_bias")
    hf = {**DEFAULTS, **hf}
    if rope_parameters(hf)["rope_type"] not in ("default", "longrope"):
        kind = rope_parameters(hf)["rope_type"]
        raise ValueError(
            f"config.json: rope type {kind!r} is not supported for model_type phi3; use default or longrope"
        )
    kinds = (LayerKind(hf["sliding_window"]),) * hf["num_hidden_layers"]
    return read_decoder(hf, kinds=kinds, ropes=(read_rope(hf, partial=True),), fused=True)
