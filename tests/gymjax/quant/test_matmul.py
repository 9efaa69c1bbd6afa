import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gymjax.quant import matmul, quantize, weight_bytes
from pallas_kernels.nf4_linear import dequantize


def normal(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def test_dense_product_accumulates_in_f32():
    x, w = normal(2, 3, 512), normal(7, 512)
    expected = np.einsum("bti,oi->bto", x.astype(np.float64), w.astype(np.float64))
    # f32: 512 terms; bf16: one rounding of result and operands, 2^-9 of values of size 20 each
    for dtype, tolerance in ((jnp.float32, 1e-4), (jnp.bfloat16, 0.3)):
        y = matmul(jnp.asarray(x, dtype), jnp.asarray(w))
        assert y.dtype == dtype
        assert np.abs(np.asarray(y, np.float64) - expected).max() < tolerance


def test_packed_product_equals_the_dequantized_one():
    x, w = jnp.asarray(normal(5, 65)), quantize(normal(33, 65), dtype="float32")
    expected = x @ dequantize(w).T
    np.testing.assert_allclose(matmul(x, w), expected, atol=1e-4)  # f32 sums of 65 terms


def test_bad_width_names_both():
    with pytest.raises(ValueError, match=r"width 5.*takes 65"):
        matmul(jnp.zeros((2, 5)), quantize(normal(33, 65)))


def test_weight_bytes_counts_packed_weights_packed():
    w = quantize(normal(64, 64))
    assert weight_bytes({"a": w, "b": jnp.zeros((3, 5), jnp.bfloat16)}) == 2048 + 64 + 4 + 4 + 30
    assert weight_bytes(jax.eval_shape(lambda: jnp.zeros((3, 5)))) == 60
