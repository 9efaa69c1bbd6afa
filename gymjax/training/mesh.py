"""Devices as a mesh with a data and an fsdp axis, and where every array lies on it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXES = ("data", "fsdp")
SMALLEST_SHARDED = 2**16


def start_processes() -> None:
    """Joins the other hosts of a run when the environment names any (JAX_COORDINATOR_ADDRESS, or SLURM's)."""
    if "JAX_COORDINATOR_ADDRESS" in os.environ:
        jax.distributed.initialize(
            os.environ["JAX_COORDINATOR_ADDRESS"],
            int(os.environ["JAX_NUM_PROCESSES"]),
            int(os.environ["JAX_PROCESS_ID"]),
        )
    elif int(os.environ.get("SLURM_NTASKS", "1")) > 1:
        jax.distributed.initialize()


def make_mesh(dp_size: int, fsdp_size: int) -> Mesh:
    """A (data, fsdp) mesh over all devices; one of the sizes may be -1 for what the other leaves.

    Raises:
        ValueError: the sizes do not multiply to the number of devices.
    """
    devices = jax.devices()
    sizes = [dp_size, fsdp_size]
    if sizes.count(-1) == 1:
        sizes[sizes.index(-1)] = len(devices) // -(dp_size * fsdp_size)
    if -1 in sizes or sizes[0] * sizes[1] != len(devices):
        raise ValueError(
            f"dp_size * fsdp_size must be the number of devices, {len(devices)}; got {dp_size} * {fsdp_size}"
            " (-1 in one of them takes what the other leaves)"
        )
    return Mesh(np.array(devices).reshape(sizes), AXES)


def weight_sharding(mesh: Mesh, shape: tuple[int, ...], *, stacked: bool) -> NamedSharding:
    """Shards a weight's widest axis that the fsdp size divides, never that of stacked layers; small ones are whole.

    Args:
        mesh: of the run.
        shape: of the array.
        stacked: whether the leading axis counts layers.
    """
    size = mesh.shape["fsdp"]
    axes = [i for i in range(int(stacked), len(shape)) if shape[i] % size == 0]
    spec: list[str | None] = [None] * len(shape)
    if size > 1 and axes and np.prod(shape) >= SMALLEST_SHARDED:
        spec[max(axes, key=lambda i: shape[i])] = "fsdp"
    return NamedSharding(mesh, P(*spec))


def place_weight(mesh: Mesh, path: tuple[str | int, ...], value):
    """Puts one variable's value (an array or a quantized pytree) on the mesh; paths start with "stacks" in layers."""
    stacked = path[0] == "stacks"
    return jax.tree.map(
        lambda leaf: jax.device_put(leaf, weight_sharding(mesh, np.shape(leaf), stacked=stacked)), value
    )


def shard_state(mesh: Mesh, state):
    """Places a pytree of weights, or of optimizer moments, which have their weights' shapes, on the mesh.

    A path that goes through "stacks" marks stacked layers.
    """

    return jax.tree_util.tree_map_with_path(lambda path, leaf: jax.device_put(leaf, _sharding(mesh, path, leaf)), state)


def sharded_shapes(mesh: Mesh, state):
    """The shapes of what `shard_state` places, with where it would place them."""

    def place(path, leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=_sharding(mesh, path, leaf))

    return jax.tree_util.tree_map_with_path(place, state)


def _sharding(mesh: Mesh, path: tuple, leaf) -> NamedSharding:
    return weight_sharding(mesh, np.shape(leaf), stacked="stacks" in jax.tree_util.keystr(path))


def batch_shards(mesh: Mesh) -> int:
    """Into how many parts a batch's rows are split."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def batch_sharding(mesh: Mesh, rows_axis: int) -> NamedSharding:
    """Where a batch's rows lie, which are the axis `rows_axis` of its arrays."""
    return NamedSharding(mesh, P(*[None] * rows_axis, AXES))


def shard_batch(mesh: Mesh, batch: Mapping[str, Any], *, rows_axis: int) -> dict[str, jax.Array]:
    """Spreads a batch's rows over all devices; every process passes the same whole batch and keeps its part."""
    sharding = batch_sharding(mesh, rows_axis)

    def place(array: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    return {name: place(array) for name, array in batch.items()}
