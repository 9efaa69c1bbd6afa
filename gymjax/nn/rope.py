"""Rotary position embeddings: frequencies of each scaling type, and the cos and sin tables."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """How positions turn into angles.

    Attributes:
        theta: base of the geometric series of frequencies.
        kind: "default" (arXiv 2104.09864), "linear" (positions divided by `factor`, arXiv 2306.15595) or "llama3"
            (long wavelengths divided by `factor`, short ones kept, a linear blend between).
        factor: context extension.
        low_freq_factor: llama3 only; wavelengths above original_max_positions / low_freq_factor are divided by factor.
        high_freq_factor: llama3 only; wavelengths below original_max_positions / high_freq_factor are kept.
        original_max_positions: llama3 only; context length of pre-training, in tokens.
    """

    theta: float = 10000.0
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Angle per position of each rotated pair, f32 (head_dim // 2,), computed on the host in f64."""
    frequency = 1.0 / rope.theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.kind == "linear":
        frequency = frequency / rope.factor
    elif rope.kind == "llama3":
        wavelength = 2 * np.pi / frequency
        turns = rope.original_max_positions / wavelength
        span = rope.high_freq_factor - rope.low_freq_factor
        keep = np.clip((turns - rope.low_freq_factor) / span, 0.0, 1.0)
        frequency = (1 - keep) * frequency / rope.factor + keep * frequency
    return frequency.astype(np.float32)


def rope_tables(
    positions_BT: Int[Array, "B T"], rope: RopeConfig, head_dim: int
) -> tuple[Float[Array, "B T H2"], Float[Array, "B T H2"]]:
    """cos and sin of every position's angles, f32, H2 = head_dim // 2."""
    angle_BTH = positions_BT.astype(jnp.float32)[..., None] * inverse_frequencies(rope, head_dim)
    return jnp.cos(angle_BTH), jnp.sin(angle_BTH)
