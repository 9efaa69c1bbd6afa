"""Which weight is trained, and how: the variable's type says it, optax.partition reads it."""

from __future__ import annotations

import jax
from flax import nnx


class Trained(nnx.Param):
    """A weight that the optimizer updates; stored in f32. A plain `nnx.Param` is frozen."""

    label = "base"


UNDECAYED = frozenset({"scale", "b"})


def labels(trained: nnx.State) -> nnx.State:
    """Label of every trained variable: its type's `label`, with "/no_decay" added for norm scales and biases.

    Args:
        trained: the part of a model's state whose variables are `Trained`.

    Returns:
        A state of the same structure with a string in each variable's place.
    """

    def label(path: tuple, variable: Trained) -> str:
        decayed = type(variable).label != "base" or path[-1].key not in UNDECAYED
        return type(variable).label + ("" if decayed else "/no_decay")

    return jax.tree_util.tree_map_with_path(label, trained, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
