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


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
def test_gradients_are_rounded_once(dtype):
    x, w, dy = jnp.asarray(normal(2, 37, 65), dtype), jnp.asarray(normal(33, 65)), jnp.asarray(normal(2, 37, 33), dtype)
    dx, dw = jax.vjp(matmul, x, w)[1](dy)
    assert (dx.dtype, dw.dtype) == (dtype, jnp.float32)
    x64, w64, dy64 = (np.asarray(array, np.float64) for array in (x, w.astype(dtype), dy))
    # Of dx one rounding to its dtype; the weight is in f32, and so its gradient is, to the order of 74 terms' sum.
    half_ulp = float(jnp.finfo(dtype).eps) / 2
    np.testing.assert_allclose(np.asarray(dx, np.float64), dy64 @ w64, rtol=1.01 * half_ulp, atol=2e-5)
    np.testing.assert_allclose(dw, np.einsum("bto,bti->oi", dy64, x64), atol=2e-5)


def test_a_frozen_weight_keeps_no_input_for_the_backward_pass():
    x, w = jnp.zeros((7, 5), jnp.bfloat16), jnp.zeros((3, 5), jnp.bfloat16)
    kept = jax.tree.leaves(jax.vjp(lambda x: matmul(x, w), x)[1])
    assert [leaf.shape for leaf in kept] == [w.shape]
    kept = jax.tree.leaves(jax.vjp(matmul, x, w)[1])
    assert sorted(leaf.shape for leaf in kept) == [w.shape, x.shape]
