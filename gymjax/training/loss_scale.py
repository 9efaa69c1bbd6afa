"""Dynamic loss scaling for fp16 (arXiv 1710.03740, section 3.2): grow after a clean interval, back off on overflow."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

GROWTH_INTERVAL = 2000
SMALLEST = 1.0
LARGEST = 2.0**24


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossScale:
    """Factor on the loss, steps since it last changed, and updates skipped so far."""

    scale: Float[Array, ""]
    clean: Int[Array, ""]
    skipped: Int[Array, ""]


def initial(scale: float) -> LossScale:
    """A fresh scale."""
    return LossScale(jnp.float32(scale), jnp.int32(0), jnp.int32(0))


def adjust(loss_scale: LossScale, finite: Array) -> LossScale:
    """Halves the scale where gradients overflowed, doubles it after GROWTH_INTERVAL clean steps."""
    clean = jnp.where(finite, loss_scale.clean + 1, 0)
    grow = clean >= GROWTH_INTERVAL
    scale = jnp.where(finite, jnp.where(grow, loss_scale.scale * 2, loss_scale.scale), loss_scale.scale / 2)
    return LossScale(
        jnp.clip(scale, SMALLEST, LARGEST),
        jnp.where(grow, 0, clean),
        loss_scale.skipped + (1 - finite.astype(jnp.int32)),
    )


def exhausted(loss_scale: LossScale, finite: Array) -> Array:
    """Whether gradients are not finite even at the smallest scale: no overflow then, but a broken run."""
    return ~finite & (loss_scale.scale <= SMALLEST)
