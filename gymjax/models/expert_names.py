"""Hugging Face module names of a mixture of experts, and which part of our block each is."""

from __future__ import annotations

import dataclasses

from gymjax.nn.moe import ExpertLayout, MoEConfig

Path = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class _Names:
    router: str
    experts: str
    gate: str
    up: str
    down: str


# gpt-oss stores all experts of a layer in one tensor; here they have the names that the others' have.
_NAMES: dict[ExpertLayout, _Names] = {
    "experts": _Names("mlp.gate", "mlp.experts", "gate_proj", "up_proj", "down_proj"),
    "block_sparse_moe": _Names("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2"),
    "fused": _Names("mlp.router", "mlp.experts", "gate_proj", "up_proj", "down_proj"),
}
_SHARED = {
    "mlp.shared_expert.gate_proj": ("mlp", "shared", "gate"),
    "mlp.shared_expert.up_proj": ("mlp", "shared", "up"),
    "mlp.shared_expert.down_proj": ("mlp", "shared", "down"),
}
_SHARED_GATE = "mlp.shared_expert_gate"
_ROUTERS = (*(names.router for names in _NAMES.values()), _SHARED_GATE)


def router_name(moe: MoEConfig) -> str:
    """Name of a layer's router, inside the layer."""
    return _NAMES[moe.layout].router


def experts_name(moe: MoEConfig) -> str:
    """Name of the module that holds a layer's experts, inside the layer."""
    return _NAMES[moe.layout].experts


def is_router(name: str) -> bool:
    """Whether a module's path is that of a router or of a shared expert's gate: neither packed nor adapted unasked."""
    return name.endswith(tuple("." + router for router in _ROUTERS))


def moe_linears(moe: MoEConfig) -> dict[str, Path]:
    """Name inside a layer -> path in our block of the router and of the shared expert's layers."""
    shared = {} if moe.shared_ffn_width is None else _SHARED | {_SHARED_GATE: ("mlp", "shared_gate")}
    return {router_name(moe): ("mlp", "router"), **shared}


def expert_linears(moe: MoEConfig, expert: int) -> dict[str, Path]:
    """Name inside a layer -> path in our block of one expert's layers; all experts' share the paths."""
    names = _NAMES[moe.layout]
    modules = ((names.gate, "gate"), (names.up, "up"), (names.down, "down"))
    return {f"{names.experts}.{expert}.{name}": ("mlp", part) for name, part in modules}


def moe_shapes(moe: MoEConfig, width: int) -> dict[Path, tuple[int, int]]:
    """Shape of the weight, of one expert where there is one for each, at every path."""
    ffn, shared = moe.ffn_width, moe.shared_ffn_width or 0
    return {
        ("mlp", "router"): (moe.experts, width),
        ("mlp", "gate"): (ffn, width),
        ("mlp", "up"): (ffn, width),
        ("mlp", "down"): (width, ffn),
        ("mlp", "shared", "gate"): (shared, width),
        ("mlp", "shared", "up"): (shared, width),
        ("mlp", "shared", "down"): (width, shared),
        ("mlp", "shared_gate"): (1, width),
    }
