"""NF4 dequantization in plain jnp (table gather) and the two code tables."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

NESTED_BLOCK = 256

NF4_CODE = np.array(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    np.float32,
)
"""The 16 values of NF4: quantiles of the normal distribution. Source: arXiv 2305.14314, appendix E."""


def _dynamic_code() -> np.ndarray:
    """Build the 256 signed values of bitsandbytes' dynamic 8-bit map, sorted, bit for bit.

    Decade 10^(i-6), i = 0..6, holds the 2^i midpoints of an even grid on [0.1, 1], with both signs; 0 and 1 complete
    it. Each grid point is start + i * step from the near end, rounded once (as a fused multiply-add does); midpoints
    and scaling are rounded to f32 in turn.
    """
    values = [np.float32(0), np.float32(1)]
    for i in range(7):
        intervals = 2**i
        step = np.float64((np.float32(1) - np.float32(0.1)) / np.float32(intervals))
        index = np.arange(intervals + 1)
        below, above = np.float64(np.float32(0.1)) + step * index, 1 - step * (intervals - index)
        grid = np.where(index < (intervals + 1) // 2, below, above).astype(np.float32)
        positive = np.float32(10.0 ** (i - 6)) * ((grid[:-1] + grid[1:]) / np.float32(2))
        values += [*positive, *-positive]
    return np.sort(np.array(values, np.float32))


DYNAMIC_CODE = _dynamic_code()
"""The 256 values that double quantization stores absmax in. Source: arXiv 2110.02861, section 2 (dynamic tree)."""


def dequantize(
    codes: UInt8[Array, "*L bytes"],
    absmax: Array,
    nested_absmax: Float[Array, "*L nested"] | None,
    offset: Float[Array, "*L"] | None,
    shape: tuple[int, int],
    block_size: int,
    dtype: jnp.dtype,
) -> Float[Array, "*L O I"]:
    """Return code * absmax, multiplied in f32 and rounded once to dtype."""
    leading, size = codes.shape[:-1], math.prod(shape)
    blocks = -(-size // block_size)
    spare = blocks * block_size // 2 - codes.shape[-1]  # the last block may be short
    codes = jnp.pad(codes, [(0, 0)] * len(leading) + [(0, spare)]) if spare else codes
    codes = codes.reshape(*leading, blocks, block_size // 2)
    values = jnp.stack([_look_up(NF4_CODE, codes >> 4), _look_up(NF4_CODE, codes & 15)], axis=-1)
    scale = block_scales(absmax, nested_absmax, offset)
    flat = (values.reshape(*leading, blocks, block_size) * scale[..., None]).astype(dtype)
    flat = flat.reshape(*leading, blocks * block_size)
    return (flat[..., :size] if blocks * block_size != size else flat).reshape(*leading, *shape)


def block_scales(
    absmax: Array, nested_absmax: Float[Array, "*L nested"] | None, offset: Float[Array, "*L"] | None
) -> Float[Array, "*L blocks"]:
    """Return each block's absmax in f32, undoing double quantization."""
    if nested_absmax is None or offset is None:
        return absmax
    blocks = absmax.shape[-1]
    nested = jnp.repeat(nested_absmax, NESTED_BLOCK, axis=-1)[..., :blocks]
    # The barrier keeps the compiler from a fused multiply-add, whose single rounding differs from bitsandbytes' two.
    product = jax.lax.optimization_barrier(_look_up(DYNAMIC_CODE, absmax) * nested)
    return product + offset[..., None]


def _look_up(table: np.ndarray, index: UInt8[Array, "*n"]) -> Float[Array, "*n"]:
    return jnp.asarray(table).at[index].get(mode="promise_in_bounds")
