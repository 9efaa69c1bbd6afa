"""Reading what the families' Hugging Face config.json files share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gymjax.models.decoder import DecoderConfig, LayerKind, stack_layers
from gymjax.nn.rope import RopeConfig


def read_rope(hf: Mapping[str, Any]) -> RopeConfig:
    """Rotary settings from either spelling: `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling` (4).

    Raises:
        ValueError: a scaling type this project does not do, or a setting that the type needs is absent.
    """
    scaling = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    theta = float(scaling.get("rope_theta") or hf.get("rope_theta") or 10000.0)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if float(hf.get("partial_rotary_factor") or scaling.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ValueError("config.json: partial_rotary_factor other than 1 is not supported")
    if kind == "default":
        return RopeConfig(theta)
    if kind not in ("linear", "llama3"):
        raise ValueError(f"config.json: rope type {kind!r} is not supported; supported: default, linear, llama3")
    needed = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}[kind]
    missing = [name for name in needed if name not in scaling]
    if missing:
        raise ValueError(f"config.json: rope type {kind!r} needs {', '.join(missing)}; found {sorted(scaling)}")
    if kind == "linear":
        return RopeConfig(theta, "linear", float(scaling["factor"]))
    original = scaling.get("original_max_position_embeddings") or hf["max_position_embeddings"]
    return RopeConfig(
        theta,
        "llama3",
        float(scaling["factor"]),
        float(scaling["low_freq_factor"]),
        float(scaling["high_freq_factor"]),
        int(original),
    )


def read_decoder(hf: Mapping[str, Any], *, windows: tuple[int | None, ...] | None = None, **features) -> DecoderConfig:
    """DecoderConfig of a Llama-like config.json; `windows` per layer (default none), `features` of the family.

    Raises:
        ValueError: a needed key is absent, or an activation this project does not do.
    """
    required = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    missing = [name for name in required if name not in hf]
    if missing:
        raise ValueError(f"config.json: missing {', '.join(missing)}")
    activation = hf.get("hidden_act") or "silu"
    if activation not in ("silu", "swish"):
        raise ValueError(f"config.json: hidden_act {activation!r} is not supported; supported: silu")
    heads, layers = hf["num_attention_heads"], hf["num_hidden_layers"]
    kv_heads = hf.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise ValueError(f"config.json: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    return DecoderConfig(
        vocab_size=hf["vocab_size"],
        width=hf["hidden_size"],
        ffn_width=hf["intermediate_size"],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hf.get("head_dim") or hf["hidden_size"] // heads,
        stacks=stack_layers(tuple(LayerKind(window) for window in windows or (None,) * layers)),
        rope=read_rope(hf),
        norm_eps=float(hf.get("rms_norm_eps") or 1e-6),
        max_positions=hf.get("max_position_embeddings") or 2048,
        tie_embeddings=bool(hf.get("tie_word_embeddings", features.pop("tie_by_default", False))),
        **features,
    )
