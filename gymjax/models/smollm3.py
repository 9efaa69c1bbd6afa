"""SmolLM3: Llama whose every fourth layer turns no q and k (NoPE, arXiv 2501.18795)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gymjax.models.decoder_config import DecoderConfig, LayerKind
from gymjax.models.hf_config import read_decoder, sliding_layers

ARCHITECTURE = "SmolLM3ForCausalLM"
DEFAULTS: dict[str, Any] = {"rope_theta": 2000000.0, "num_key_value_heads": 4, "tie_word_embeddings": True}


def decoder_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """DecoderConfig of a config.json whose model_type is "smollm3".

    Layer i rotates where no_rope_layers[i] is 1; absent, every no_rope_layer_interval-th layer does not.

    Raises:
        ValueError: no_rope_layers is shorter than the model.
    """
    hf = {**DEFAULTS, **hf}
    layers, interval = hf["num_hidden_layers"], hf.get("no_rope_layer_interval") or 4
    rotates = hf.get("no_rope_layers") or [int((i + 1) % interval != 0) for i in range(layers)]
    if len(rotates) < layers:
        raise ValueError(f"config.json: no_rope_layers must have {layers} numbers, one a layer, has {len(rotates)}")
    rotates = rotates[:layers]
    window = hf.get("sliding_window") if hf.get("use_sliding_window") else None
    sliding = sliding_layers(
        hf, ["full_attention" if turn or window is None else "sliding_attention" for turn in rotates]
    )
    bias = bool(hf.get("attention_bias"))
    return read_decoder(
        hf,
        kinds=[LayerKind(window if s else None, 0 if turn else None) for s, turn in zip(sliding, rotates)],
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bool(hf.get("mlp_bias")),
    )
