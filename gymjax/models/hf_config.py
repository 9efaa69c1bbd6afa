"""Reading what the families' Hugging Face config.json files share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gymjax.models.decoder_config import DecoderConfig, LayerKind, stack_layers
from gymjax.models.hf_rope import head_dim, read_rope
from gymjax.nn.rope import Dynamic, RopeConfig
from pallas_kernels.swiglu import Activation

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}
"""transformers' names of activations, several for one function."""


def read_decoder(
    hf: Mapping[str, Any],
    *,
    kinds: Sequence[LayerKind] | None = None,
    ropes: Sequence[RopeConfig] | None = None,
    activation_key: str = "hidden_act",
    **features: Any,
) -> DecoderConfig:
    """DecoderConfig of a Llama-like config.json. Dropout of the base (attention_dropout) is left out.

    Args:
        hf: config.json over the family's own defaults, with all of REQUIRED.
        kinds: of every layer; default: full attention with the first of `ropes`.
        ropes: rotary settings that layers choose from; default: those of the file.
        activation_key: which key names the activation.
        features: fields of DecoderConfig.

    Raises:
        ValueError: a value that is not done here.
    """
    activation = hf.get(activation_key) or "silu"
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"config.json: {activation_key} {activation!r} is not supported; supported: {', '.join(ACTIVATIONS)}"
        )
    heads, layers = hf["num_attention_heads"], hf["num_hidden_layers"]
    kv_heads = hf.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise ValueError(f"config.json: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    ropes = tuple(ropes or (read_rope(hf),))
    return DecoderConfig(
        vocab_size=hf["vocab_size"],
        width=hf["hidden_size"],
        ffn_width=hf["intermediate_size"],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim(hf),
        stacks=stack_layers(tuple(kinds or (LayerKind(),) * layers)),
        ropes=ropes,
        norm_eps=float(hf.get("rms_norm_eps") or 1e-6),
        max_positions=_max_positions(hf, ropes[0]),
        activation=ACTIVATIONS[activation],
        tie_embeddings=bool(hf.get("tie_word_embeddings", False)),
        **features,
    )


def _max_positions(hf: Mapping[str, Any], rope: RopeConfig) -> int:
    """Longest sequence; a dynamic base goes on past max_position_embeddings."""
    longest = hf.get("max_position_embeddings") or 2048
    return int(longest * rope.scaling.factor) if isinstance(rope.scaling, Dynamic) else longest


def sliding_layers(hf: Mapping[str, Any], default: Sequence[str]) -> tuple[bool, ...]:
    """Whether each layer slides a window, from `layer_types` or, where that is absent, from `default`.

    Raises:
        ValueError: not one known type for each layer.
    """
    types = hf.get("layer_types") or list(default)
    if set(types) - {"full_attention", "sliding_attention"} or len(types) != hf["num_hidden_layers"]:
        raise ValueError(
            f"config.json: layer_types must be {hf['num_hidden_layers']} of full_attention or sliding_attention, "
            f"not {types}"
        )
    return tuple(kind == "sliding_attention" for kind in types)


def local_global_kinds(hf: Mapping[str, Any], period: int, *, local_rope: int = 0) -> tuple[LayerKind, ...]:
    """Kinds of layers: all but every `period`-th slide a window of sliding_window, unless `layer_types` says else.

    Args:
        hf: config.json over the family's defaults.
        period: distance of full layers.
        local_rope: rotary settings of sliding layers; full layers have the first.
    """
    default = ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(hf["num_hidden_layers"])]
    local = LayerKind(hf["sliding_window"], local_rope)
    return tuple(local if slides else LayerKind() for slides in sliding_layers(hf, default))


def refuse(hf: Mapping[str, Any], *keys: str) -> None:
    """Refuses features that a family's files may ask for and that are not done here.

    Raises:
        ValueError: one of the keys is set to something else than null, false or 0.
    """
    for key in keys:
        if hf.get(key):
            raise ValueError(f"config.json: {key}: {hf[key]} is not supported for model_type {hf.get('model_type')}")


def read_experts(hf: Mapping[str, Any], count_key: str) -> tuple[int, int]:
    """Number of experts, under the key that a family gives it, and how many each token goes to.

    Raises:
        ValueError: more than there are, or none; or another activation than SiLU.
    """
    experts, top_k = hf[count_key], hf["num_experts_per_tok"]
    if not 0 < top_k <= experts:
        raise ValueError(f"config.json: num_experts_per_tok {top_k} must be in 1..{count_key}, {experts}")
    if hf.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ValueError(f"config.json: hidden_act {hf['hidden_act']!r} is not supported for experts; supported: silu")
    return experts, top_k
