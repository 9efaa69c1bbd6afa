"""What the keys of a config.json may hold, so that a wrong value is named before a family's file computes with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any


def is_number(value: Any) -> bool:
    """Whether a value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_numbers(value: Any) -> bool:
    """Whether a value is a list of finite numbers."""
    return isinstance(value, list) and all(map(is_number, value))


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
"""Keys that every family's file must have."""
_GIVEN = (
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "query_pre_attn_scalar",
    "attention_multiplier",
    "embedding_multiplier",
    "residual_multiplier",
    "logits_scaling",
)
"""Keys that may be left out, but not be null."""
_KINDS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "a whole number of at least 1",
        is_whole,
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
        "max_position_embeddings original_max_position_embeddings num_experts num_local_experts "
        "num_experts_per_tok moe_intermediate_size decoder_sparse_step sliding_window_pattern no_rope_layer_interval",
    ),
    (
        "a number above 0",
        lambda value: is_number(value) and value > 0,
        "rms_norm_eps rope_theta rope_local_base_freq partial_rotary_factor query_pre_attn_scalar attention_multiplier "
        "embedding_multiplier residual_multiplier logits_scaling swiglu_limit swiglu_alpha",
    ),
    (
        "a number of at least 0",
        lambda value: is_number(value) and value >= 0,
        "attn_logit_softcapping final_logit_softcapping clip_qkv",
    ),
    (
        "a whole number of at least 0",  # 0 stands for none: transformers' window, Qwen3-Coder's shared expert
        lambda value: value == 0 or is_whole(value),
        "sliding_window max_window_layers shared_expert_intermediate_size",
    ),
    (
        "true or false",
        lambda value: value in (True, False),
        "tie_word_embeddings attention_bias mlp_bias qkv_bias use_sliding_window norm_topk_prob",
    ),
    ("a text", lambda value: isinstance(value, str), "hidden_act hidden_activation"),
    ("a list", lambda value: isinstance(value, list), "layer_types no_rope_layers mlp_only_layers"),
    ("an object", lambda value: isinstance(value, Mapping), "rope_scaling rope_parameters"),
)


def check_values(hf: Mapping[str, Any]) -> None:
    """Checks the values of the keys that families read.

    Raises:
        ValueError: one message with every value that its key cannot have.
    """
    wrong = [
        f"{key} must be {wanted}, is {hf[key]!r:.60}"
        for wanted, holds, keys in _KINDS
        for key in keys.split()
        if key in hf and not holds(hf[key]) and (hf[key] is not None or key in (*REQUIRED, *_GIVEN))
    ]
    if wrong:
        raise ValueError(f"config.json: {'; '.join(wrong)}")
