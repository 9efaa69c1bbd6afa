"""8-bit block-wise quantization with dynamic maps, for optimizer state (arXiv 2110.02861, sections 2 and 3).

bitsandbytes' maps and blocks: 256 elements of a tensor, row after row, share an f32 absmax; a code names the value of
the map nearest to element / absmax. Where a last axis is no multiple of 256, blocks run across its ends, and the last
one may be short.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

BLOCK = 256
Map = Literal["signed", "unsigned"]


def _dynamic_map(*, signed: bool) -> np.ndarray:
    """The 256 values of a dynamic map, sorted, bit for bit bitsandbytes'.

    Decade 10^(i-6), i = 0..6, holds the midpoints of an even grid on [0.1, 1]: 2^i of them with both signs, or 2^(i+1);
    0 and 1 complete it. Grid points are rounded once from their nearer end, midpoints and scaling in turn.
    """
    first, values = np.float32(0.1), [np.float32(0), np.float32(1)]
    for i in range(7):
        intervals = 2 ** (i if signed else i + 1)
        step = np.float64((np.float32(1) - first) / np.float32(intervals))
        index = np.arange(intervals + 1)
        below, above = np.float64(first) + step * index, 1 - step * (intervals - index)
        grid = np.where(index < (intervals + 1) // 2, below, above).astype(np.float32)
        positive = np.float32(10.0 ** (i - 6)) * ((grid[:-1] + grid[1:]) / np.float32(2))
        values += [*positive, *(-positive if signed else ())]
    return np.sort(np.array(values, np.float32))


MAPS: dict[Map, np.ndarray] = {"signed": _dynamic_map(signed=True), "unsigned": _dynamic_map(signed=False)}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Blockwise:
    """An array in 8 bits.

    Attributes:
        codes: uint8, of the array's shape, so that it is spread over devices as the array is.
        absmax: f32, (..., last axis / 256), or (*leading, blocks) where blocks run across rows.
        map: which map the codes are of.
    """

    codes: UInt8[Array, "..."]
    absmax: Float[Array, "..."]
    map: Map = dataclasses.field(metadata={"static": True})


def zeros(shape: tuple[int, ...], map: Map, *, leading: int = 0) -> Blockwise:
    """An array of zeros.

    Args:
        shape: of the array.
        map: "signed", or "unsigned" for values that are never negative.
        leading: axes of stacked tensors, whose ends no block crosses.
    """
    return Blockwise(jnp.zeros(shape, jnp.uint8), jnp.zeros(_blocked(shape, leading)[:-1], jnp.float32), map)


def quantize(x: Float[Array, "..."], map: Map, *, leading: int = 0) -> Blockwise:
    """`code = argmin |map[code] - x / absmax|`, of two equally near the lower; a block of zeros has absmax 0.

    Args:
        x: f32.
        map: as in `zeros`; likewise leading.
    """
    blocks = _to_blocks(x, leading)
    absmax = jnp.max(jnp.abs(blocks), axis=-1)
    scaled = blocks * (1 / jnp.where(absmax > 0, absmax, 1))[..., None]
    return Blockwise(_from_blocks(_nearest(scaled, map), x.shape, leading), absmax, map)


def _nearest(x: Float[Array, "..."], map: Map) -> UInt8[Array, "..."]:
    """Number of midpoints between the map's 256 sorted values that lie below x.

    In its decade x lies in one of the even grid's intervals, whose middle is nearest: a guess that is one off at most,
    where decades meet or by rounding, and that the midpoints on both sides put right. A bisection takes eight look-ups,
    each a pass over memory of its own where arrays are large.
    """
    midpoints = jnp.asarray(_midpoints(map))
    signed = map == "signed"
    size = jnp.abs(x)
    decade, power = jnp.int32(0), np.float32(1e6)
    for exponent in range(6, 0, -1):
        beyond = size > np.float32(10.0**-exponent)
        decade, power = (
            jnp.where(beyond, 7 - exponent, decade),
            jnp.where(beyond, np.float32(10.0 ** (exponent - 1)), power),
        )
    intervals = jnp.left_shift(1 if signed else 2, decade)
    interval = ((size * power - np.float32(0.1)) * (intervals.astype(jnp.float32) * np.float32(1 / 0.9))).astype(
        jnp.int32
    )
    place = intervals + jnp.clip(interval, 0, intervals - 1)  # fewer values are in all smaller decades, by one or two
    guess = 127 + jnp.where(x < 0, -place, place) if signed else place - 1
    below = x <= midpoints.at[jnp.maximum(guess - 1, 0)].get(mode="promise_in_bounds")
    above = x > midpoints.at[jnp.minimum(guess, 254)].get(mode="promise_in_bounds")
    code = guess - (below & (guess > 0)) + (above & (guess < 255))
    return code.astype(jnp.uint8)


def _midpoints(map: Map) -> np.ndarray:
    """The 255 numbers half-way between neighbours of a map."""
    return np.float32(0.5) * (MAPS[map][:-1] + MAPS[map][1:])


def dequantize(q: Blockwise) -> Float[Array, "..."]:
    """`map[code] * absmax`, f32, of the array's shape."""
    shape = q.codes.shape
    leading = 0 if shape and shape[-1] % BLOCK == 0 else q.absmax.ndim - 1
    blocks = jnp.asarray(MAPS[q.map]).at[_to_blocks(q.codes, leading)].get(mode="promise_in_bounds")
    return _from_blocks(blocks * q.absmax[..., None], shape, leading)


def _blocked(shape: tuple[int, ...], leading: int) -> tuple[int, ...]:
    """Shape of the blocks: rows are cut where they hold whole blocks, which keeps the other axes and their sharding."""
    if shape and shape[-1] % BLOCK == 0:
        return (*shape[:-1], shape[-1] // BLOCK, BLOCK)
    return (*shape[:leading], -(-math.prod(shape[leading:]) // BLOCK), BLOCK)


def _to_blocks(x: Array, leading: int) -> Array:
    blocked = _blocked(x.shape, leading)
    spare = math.prod(blocked) // math.prod(x.shape[:leading]) - math.prod(x.shape[leading:]) if x.size else 0
    if spare:
        flat = x.reshape(*x.shape[:leading], -1)
        x = jnp.pad(flat, [(0, 0)] * leading + [(0, spare)])
    return x.reshape(blocked)


def _from_blocks(blocks: Array, shape: tuple[int, ...], leading: int) -> Array:
    size = math.prod(shape[leading:])
    flat = blocks.reshape(*shape[:leading], -1)
    return flat[..., :size].reshape(shape) if flat.shape[-1] != size else blocks.reshape(shape)
