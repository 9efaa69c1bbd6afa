"""Qwen2 and Qwen2.5: Llama with biases on q, k and v, and a window on the upper layers when switched on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gymjax.models.decoder_config import DecoderConfig, LayerKind
from gymjax.models.hf_config import read_decoder, sliding_layers

ARCHITECTURE = "Qwen2ForCausalLM"


def layer_kinds(hf: Mapping[str, Any]) -> tuple[LayerKind, ...]:
    """Kind of each layer: `layer_types` when given, else layers from max_window_layers on, if use_sliding_window."""
    layers = hf["num_hidden_layers"]
    window = hf.get("sliding_window", 4096) if hf.get("use_sliding_window") else None
    first = hf.get("max_window_layers", 28)
    sliding = sliding_layers(hf, ["full_attention" if i < first else "sliding_attention" for i in range(layers)])
    return tuple(LayerKind(window if slides else None) for slides in sliding)


def decoder_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """DecoderConfig of a config.json whose model_type is "qwen2"."""
    return read_decoder(hf, kinds=layer_kinds(hf), qkv_bias=True)
