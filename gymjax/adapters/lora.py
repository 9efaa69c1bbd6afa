"""Low-rank adapters (LoRA, arXiv 2106.09685; rsLoRA, arXiv 2312.03732) attached to a decoder from outside.

DoRA wraps one in trained row lengths (dora.py); PiSSA and LoftQ give it another start (svd_start.py).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from gymjax.adapters.dora import Dora
from gymjax.adapters.tensors import A, B, LoraRow, set_slot_tensors
from gymjax.models.decoder import Decoder
from gymjax.models.expert_names import is_router
from gymjax.models.names import Index, linears
from gymjax.nn.moe import ExpertLinear
from gymjax.optim.labels import Trained
from pallas_kernels.grouped_matmul import GroupedLayer
from pallas_kernels.lora_linear import Projection, lora_linear, lora_linears, room


class LoraParam(Trained):
    """A weight of an adapter."""


class LoraA(LoraParam):
    """Down-projection, (L, R, in), of experts (L, E, R, in)."""

    label = "lora_a"


class LoraB(LoraParam):
    """Up-projection, (L, out, R), of experts (L, E, out, R); LoRA+ gives it a rate of its own (arXiv 2402.12354)."""

    label = "lora_b"


class LoraScale(nnx.Variable):
    """Constant factor of each layer's adapter, (L,), of experts (L, E)."""


@dataclasses.dataclass(frozen=True)
class LoraSpec:
    """What to attach.

    Attributes:
        rank: inner width R.
        alpha: scale numerator; the factor is alpha / rank, or alpha / sqrt(rank) with use_rslora.
        dropout: probability of dropping an input element of the adapter while training.
        targets: ("all",) for every linear layer of the blocks but routers, else module names ("q_proj") or whole paths.
        use_rslora: rank-stabilised factor.
        use_dora: train the length of every output row beside its direction.
        rank_pattern: regular expression over module paths -> rank, matched at the end of the path as PEFT does.
        alpha_pattern: likewise -> alpha.
    """

    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    targets: tuple[str, ...] = ("all",)
    use_rslora: bool = False
    use_dora: bool = False
    rank_pattern: Mapping[str, int] = dataclasses.field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def rank_of(self, name: str) -> int:
        """Rank of a module; 0 when it is no target."""
        return int(_first_match(self.rank_pattern, name, self.rank)) if self.is_target(name) else 0

    def alpha_of(self, name: str) -> float:
        """Alpha of a module."""
        return float(_first_match(self.alpha_pattern, name, self.alpha))

    def factor_of(self, name: str) -> float:
        """Factor of a module's low-rank product; 0 when it is no target."""
        rank = self.rank_of(name)
        return self.alpha_of(name) / (math.sqrt(rank) if self.use_rslora else rank) if rank else 0.0

    def is_target(self, name: str) -> bool:
        """Whether a module gets an adapter; "all" leaves out the head, as PEFT's all-linear does, and routers."""
        if self.targets == ("all",):
            return name != "lm_head" and not is_router(name)
        return any(name == target or name.endswith("." + target) for target in self.targets)


def _first_match(pattern: Mapping[str, float], name: str, default: float) -> float:
    return next((value for key, value in pattern.items() if _matches(key, name)), default)


def _matches(key: str, name: str) -> bool:
    """Whether a pattern's key, a regular expression, matches the end of a module path, as PEFT reads it."""
    return re.match(rf"(.*\.)?({key})$", name) is not None


class Lora(nnx.Module):
    """Fills a linear layer's adapter slot.

    Rows of stacked layers may differ in rank: `a` and `b` are as wide as the largest, and what lies beyond a row's rank
    is zero in both factors, so that its gradients are zero too and it stays zero.
    """

    def __init__(self, a: Array, b: Array, factor: np.ndarray, *, dropout: float, rows: tuple[LoraRow, ...]):
        self.a, self.b = LoraA(a), LoraB(b)
        self.factor = LoraScale(jnp.asarray(factor, jnp.float32))
        self.dropout = dropout
        self.rows = rows

    def parts(self):
        """The two factors and how a row's rank cuts them; see `tensors.Slot`."""
        return {A: (self.a, lambda a, rank: a[:rank]), B: (self.b, lambda b, rank: b[:, :rank])}

    def __call__(self, x: Float[Array, "*B I"], w, key: jax.Array | None) -> Float[Array, "*B O"]:
        """`x @ w.T + factor * (dropout(x) @ a.T) @ b.T`; no key, no dropout."""
        return lora_linear(
            x,
            w,
            self.a.get_value(),
            self.b.get_value(),
            self.factor.get_value(),
            dropout_rate=0.0 if key is None else self.dropout,
            key=key if self.dropout else None,
        )

    @staticmethod
    def together(x: Float[Array, "*B I"], ws, loras: Sequence[Lora | None], keys) -> tuple[Float[Array, "*B O"], ...]:
        """Several layers of one input, some of which may have no adapter; dropout is that of the first."""
        rate = next(lora.dropout for lora in loras if lora is not None)
        drops = rate > 0 and keys[0] is not None
        layers = _projections(ws, loras)
        return lora_linears(x, layers, dropout_rate=rate if drops else 0.0, keys=keys if drops else None)

    @staticmethod
    def room(x: Float[Array, "*B I"], ws, loras: Sequence[Lora | None]) -> int:
        """Columns behind x that `together` has a use for."""
        return room(x, _projections(ws, loras))

    def grouped_layer(self, w) -> GroupedLayer:
        """Of a projection of experts, each with factors of its own; experts have no dropout."""
        return GroupedLayer(w, self.a.get_value(), self.b.get_value(), self.factor.get_value())

    def effective(self, w: Float[Array, "*E O I"]) -> Float[Array, "*E O I"]:
        """`w + factor * b @ a` in f32, for a layer that is applied inside a loss; dropout cannot act there."""
        delta = jnp.einsum("...OR,...RI->...OI", self.b.get_value(), self.a.get_value(), precision="highest")
        return w.astype(jnp.float32) + self.factor.get_value()[..., None, None] * delta


def _projections(ws, loras: Sequence[Lora | None]) -> list[Projection]:
    one = jnp.float32(1)
    return [
        Projection(w, None, None, one)
        if lora is None
        else Projection(w, lora.a.get_value(), lora.b.get_value(), lora.factor.get_value())
        for w, lora in zip(ws, loras, strict=True)
    ]


def attach(model: Decoder, spec: LoraSpec, *, key: jax.Array, start: Mapping[str, np.ndarray] | None = None) -> None:
    """Fills the adapter slots of the targeted linear layers, in place.

    `a` is uniform in +-1/sqrt(in) (PEFT's kaiming_uniform with a = sqrt(5)), `b` is zero: the first forward pass equals
    the base's. Factors of `start` take their place: the base has then given up what they add.

    Args:
        model: decoder whose slots are empty.
        spec: what to attach where.
        key: randomness of `a`.
        start: first factors of every targeted module, "model.layers.3.mlp.up_proj.lora_A.weight" (R, in) and
            "...lora_B.weight" (out, R); None or empty to draw them.

    Raises:
        ValueError: a target or a pattern that names no linear layer, or a slot that is filled already; dropout on the
            head or on experts; experts that would differ from each other.
    """
    layers = list(linears(model))
    if spec.dropout and spec.is_target("lm_head"):
        raise ValueError(f"lora_dropout: {spec.dropout} cannot act on lm_head, which is fused with the loss; use 0")
    _check_names(spec, [name for _, names in layers for name in names.values()])
    for i, (layer, names) in enumerate(layers):
        if not any(spec.rank_of(name) for name in names.values()):
            continue
        if layer.adapter is not None:
            raise ValueError(f"{next(iter(names.values()))} has an adapter already; merge it before attaching another")
        lora = _new_lora(layer, names, spec, jax.random.fold_in(key, i))
        if start:
            set_slot_tensors(lora, start)
        if isinstance(layer, ExpertLinear):
            _check_experts(spec, list(names.values()))
            layer.adapter = lora
            continue
        layer.adapter = Dora(lora, layer.w.get_value(), stacked=None not in names) if spec.use_dora else lora


def _new_lora(layer, names: Mapping[Index, str], spec: LoraSpec, key: jax.Array) -> Lora:
    w = layer.w.get_value()
    out_width, in_width = w.shape[-2:]  # NF4Weight.shape is one layer's
    rows = tuple(LoraRow(name, i, spec.rank_of(name), spec.alpha_of(name)) for i, name in names.items())
    ranks = np.array([row.rank for row in rows])
    widest = int(ranks.max())
    live_LR1 = (np.arange(widest) < ranks[:, None])[..., None]
    bound = 1 / math.sqrt(in_width)
    a_LRI = jax.random.uniform(key, (len(rows), widest, in_width), jnp.float32, -bound, bound) * live_LR1
    b_LOR = jnp.zeros((len(rows), out_width, widest), jnp.float32)
    factor_L = np.array([spec.factor_of(row.name) for row in rows], np.float32)
    leading = tuple(np.max([row.at for row in rows], axis=0).astype(int) + 1)
    a, b = (array.reshape(*leading, *array.shape[1:]) for array in (a_LRI, b_LOR))
    return Lora(a, b, factor_L.reshape(leading), dropout=spec.dropout, rows=rows)


def _check_names(spec: LoraSpec, names: list[str]) -> None:
    known = sorted({name.rsplit(".", 1)[-1] for name in names})
    for target in spec.targets:
        if target != "all" and not any(name == target or name.endswith("." + target) for name in names):
            raise ValueError(f"lora_target: {target!r} names no linear layer; known: all, {', '.join(known)}")
    for field in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(spec, field):
            if not any(spec.is_target(name) and _matches(pattern, name) for name in names):
                raise ValueError(f"lora_{field}: {pattern!r} matches no targeted layer; known: {', '.join(known)}")


def _check_experts(spec: LoraSpec, names: list[str]) -> None:
    """What PEFT, which holds a layer's experts in one tensor, cannot do is refused before training."""
    if spec.use_dora:
        raise ValueError(
            f"use_dora: true is not done for experts ({names[0]}), in PEFT neither; leave them out of lora_target"
        )
    if spec.dropout:
        raise ValueError(
            f"lora_dropout: {spec.dropout} cannot act on experts ({names[0]}), in PEFT neither; use 0, or leave them "
            "out of lora_target"
        )
    odd = [name for name in names if (spec.rank_of(name), spec.alpha_of(name)) != (spec.rank, spec.alpha)]
    if odd:
        raise ValueError(
            f"lora_target, lora_rank_pattern: {odd[0]} has rank {spec.rank_of(odd[0])} and alpha "
            f"{spec.alpha_of(odd[0]):g}, but experts have all the same, {spec.rank} and {spec.alpha:g}: PEFT holds "
            "them in one tensor"
        )


def adapters(model: Decoder) -> Iterator[Lora]:
    """The low-rank part of every filled slot of the model, stacked layers as one."""
    slots = (layer.adapter for layer, _ in linears(model))
    parts = (slot.lora if isinstance(slot, Dora) else slot for slot in slots)
    return (part for part in parts if isinstance(part, Lora))


def lora_modules(model: Decoder) -> Iterator[tuple[Lora, LoraRow]]:
    """Every adapted module of the model, layer by layer of each stacked projection."""
    for lora in adapters(model):
        yield from ((lora, row) for row in lora.rows if row.rank)


def merge(model: Decoder) -> None:
    """Puts every adapter's effective weight, computed in f32 and rounded once, over its dense base; empties the slots.

    Raises:
        ValueError: the base is quantized; load it in 16 bits to merge into.
    """
    for layer, names in linears(model):
        if layer.adapter is None:
            continue
        w = layer.w.get_value()
        if not isinstance(w, jax.Array | np.ndarray):
            raise ValueError(f"{next(iter(names.values()))} is quantized: load the base in 16 bits to merge into")
        layer.w.set_value(layer.adapter.effective(w).astype(w.dtype))
        layer.adapter = nnx.data(None)
