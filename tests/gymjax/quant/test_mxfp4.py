"""MXFP4 decoding by hand-made bytes."""

import ml_dtypes
import numpy as np
import pytest

from gymjax.quant.mxfp4 import dequantize_mxfp4


def test_codes_and_scales():
    blocks = np.zeros((1, 2, 16), np.uint8)
    blocks[0, 0, :3] = [0x21, 0xF9, 0x70]  # low nibble first: 0.5, 1, -0.5, -6, 0, 6
    blocks[0, 1, 15] = 0x50  # the last element: 3
    weight = dequantize_mxfp4(blocks, np.array([[127, 130]], np.uint8))
    assert weight.dtype == ml_dtypes.bfloat16
    assert weight.shape == (1, 64)
    np.testing.assert_array_equal(weight[0, :6].astype(np.float32), [0.5, 1, -0.5, -6, 0, 6])
    assert not weight[0, 6:63].any()
    assert float(weight[0, 63]) == 3 * 2**3


def test_every_code_at_small_and_large_scales():
    blocks = (np.arange(16, dtype=np.uint8) | (np.arange(16, dtype=np.uint8) << 4))[None]
    for scale in (1, 100, 250):
        weight = dequantize_mxfp4(blocks, np.array([scale], np.uint8)).astype(np.float64)
        magnitude = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6]) * 2.0 ** (scale - 127)
        np.testing.assert_array_equal(weight[::2], np.concatenate([magnitude, -magnitude]))
        np.testing.assert_array_equal(weight[::2], weight[1::2])


def test_damage_is_named():
    with pytest.raises(
        ValueError, match=r"x: MXFP4 blocks must be \(4, 2, 16\) to meet scales \(4, 2\), are \(4, 16\)"
    ):
        dequantize_mxfp4(np.zeros((4, 16), np.uint8), np.zeros((4, 2), np.uint8), "x")
    with pytest.raises(ValueError, match="x: an MXFP4 scale is 255"):
        dequantize_mxfp4(np.zeros((1, 16), np.uint8), np.full(1, 255, np.uint8), "x")
