"""Rotary settings of a config.json, in the spellings of transformers 4 and 5."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from gymjax.models.hf_values import is_number, is_numbers
from gymjax.nn.rope import Dynamic, Linear, Llama3, LongRope, RopeConfig, Scaling, Yarn

# Settings of each type: those it needs, and those it may have.
_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": ((), ("factor", "alpha")),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ()),
    "yarn": ((), ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")),
    "longrope": (("short_factor", "long_factor"), ("factor", "attention_factor")),
}
_LISTS = ("short_factor", "long_factor")
_COMMON = {"type", "rope_type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}
_RENAMED = {"su": "longrope"}  # Phi-3's first name for it


def rope_parameters(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The settings from either spelling: `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4)."""
    found = dict(hf.get("rope_scaling") or hf.get("rope_parameters") or {})  # transformers' order where both are given
    theta = found.get("rope_theta") or hf.get("rope_theta") or 10000.0
    found["rope_theta"] = float(theta) if is_number(theta) else theta
    kind = found.get("rope_type") or found.pop("type", None) or "default"
    return found | {"rope_type": _RENAMED.get(kind, kind)}


def read_rope(hf: Mapping[str, Any], *, partial: bool = False) -> RopeConfig:
    """Rotary settings of a model whose layers share them.

    Args:
        hf: config.json.
        partial: whether the family may rotate a part of each head only (partial_rotary_factor).

    Raises:
        ValueError: an unknown type, a setting that the type needs is absent, or one that it does not have.
    """
    return rope_config(hf, rope_parameters(hf), partial=partial)


def read_layer_ropes(
    hf: Mapping[str, Any], *, full_theta: float, sliding_theta: float
) -> tuple[RopeConfig, RopeConfig]:
    """Settings of full and of sliding layers, where a family gives each its own.

    transformers 5 writes them under `rope_parameters` by type of layer; 4 wrote rope_theta and rope_scaling, which are
    the full layers'.

    Args:
        hf: config.json.
        full_theta: base of full layers where none is given.
        sliding_theta: likewise of sliding layers.

    Raises:
        ValueError: as `read_rope`; or one set of settings for all layers in the new spelling, which transformers does
            not read.
    """
    given = dict(hf.get("rope_parameters") or {})
    if given and not given.keys() <= {"full_attention", "sliding_attention"}:
        raise ValueError(
            f"config.json: rope_parameters of {hf.get('model_type')} must hold full_attention and sliding_attention, "
            f"not {', '.join(given)}"
        )
    full = {"rope_theta": hf.get("rope_theta") or full_theta} | (given.get("full_attention") or {})
    full |= hf.get("rope_scaling") or {}
    sliding = {"rope_theta": sliding_theta} | (given.get("sliding_attention") or {})
    plain = {key: value for key, value in hf.items() if key not in ("rope_parameters", "rope_scaling", "rope_theta")}
    configs = [rope_config(plain, rope_parameters(plain | {"rope_parameters": each})) for each in (full, sliding)]
    return configs[0], configs[1]


def rope_config(hf: Mapping[str, Any], rope: Mapping[str, Any], *, partial: bool = False) -> RopeConfig:
    """RopeConfig of settings in transformers 5's spelling; `hf` has the model's lengths.

    Raises:
        ValueError: see `read_rope`.
    """
    kind = rope["rope_type"]
    if kind not in _KEYS:
        raise ValueError(f"config.json: rope type {kind!r} is not supported; supported: {', '.join(_KEYS)}")
    needed, optional = _KEYS[kind]
    missing = [name for name in needed if rope.get(name) is None]
    if missing:
        raise ValueError(f"config.json: rope type {kind!r} needs {', '.join(missing)}; found {sorted(rope)}")
    unknown = [name for name in rope if name not in {*needed, *optional, *_COMMON} and rope[name] is not None]
    if unknown:
        shown = ", ".join(f"{name}: {rope[name]}" for name in unknown)
        raise ValueError(f"config.json: rope type {kind!r} has no setting {shown}; remove it if the model needs none")
    for name in {*needed, *optional, "rope_theta", "original_max_position_embeddings"} - {"truncate"}:
        holds, wanted = (is_numbers, "a list of numbers") if name in _LISTS else (is_number, "a number")
        if rope.get(name) is not None and not holds(rope[name]):
            raise ValueError(f"config.json: {name} of rope type {kind!r} must be {wanted}, is {rope[name]!r:.60}")
    fraction = float(rope.get("partial_rotary_factor") or hf.get("partial_rotary_factor") or 1.0)
    if fraction != 1.0 and not partial:
        raise ValueError(f"config.json: partial_rotary_factor {fraction:g} is not supported for this model_type")
    config = RopeConfig(rope["rope_theta"], fraction=fraction)
    width = config.rotated(head_dim(hf))
    if kind == "dynamic" and rope.get("alpha"):  # HunYuan's spelling of an NTK-aware base that is fixed
        return dataclasses.replace(config, theta=config.theta * float(rope["alpha"]) ** (width / (width - 2)))
    return dataclasses.replace(config, scaling=_scaling(hf, rope, width // 2))


def head_dim(hf: Mapping[str, Any]) -> int:
    """Width of a head, given or derived."""
    return hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]


def _scaling(hf: Mapping[str, Any], rope: Mapping[str, Any], pairs: int) -> Scaling | None:
    kind, longest = rope["rope_type"], hf.get("max_position_embeddings") or 2048
    # A length beside the rope settings wins, as in transformers: Phi-3 writes it there.
    original = int(
        hf.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings") or longest
    )
    factor = float(rope.get("factor") or longest / original)
    match kind:
        case "linear":
            return Linear(factor)
        case "dynamic":
            if rope.get("factor") is None:
                raise ValueError("config.json: rope type 'dynamic' needs factor or alpha")
            return Dynamic(factor, longest)
        case "llama3":
            return Llama3(factor, float(rope["low_freq_factor"]), float(rope["high_freq_factor"]), original)
        case "yarn":
            return Yarn(
                factor,
                original,
                _yarn_attention(rope, factor),
                float(rope.get("beta_fast") or 32),
                float(rope.get("beta_slow") or 1),
                bool(rope.get("truncate", True)),
            )
        case "longrope":
            return _longrope(rope, factor, original, pairs)
    return None


def _yarn_attention(rope: Mapping[str, Any], factor: float) -> float:
    """Given, or `0.1 * ln(factor) + 1`, or DeepSeek's ratio of two such terms."""

    def term(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return term(float(rope["mscale"])) / term(float(rope["mscale_all_dim"]))
    return term(1.0)


def _longrope(rope: Mapping[str, Any], factor: float, original: int, pairs: int) -> LongRope:
    for name in ("short_factor", "long_factor"):
        if len(rope[name]) != pairs:
            raise ValueError(
                f"config.json: {name} must have {pairs} numbers, one a rotated pair, has {len(rope[name])}"
            )
    attention = rope.get("attention_factor")
    if attention is None:
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    short, long = (tuple(map(float, rope[name])) for name in ("short_factor", "long_factor"))
    return LongRope(short, long, original, float(attention))


def extend_context(hf: Mapping[str, Any], kind: str, length: int) -> dict[str, Any]:
    """A config.json whose context is `factor` times as long, factor = ceil(length / max_position_embeddings).

    The settings are written in the file's own spelling, so that transformers reads the extended model back; where
    layers differ, they are the full layers'. max_position_embeddings grows with them, except for "dynamic":
    transformers begins to change the base at that length. The factor is LLaMA-Factory's.

    Args:
        hf: config.json of a model whose context is not extended yet.
        kind: "linear", "dynamic", "yarn" or "llama3" (with Llama 3.1's frequency factors 1 and 4).
        length: tokens that must fit.

    Raises:
        ValueError: they fit already, the model's context is extended already, or its family cannot be extended.
    """
    family, longest = hf.get("model_type"), hf.get("max_position_embeddings")
    if family == "phi3" or longest is None:
        reason = "transformers reads only its own LongRoPE" if longest else "it names no max_position_embeddings"
        raise ValueError(f"rope_scaling: {kind} does not fit model_type {family}: {reason}; remove it")
    if length <= longest:
        raise ValueError(
            f"rope_scaling: {kind} would do nothing: cutoff_len {length} fits into the model's {longest} positions; "
            "remove it, or set a longer cutoff_len"
        )
    factor = float(math.ceil(length / longest))
    settings: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind in ("yarn", "llama3"):
        settings["original_max_position_embeddings"] = longest
    if kind == "llama3":
        settings |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    spelling = "rope_parameters" if hf.get("rope_parameters") and not hf.get("rope_scaling") else "rope_scaling"
    whole = dict(hf.get(spelling) or {})
    old = dict(whole.get("full_attention") or {}) if "full_attention" in whole else whole
    present = old.get("rope_type") or old.get("type") or "default"
    if present != "default":
        raise ValueError(
            f"rope_scaling: {kind} cannot extend a model that has rope type {present!r} already; remove it"
        )
    new = {key: value for key, value in old.items() if key != "type"} | settings
    return {
        **hf,
        spelling: whole | {"full_attention": new} if "full_attention" in whole else new,
        "max_position_embeddings": longest if kind == "dynamic" else int(longest * factor),
    }
