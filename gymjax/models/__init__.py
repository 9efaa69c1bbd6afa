"""Model families: each maps its config.json to a DecoderConfig, and names its class in transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gymjax.models import (
    gemma,
    gemma2,
    gemma3,
    gpt_oss,
    granite,
    llama,
    mistral,
    mixtral,
    olmo2,
    olmo3,
    olmoe,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    smollm3,
)
from gymjax.models.decoder_config import DecoderConfig
from gymjax.models.hf_values import REQUIRED, check_values

FAMILIES = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "gemma": gemma,
    "gemma2": gemma2,
    "gemma3_text": gemma3,
    "phi3": phi3,
    "olmo2": olmo2,
    "olmo3": olmo3,
    "smollm3": smollm3,
    "granite": granite,
    "mixtral": mixtral,
    "olmoe": olmoe,
    "qwen2_moe": qwen2_moe,
    "qwen3_moe": qwen3_moe,
    "gpt_oss": gpt_oss,
}
INSTEAD = {
    "olmo": "its LayerNorm has no weights, and only RMSNorm is done; OLMo 2 and 3 are supported",
    "gemma3": "it reads images too; give its text part alone, a Gemma3ForCausalLM around its language_model",
}
"""Relatives of supported families -> why they are not done, and what is."""


def decoder_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """DecoderConfig of a Hugging Face config.json.

    Raises:
        ValueError: a model_type, rope type or activation that is not done here, a missing key, or a value that a key
            cannot have; the message names it.
    """
    family = str(hf.get("model_type"))
    if family in INSTEAD:
        raise ValueError(f"config.json: model_type {family!r} is not supported: {INSTEAD[family]}")
    if family not in FAMILIES:
        raise ValueError(f"config.json: model_type {family!r} is not supported; supported: {', '.join(FAMILIES)}")
    missing = [name for name in REQUIRED if name not in hf]
    if missing:
        raise ValueError(f"config.json: missing {', '.join(missing)}")
    check_values(hf)
    return FAMILIES[family].decoder_config(hf)
