"""Every adapted module's own arrays by the names PEFT stores them under, out of a model and into it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from gymjax.models.decoder import Decoder
from gymjax.models.names import Index, index_tuple, linears

A, B, MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"
SUFFIXES = (A, B, MAGNITUDE)


@dataclasses.dataclass(frozen=True)
class LoraRow:
    """Adapter of one module: its Hugging Face name, its row of the stacked arrays, its settings."""

    name: str
    index: Index
    rank: int
    alpha: float

    @property
    def at(self) -> tuple[int, ...]:
        """The row as a tuple, empty where nothing is stacked."""
        return index_tuple(self.index)


class Slot(Protocol):
    """What fills a linear layer's adapter slot, as far as its arrays go."""

    rows: tuple[LoraRow, ...]

    def parts(self) -> Mapping[str, tuple[nnx.Variable, Callable[[Any, int], Any]]]:
        """Suffix of the name -> (variable, what of one module's array belongs to its rank)."""
        ...


def adapter_tensors(model: Decoder) -> dict[str, np.ndarray]:
    """Arrays of all adapters in f32 on the host, each cut to its module's own rank.

    Returns:
        "model.layers.3.mlp.up_proj.lora_A.weight" (R, in), "...lora_B.weight" (out, R) and, with DoRA,
        "...lora_magnitude_vector" (out,).
    """
    tensors: dict[str, np.ndarray] = {}
    for slot in _slots(model):
        for suffix, (variable, _) in slot.parts().items():
            tensors |= dict(_named_parts(slot, suffix, np.asarray(variable.get_value(), np.float32)))
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
    for slot in [] if wrong else _slots(model):
        set_slot_tensors(slot, tensors)
    return wrong


def set_slot_tensors(slot: Slot, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes arrays over those of one slot, in place; those that `tensors` does not name stay."""
    for suffix, (variable, _) in slot.parts().items():
        value = variable.get_value()
        whole = np.array(value, np.float32)
        for name, part in _named_parts(slot, suffix, whole):
            part[...] = tensors.get(name, part)
        # What is bound to no device stays so: it has to meet bases on any mesh.
        variable.set_value(jax.device_put(whole, value.sharding) if value.committed else jnp.asarray(whole))


def misfits(tensors: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray]) -> list[str]:
    """One text for each wanted array that is missing from `tensors` or has another shape there."""
    return [
        f"{name} is {tensors[name].shape if name in tensors else 'missing'}, must be {value.shape}"
        for name, value in wanted.items()
        if name not in tensors or tensors[name].shape != value.shape
    ]


def _slots(model: Decoder) -> Iterator[Any]:
    return (layer.adapter for layer, _ in linears(model) if layer.adapter is not None)


def _named_parts(slot: Slot, suffix: str, whole: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Views of a variable's array, one for each module that has a part of it."""
    _, cut = slot.parts()[suffix]
    for row in slot.rows:
        if row.rank:
            yield f"{row.name}.{suffix}", cut(whole[row.at], row.rank)
