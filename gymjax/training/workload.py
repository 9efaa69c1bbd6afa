"""What a step's memory depends on."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import PyTree

import pallas_kernels.flash_attention as flash
from gymjax.models.decoder_config import DecoderConfig
from gymjax.training.step import StepSettings, TrainState


@dataclasses.dataclass(frozen=True)
class Workload:
    """What a step's memory depends on; arrays may be jax.ShapeDtypeStruct, with shardings if there are several devices.

    Attributes:
        cfg: of the decoder.
        graphdef: of the decoder.
        state: train state.
        frozen: frozen weights.
        settings: of the step; its remat is not read.
        rows: of one microbatch on one device.
        length: tokens of the longest rows.
        accumulation: microbatches of a step.
        dtype: of activations.
        fsdp: devices that share one copy of the weights.
        shards: devices that share a microbatch's rows.
    """

    cfg: DecoderConfig
    graphdef: nnx.GraphDef
    state: TrainState
    frozen: nnx.State
    settings: StepSettings
    rows: int
    length: int
    accumulation: int
    dtype: jnp.dtype
    fsdp: int = 1
    shards: int = 1

    @property
    def tokens(self) -> int:
        """Of one microbatch on one device, padding included."""
        return self.rows * self.length


def device_bytes(tree: PyTree) -> int:
    """Bytes of a tree's arrays on one device."""

    def size(leaf: Any) -> int:
        sharding = getattr(leaf, "sharding", None)
        shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
        return math.prod(shape) * leaf.dtype.itemsize

    return sum(size(leaf) for leaf in jax.tree.leaves(tree))


def abstract_batch(rows: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of a microbatch."""
    ints = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    batch = dict.fromkeys(("tokens", "targets", "segment_ids", "positions"), ints)
    return batch | {"loss_weights": jax.ShapeDtypeStruct(ints.shape, jnp.float32)}


def attention_name(work: Workload) -> str:
    """The attention implementation that the step runs."""
    if work.settings.attention is not None:
        return work.settings.attention
    cfg = work.cfg
    q, k = (
        jax.ShapeDtypeStruct((work.rows, work.length, heads, cfg.head_dim), work.dtype)
        for heads in (cfg.heads, cfg.kv_heads)
    )
    options = {"scale": cfg.attn_scale, "softcap": cfg.attn_softcap, "sinks": cfg.attn_sinks}
    told = flash.explain(q, k, packed=work.settings.packed, **options)
    return told.removeprefix("flash_attention: ").split(" ")[0]
