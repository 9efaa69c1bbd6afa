"""Qwen2 and Qwen2.5: Llama with biases on q, k and v, and a window on the upper layers when switched on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gymjax.models.decoder import DecoderConfig
from gymjax.models.hf_config import read_decoder


def layer_windows(hf: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Window of each layer: `layer_types` when given, else layers from max_window_layers on, if use_sliding_window."""
    layers = hf["num_hidden_layers"]
    window = hf.get("sliding_window", 4096) if hf.get("use_sliding_window") else None
    types = hf.get("layer_types")
    if types is None:
        first = hf.get("max_window_layers", 28)
        types = ["full_attention" if i < first else "sliding_attention" for i in range(layers)]
    unknown = set(types) - {"full_attention", "sliding_attention"}
    if unknown or len(types) != layers:
        raise ValueError(
            f"config.json: layer_types must be {layers} of full_attention or sliding_attention, not {types}"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def decoder_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """DecoderConfig of a config.json whose model_type is "qwen2"."""
    return read_decoder(hf, windows=layer_windows(hf), qkv_bias=True)
