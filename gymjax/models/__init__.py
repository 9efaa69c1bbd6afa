"""Model families: each maps its config.json to a DecoderConfig; one decoder serves them all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gymjax.models import llama, mistral, qwen2, qwen3
from gymjax.models.decoder import DecoderConfig

FAMILIES = {"llama": llama, "mistral": mistral, "qwen2": qwen2, "qwen3": qwen3}


def decoder_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """DecoderConfig of a Hugging Face config.json.

    Raises:
        ValueError: a model_type, rope type or activation that is not done here, or a missing key; the message names it.
    """
    family = hf.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"config.json: model_type {family!r} is not supported; supported: {', '.join(FAMILIES)}")
    return FAMILIES[family].decoder_config(hf)
