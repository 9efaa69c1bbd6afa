"""Adapters of experts as PEFT stores them over transformers 5, which holds a layer's experts in one tensor.

Of Mixtral, OLMoE and Qwen3, PEFT reads an adapter of each expert's gate, up and down, one by one, and fuses them
itself; on that way it takes the same names in dense layers for experts', so that these are named as parameters. Of
gpt-oss and of Qwen2, with its shared expert, it reads fused adapters only: one pair of factors for gate and up
together, of twice the rank, whose up-projection holds zeros where gate meets up.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gymjax.adapters.lora import LoraSpec
from gymjax.models.decoder import Decoder
from gymjax.models.expert_names import expert_linears, experts_name, router_name
from gymjax.models.names import linears
from gymjax.nn.moe import MoEConfig

_FUSED_BY_PEFT = ("gate_proj", "up_proj", "down_proj")  # names that PEFT takes for experts', wherever they stand
_GATE_UP, _DOWN = "gate_up_proj", "down_proj"
_PAIR_PATTERN = rf".*\.{_GATE_UP}"

Tensors = dict[str, np.ndarray]
_Factors = tuple[np.ndarray, np.ndarray]


def to_peft(model: Decoder, spec: LoraSpec, config: dict[str, Any], tensors: Tensors) -> tuple[dict[str, Any], Tensors]:
    """adapter_config.json and tensors in PEFT's form, from those with every expert as a module; dense models' pass.

    Args:
        model: with adapters attached.
        spec: what they were attached with.
        config: whose target_modules are full paths.
        tensors: "model.layers.3.mlp.experts.5.up_proj.lora_A.weight" and so on.
    """
    moe = model.cfg.experts
    if moe is None:
        return config, tensors
    names: list[str] = config["target_modules"]
    experts = {name for name in names if _is_expert(model, name)}
    parameters = [name for name in names if name not in experts and _as_parameter(moe, name)]
    config = _with_patterns(config, spec, names, parameters, plain=bool(experts))
    config["target_modules"] = [name for name in names if name not in parameters]
    config["target_parameters"] = [f"{name}.weight" for name in parameters]
    if _is_fused(moe):
        config["target_modules"] = [name for name in config["target_modules"] if name not in experts]
        tensors, fused = _fuse(model, moe, tensors)
        config["target_parameters"] += [f"{experts_name(moe)}.{name}" for name in fused]
        if _GATE_UP in fused:  # of two adapters' ranks
            for key, value in (("rank_pattern", config["r"]), ("alpha_pattern", config["lora_alpha"])):
                config[key] = config[key] | {_PAIR_PATTERN: 2 * value}
    return config, tensors


def _is_expert(model: Decoder, name: str) -> bool:
    moe = model.cfg.experts
    return moe is not None and f".{experts_name(moe)}." in name


def _is_fused(moe: MoEConfig) -> bool:
    """Whether PEFT reads fused adapters only."""
    return moe.layout == "fused" or moe.shared_ffn_width is not None


def _as_parameter(moe: MoEConfig, name: str) -> bool:
    """Whether PEFT finds a module, not an expert's, only as a parameter."""
    if _is_fused(moe):  # transformers' routers are no linear modules; of the other families PEFT finds them by name
        return name.endswith("." + router_name(moe))
    return moe.layout == "experts" and name.rsplit(".", 1)[-1] in _FUSED_BY_PEFT


def _with_patterns(
    config: dict[str, Any], spec: LoraSpec, names: list[str], parameters: list[str], *, plain: bool
) -> dict[str, Any]:
    """Ranks and alphas of modules that PEFT knows by their parameter, whose name ends differently.

    With `plain`, rsLoRA's factors, alpha / sqrt(rank), are written as alpha / rank: PEFT doubles rank and alpha of gate
    and up to join them, which only then leaves the factor as it is.
    """
    if plain and spec.use_rslora:
        alphas = {name: spec.factor_of(name) * spec.rank_of(name) for name in names}
        config = config | {"use_rslora": False, "lora_alpha": spec.alpha * math.sqrt(spec.rank), "alpha_pattern": {}}
        named = names
    else:
        alphas = {name: spec.alpha_of(name) for name in parameters}
        named = parameters
    own = {name: re.escape(f"{name}.weight" if name in parameters else name) for name in named}
    odd = {own[name]: alphas[name] for name in named if not math.isclose(alphas[name], config["lora_alpha"])}
    ranks = {own[name]: spec.rank_of(name) for name in parameters if spec.rank_of(name) != spec.rank}
    return config | {
        "rank_pattern": config["rank_pattern"] | ranks,
        "alpha_pattern": config["alpha_pattern"] | odd,
    }


def _fuse(model: Decoder, moe: MoEConfig, tensors: Tensors) -> tuple[Tensors, list[str]]:
    """Every layer's experts as one adapter of gate and up and one of down; also which of them there are."""
    rest = {name: value for name, value in tensors.items() if not _is_expert(model, name)}
    found: set[str] = set()
    for i in range(model.cfg.layers):
        prefix = f"model.layers.{i}.{experts_name(moe)}"
        pairs = {part: _stacked(moe, f"model.layers.{i}", part, tensors) for part in ("gate", "up", "down")}
        fused: dict[str, _Factors] = {}
        gate, up = pairs["gate"] or _zeros(pairs["up"]), pairs["up"] or _zeros(pairs["gate"])
        if gate is not None and up is not None:
            fused[_GATE_UP] = _joined(moe, gate, up)
        if pairs["down"]:
            fused[_DOWN] = pairs["down"]
        for name, (a, b) in fused.items():
            inner = ".base_layer" if len(fused) == 2 and name == _GATE_UP else ""  # down's wraps gate's and up's
            rest[f"{prefix}{inner}.lora_A.weight"] = a.reshape(-1, a.shape[-1])
            rest[f"{prefix}{inner}.lora_B.weight"] = b.transpose(1, 2, 0).reshape(b.shape[1], -1)
        found |= set(fused)
    return rest, [name for name in (_GATE_UP, _DOWN) if name in found]


def _zeros(factors: _Factors | None) -> _Factors | None:
    return None if factors is None else (np.zeros_like(factors[0]), np.zeros_like(factors[1]))


def _stacked(moe: MoEConfig, layer: str, part: str, tensors: Tensors) -> _Factors | None:
    """One projection's a (E, R, in) and b (E, out, R) of all experts of a layer; None where they have no adapter."""
    modules = [f"{layer}.{_module(moe, expert, part)}" for expert in range(moe.experts)]
    if f"{modules[0]}.lora_A.weight" not in tensors:
        return None
    a, b = ([tensors[f"{module}.lora_{kind}.weight"] for module in modules] for kind in "AB")
    return np.stack(a), np.stack(b)


def _module(moe: MoEConfig, expert: int, part: str) -> str:
    return next(name for name, path in expert_linears(moe, expert).items() if path[-1] == part)


def _outputs(moe: MoEConfig) -> tuple[slice, slice]:
    """Which outputs of gate and up together are gate's and which up's: in turn in gpt-oss, else first gate's."""
    F = moe.ffn_width
    return (slice(0, None, 2), slice(1, None, 2)) if moe.layout == "fused" else (slice(0, F), slice(F, None))


def _joined(moe: MoEConfig, gate: _Factors, up: _Factors) -> _Factors:
    """One pair of factors of twice the rank: gate's outputs meet its first half, up's the second."""
    (gate_a, gate_b), (up_a, up_b) = gate, up
    E, F, R = gate_b.shape
    b = np.zeros((E, 2 * F, 2 * R), np.float32)
    of_gate, of_up = _outputs(moe)
    b[:, of_gate, :R], b[:, of_up, R:] = gate_b, up_b
    return np.concatenate([gate_a, up_a], axis=1), b


def from_peft(
    folder: Path, model: Decoder, config: Mapping[str, Any], tensors: Tensors
) -> tuple[dict[str, Any], Tensors]:
    """The inverse of `to_peft`.

    Raises:
        ValueError: target_parameters of another form.
    """
    config, moe = dict(config), model.cfg.experts
    parameters = list(config.pop("target_parameters", None) or ())
    modules = {name for _, names in linears(model) for name in names.values()}
    known = tuple(f"{module}.weight" for module in modules)
    fused = moe is not None and _is_fused(moe)
    parts = {name.rsplit(".", 1)[-1] for name in parameters} & {_GATE_UP, _DOWN} if fused else set()
    unknown = [n for n in parameters if not (n.rsplit(".", 1)[-1] in parts or any(k.endswith(n) for k in known))]
    if unknown:
        raise ValueError(
            f"{folder}: target_parameters {', '.join(unknown)} are not read; train experts with target_modules, or "
            "merge the adapter with PEFT first"
        )
    if moe is None:
        return config, tensors
    for key in ("rank_pattern", "alpha_pattern"):
        pattern = dict(config.get(key) or {})
        pattern.pop(_PAIR_PATTERN, None)
        config[key] = {name.removesuffix(re.escape(".weight")): value for name, value in pattern.items()}
    return config, _split(folder, model, moe, tensors, parts) if fused else tensors


def _split(folder: Path, model: Decoder, moe: MoEConfig, tensors: Tensors, parts: set[str]) -> Tensors:
    """Every expert's adapters, from the fused ones of gate and up, of down, or of both."""
    tensors = dict(tensors)
    for i in range(model.cfg.layers):
        layer = f"model.layers.{i}"
        outer, inner = f"{layer}.{experts_name(moe)}", f"{layer}.{experts_name(moe)}.base_layer"
        for prefix in (outer, inner):
            keys = [f"{prefix}.lora_{kind}.weight" for kind in "AB"]
            if any(key not in tensors for key in keys):
                continue
            a, b = (np.asarray(tensors.pop(key), np.float32) for key in keys)
            a = a.reshape(moe.experts, -1, a.shape[-1])
            b = b.reshape(b.shape[0], -1, moe.experts).transpose(2, 0, 1)
            paired = prefix == inner or _DOWN not in parts
            for part, (a_part, b_part) in (_parted(folder, moe, a, b) if paired else {"down": (a, b)}).items():
                for expert in range(moe.experts):
                    module = f"{layer}.{_module(moe, expert, part)}"
                    tensors[f"{module}.lora_A.weight"] = a_part[expert]
                    tensors[f"{module}.lora_B.weight"] = b_part[expert]
    return tensors


def _parted(folder: Path, moe: MoEConfig, a: np.ndarray, b: np.ndarray) -> dict[str, _Factors]:
    """Gate's and up's own factors of a pair."""
    R = a.shape[1] // 2
    gate_b, up_b = (b[:, outputs] for outputs in _outputs(moe))
    if a.shape[1] % 2 or gate_b[..., R:].any() or up_b[..., :R].any():
        raise ValueError(
            f"{folder}: gate and up of the experts share their down-projections, as PEFT trains them; only adapters "
            "with one pair of factors each are read: merge it with PEFT first"
        )
    return {"gate": (a[:, :R], gate_b[..., :R]), "up": (a[:, R:], up_b[..., R:])}
