"""MXFP4, as gpt-oss stores its experts: 4-bit floats with a power of two for every 32 of them (read only)."""

import ml_dtypes
import numpy as np
from jaxtyping import Shaped, UInt8

BLOCK = 32
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4_VALUES = np.array([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], np.float32)
"""The 16 values of E2M1. Source: OCP Microscaling Formats 1.0, section 5.3.3."""
_BIAS = 127  # of the scales' exponent, E8M0
_NOT_A_NUMBER = 255


def dequantize_mxfp4(
    blocks: UInt8[np.ndarray, "*L G 16"], scales: UInt8[np.ndarray, "*L G"], name: str = "the weight"
) -> Shaped[np.ndarray, "*L I"]:
    """Return the weight in bf16: `FP4_VALUES[code] * 2**(scale - 127)`, two codes a byte, first in the low nibble.

    Every product is exact in bf16 but where it would be smaller than bf16's subnormals. Source: OCP Microscaling
    Formats 1.0, sections 5.2 and 6.3.

    Args:
        blocks: codes of 32 consecutive elements of a row each.
        scales: exponents, one a block.
        name: of the weight, for errors.

    Raises:
        ValueError: blocks and scales do not fit together, or a scale is not a number.
    """
    if blocks.shape[-1] * 2 != BLOCK or blocks.shape[:-1] != scales.shape:
        raise ValueError(
            f"{name}: MXFP4 blocks must be {(*scales.shape, BLOCK // 2)} to meet scales {scales.shape}, "
            f"are {blocks.shape}: the checkpoint is damaged, fetch it again"
        )
    if (scales == _NOT_A_NUMBER).any():
        raise ValueError(f"{name}: an MXFP4 scale is 255, which is not a number; fetch the checkpoint again")
    values = np.stack([FP4_VALUES[blocks & 15], FP4_VALUES[blocks >> 4]], axis=-1)
    values = np.ldexp(values.reshape(*scales.shape, BLOCK), scales.astype(np.int32)[..., None] - _BIAS)
    return values.reshape(*scales.shape[:-1], -1).astype(ml_dtypes.bfloat16)
