"""Rotary position embeddings: frequencies of each scaling type, and the cos and sin tables.

Frequencies are rounded to f32 at the same places as in transformers, so that angles agree at long positions too.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.flash_attention.bounds import document_ends


@dataclasses.dataclass(frozen=True)
class Linear:
    """Position interpolation (arXiv 2306.15595): every frequency divided by `factor`."""

    factor: float


@dataclasses.dataclass(frozen=True)
class Dynamic:
    """NTK-aware base that grows with the length L of a document (arXiv 2309.00071, section 3.2).

    Past max_positions the base is multiplied by `(factor * L / max_positions - (factor - 1)) ** (R / (R - 2))`, R being
    the rotated width.
    """

    factor: float
    max_positions: int


@dataclasses.dataclass(frozen=True)
class Llama3:
    """Llama 3.1's blend: long wavelengths divided by `factor`, short ones kept, a linear blend between.

    Attributes:
        factor: context extension.
        low_freq_factor: wavelengths above original_max_positions / low_freq_factor are divided by factor.
        high_freq_factor: wavelengths below original_max_positions / high_freq_factor are kept.
        original_max_positions: context length of pre-training, in tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclasses.dataclass(frozen=True)
class Yarn:
    """YaRN (arXiv 2309.00071, section 3.2 and 3.4): a ramp between kept and divided frequencies, scaled tables.

    Attributes:
        factor: context extension.
        original_max_positions: context length of pre-training, in tokens.
        attention_factor: cos and sin are multiplied by it, and so the scores by its square.
        beta_fast: pairs that turn more often than this over the original length are kept.
        beta_slow: pairs that turn less often than this are divided by factor.
        truncate: whether the ends of the ramp are moved outwards to whole pairs.
    """

    factor: float
    original_max_positions: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclasses.dataclass(frozen=True)
class LongRope:
    """LongRoPE (arXiv 2402.13753): a divisor for every pair, one set for short and one for long documents.

    Attributes:
        short: divisors of documents of up to original_max_positions tokens.
        long: divisors of longer ones.
        original_max_positions: context length of pre-training, in tokens.
        attention_factor: cos and sin are multiplied by it, for short documents too.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_max_positions: int
    attention_factor: float


Scaling = Linear | Dynamic | Llama3 | Yarn | LongRope


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """How positions turn into angles (arXiv 2104.09864).

    Attributes:
        theta: base of the geometric series of frequencies.
        scaling: how the context is extended; None: not at all.
        fraction: share of each head that is rotated; the channels after it pass unchanged.
    """

    theta: float = 10000.0
    scaling: Scaling | None = None
    fraction: float = 1.0

    @property
    def attention_factor(self) -> float:
        """What cos and sin are multiplied by."""
        return self.scaling.attention_factor if isinstance(self.scaling, Yarn | LongRope) else 1.0

    @property
    def by_length(self) -> bool:
        """Whether a token's angles depend on the length of its document."""
        return isinstance(self.scaling, Dynamic | LongRope)

    def rotated(self, head_dim: int) -> int:
        """Channels of each head that are rotated."""
        return int(head_dim * self.fraction)


def inverse_frequencies(rope: RopeConfig, head_dim: int, length: int = 0) -> Float[np.ndarray, " R2"]:
    """Angle per position of each rotated pair, f32, for a document of `length` tokens; computed on the host."""
    width = rope.rotated(head_dim)
    wave = _powers(rope.theta, width)
    match rope.scaling:
        case None:
            return 1 / wave
        case Linear(factor):
            return 1 / wave / np.float32(factor)
        case Dynamic():
            return 1 / wave * _dynamic_change(rope.scaling, width, np.float32(length), np)
        case Llama3():
            return _llama3(rope.scaling, 1 / wave)
        case Yarn():
            return _yarn(rope.scaling, rope.theta, width)
        case LongRope(short, long, original):
            return 1 / (np.asarray(long if length > original else short, np.float32) * wave)


def rope_tables(
    positions_BT: Int[Array, "B T"], rope: RopeConfig, head_dim: int, lengths_BT: Int[Array, "B T"] | None = None
) -> tuple[Float[Array, "B T R2"], Float[Array, "B T R2"]]:
    """cos and sin of every position's angles times the attention factor, f32, R2 = rotated channels / 2.

    Args:
        positions_BT: position of each token in its document.
        rope: settings.
        head_dim: width of a head.
        lengths_BT: length of each token's document, see `document_lengths`; needed where rope.by_length.

    Raises:
        ValueError: lengths_BT is needed and absent.
    """
    if rope.by_length and lengths_BT is None:
        raise ValueError("rope: angles that depend on the length of a document need lengths_BT, is None")
    frequency = inverse_frequencies(rope, head_dim) if lengths_BT is None else _by_length(rope, head_dim, lengths_BT)
    cos_BTH, sin_BTH = _turn(positions_BT[..., None], jnp.asarray(frequency))
    factor = rope.attention_factor
    return (cos_BTH, sin_BTH) if factor == 1 else (cos_BTH * factor, sin_BTH * factor)


def document_lengths(positions_BT: Int[Array, "B T"], segment_ids_BT: Int[Array, "B T"] | None) -> Int[Array, "B T"]:
    """Length of the document that each token belongs to: its last position plus one.

    Args:
        positions_BT: from 0 in each document; 0 on padding.
        segment_ids_BT: document of each token, 0 for padding; None: one document a row.
    """
    if segment_ids_BT is None:
        return jnp.broadcast_to(jnp.max(positions_BT, axis=1, keepdims=True) + 1, positions_BT.shape)
    _, last_BT = document_ends(segment_ids_BT)
    return jnp.take_along_axis(positions_BT, last_BT, axis=1) + 1


def _turn(position: Int[Array, "B T 1"], frequency: Float[Array, "*BT R2"]) -> tuple[Array, Array]:
    """cos and sin of position * frequency, right to 1e-6 at positions below 2**24.

    The product rounded to f32 alone is off by 0.004 at position 131,071. Products of halves of 12 bits each are exact
    (T. J. Dekker, Numerische Mathematik 18, 1971, section 4), and what an angle is the sum of turns one after another.
    """
    low = position.astype(jnp.int32) % 4096
    high = position.astype(jnp.int32) - low
    bits = jax.lax.bitcast_convert_type(frequency.astype(jnp.float32), jnp.uint32)
    coarse = jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFFFFF000), jnp.float32)
    halves = itertools.product((high.astype(jnp.float32), low.astype(jnp.float32)), (coarse, frequency - coarse))
    angles = [whole * part for whole, part in halves]
    cos, sin = jnp.cos(angles[0]), jnp.sin(angles[0])
    for angle in angles[1:]:
        cos, sin = cos * jnp.cos(angle) - sin * jnp.sin(angle), sin * jnp.cos(angle) + cos * jnp.sin(angle)
    return cos, sin


def _powers(theta: float, width: int) -> np.ndarray:
    """theta ** (2i / width) with exponent and power rounded to f32."""
    exponent = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    return (np.float64(theta) ** exponent.astype(np.float64)).astype(np.float32)


def _by_length(rope: RopeConfig, head_dim: int, lengths_BT: Array) -> Array:
    """Frequencies for documents of these lengths, (B, T, R2), or (R2,) where they do not depend on it."""
    match rope.scaling:
        case Dynamic():
            change = _dynamic_change(
                rope.scaling, rope.rotated(head_dim), lengths_BT[..., None].astype(jnp.float32), jnp
            )
            return inverse_frequencies(rope, head_dim) * change
        case LongRope(original_max_positions=original):
            long, short = (inverse_frequencies(rope, head_dim, length) for length in (original + 1, original))
            return jnp.where(lengths_BT[..., None] > original, long, short)
    return jnp.asarray(inverse_frequencies(rope, head_dim))


def _dynamic_change(scaling: Dynamic, width: int, length, xp):
    """What the growth of the base multiplies each frequency by: `s ** (-2i / (R - 2))`, 1 up to max_positions."""
    growth = xp.maximum(scaling.factor * length / scaling.max_positions - (scaling.factor - 1), 1.0)
    return xp.exp(-np.arange(0, width, 2, dtype=np.float32) / np.float32(width - 2) * xp.log(growth))


def _llama3(scaling: Llama3, frequency: np.ndarray) -> np.ndarray:
    turns = np.float32(scaling.original_max_positions) / (np.float32(2 * math.pi) / frequency)
    low, high = np.float32(scaling.low_freq_factor), np.float32(scaling.high_freq_factor)
    divided = frequency / np.float32(scaling.factor)
    keep = (turns - low) / (high - low)
    blend = (1 - keep) * divided + keep * frequency
    return np.where(turns < low, divided, np.where(turns > high, frequency, blend))


def _yarn(scaling: Yarn, theta: float, width: int) -> np.ndarray:
    def pair(turns: float) -> float:
        """The pair, as a real number, that turns so often over the original length."""
        return width * math.log(scaling.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    high += 0.001 if low == high else 0
    wave = _powers(theta, width)
    ramp = ((np.arange(width // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)).clip(0, 1)
    keep = 1 - ramp
    return 1 / (np.float32(scaling.factor) * wave) * (1 - keep) + 1 / wave * keep
