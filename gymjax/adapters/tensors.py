"""Every adapted module's own arrays by the names PEFT stores them under, out of a model and into it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from gymjax.adapters.dora import Dora
from gymjax.adapters.lora import Lora
from gymjax.models.decoder import Decoder
from gymjax.models.names import linears

A, B, MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"
SUFFIXES = (A, B, MAGNITUDE)
_Cut = Callable[[np.ndarray, int], np.ndarray]


def adapter_tensors(model: Decoder) -> dict[str, np.ndarray]:
    """Arrays of all adapters in f32 on the host, each cut to its module's own rank.

    Returns:
        "model.layers.3.mlp.up_proj.lora_A.weight" (R, in), "...lora_B.weight" (out, R) and, with DoRA,
        "...lora_magnitude_vector" (out,).
    """
    tensors: dict[str, np.ndarray] = {}
    for variable, parts in _variables(model):
        whole = np.asarray(variable.get_value(), np.float32)
        tensors |= dict(_named_parts(whole, parts))
    return tensors


def set_adapter_tensors(model: Decoder, tensors: Mapping[str, np.ndarray]) -> list[str]:
    """Writes arrays over those of the attached adapters, in place.

    Args:
        model: its adapters attached.
        tensors: as `adapter_tensors` returns them; other names are left alone.

    Returns:
        One text for each array that is missing or has another shape; with any, the model is unchanged.
    """
    wrong = misfits(tensors, adapter_tensors(model))
    for variable, parts in [] if wrong else _variables(model):
        whole = np.array(variable.get_value(), np.float32)
        for name, part in _named_parts(whole, parts):
            part[...] = tensors[name]
        variable.set_value(jax.device_put(jnp.asarray(whole), variable.get_value().sharding))
    return wrong


def misfits(tensors: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray]) -> list[str]:
    """One text for each wanted array that is missing from `tensors` or has another shape there."""
    return [
        f"{name} is {tensors[name].shape if name in tensors else 'missing'}, must be {value.shape}"
        for name, value in wanted.items()
        if name not in tensors or tensors[name].shape != value.shape
    ]


def _variables(model: Decoder) -> Iterator[tuple[nnx.Variable, list[tuple[str, int | None, int, _Cut]]]]:
    """Every variable of the adapters, with (name, row, rank, cut) of each module that has a part of it."""
    for layer, _ in linears(model):
        slot: Any = layer.adapter
        lora = slot.lora if isinstance(slot, Dora) else slot
        if not isinstance(lora, Lora):
            continue
        kinds: list[tuple[str, nnx.Variable, _Cut]] = [
            (A, lora.a, lambda value, rank: value[:rank]),
            (B, lora.b, lambda value, rank: value[:, :rank]),
        ]
        if isinstance(slot, Dora):
            kinds.append((MAGNITUDE, slot.magnitude, lambda value, rank: value))
        for suffix, variable, cut in kinds:
            yield variable, [(f"{row.name}.{suffix}", row.index, row.rank, cut) for row in lora.rows if row.rank]


def _named_parts(whole: np.ndarray, parts: list[tuple[str, int | None, int, _Cut]]) -> Iterator[tuple[str, np.ndarray]]:
    """Views into a variable's array."""
    for name, index, rank, cut in parts:
        yield name, cut(whole if index is None else whole[index], rank)
