"""Mistral: Llama with a sliding window over all layers (arXiv 2310.06825)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gymjax.models.decoder_config import DecoderConfig, LayerKind
from gymjax.models.hf_config import read_decoder

ARCHITECTURE = "MistralForCausalLM"


def decoder_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """DecoderConfig of a config.json whose model_type is "mistral"; sliding_window null means full attention."""
    window = hf.get("sliding_window", 4096)
    return read_decoder(hf, kinds=(LayerKind(window),) * hf["num_hidden_layers"])
