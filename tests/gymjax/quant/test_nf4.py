import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from gymjax.quant import from_bitsandbytes, quantize, to_bitsandbytes
from pallas_kernels.nf4_linear import DYNAMIC_CODE, NF4_CODE, dequantize


def normal(shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def nearest_codes(w):
    """Slow oracle: nearest NF4 value of every element over its block's largest magnitude, in f64."""
    flat = w.astype(np.float64).reshape(-1)
    codes = []
    for start in range(0, flat.size, 64):
        block = flat[start : start + 64]
        codes.append(np.abs(block[:, None] / np.abs(block).max() - NF4_CODE.astype(np.float64)).argmin(1))
    return np.concatenate(codes)


def unpack(q):
    both = np.stack([q.codes >> 4, q.codes & 15], axis=-1).reshape(-1)
    return both[: q.shape[0] * q.shape[1]]


@pytest.mark.parametrize("shape", [(4, 64), (3, 7), (5, 100), (130, 33)])
def test_codes_are_the_nearest(shape):
    w = normal(shape)
    np.testing.assert_array_equal(unpack(quantize(w)), nearest_codes(w))


def test_mean_error_of_normal_weights():
    w = normal((1024, 1024))
    error = np.abs(np.asarray(dequantize(quantize(w, double_quant=False, dtype="float32"))) - w).mean()
    assert abs(error - 0.0728) < 0.0001  # published by bitsandbytes for blocks of 64; 2^20 samples scatter by 2e-5


def test_double_quantization_costs_little():
    w = normal((1024, 1024))
    q = quantize(w, dtype="float32")
    error = np.abs(np.asarray(dequantize(q)) - w).mean()
    assert 0.0728 < error < 0.0730  # published: 0.07288
    bits = 8 * sum(part.nbytes for part in (q.codes, q.absmax, q.nested_absmax, q.offset)) / w.size
    assert bits == pytest.approx(4.127, abs=1e-3)


def test_16_bit_input_is_quantized_as_its_f32_values():
    w = normal((33, 65)).astype(ml_dtypes.bfloat16)
    a, b = quantize(w), quantize(w.astype(np.float32))
    for field in ("codes", "absmax", "nested_absmax", "offset"):
        np.testing.assert_array_equal(getattr(a, field), getattr(b, field))


def test_values_on_a_midpoint_take_the_lower_code():
    midpoints = (NF4_CODE[1:] + NF4_CODE[:-1]) / np.float32(2)
    w = np.concatenate([[np.float32(1)], midpoints, np.nextafter(midpoints, np.float32(2))])
    codes = unpack(quantize(w.reshape(1, -1).astype(np.float32)))
    np.testing.assert_array_equal(codes[1:16], np.arange(15))
    np.testing.assert_array_equal(codes[16:], np.arange(1, 16))


def test_zero_blocks_stay_zero():
    w = normal((4, 64))
    w[1:3] = 0
    q = quantize(w, double_quant=False, dtype="float32")
    assert not np.asarray(dequantize(q))[1:3].any()


@pytest.mark.parametrize("double_quant", [True, False])
def test_bitsandbytes_entries_round_trip(double_quant):
    q = quantize(normal((5, 100)), double_quant=double_quant, dtype="bfloat16")
    tensors = to_bitsandbytes(q, "x.weight")
    assert tensors["x.weight"].shape == (250, 1)
    state = json.loads(tensors["x.weight.quant_state.bitsandbytes__nf4"].tobytes())
    assert state["shape"] == [5, 100]
    assert state["dtype"] == "bfloat16"
    assert ("x.weight.nested_absmax" in tensors) == double_quant
    again = from_bitsandbytes(tensors, "x.weight")
    assert (again.shape, again.dtype, again.block_size) == (q.shape, q.dtype, q.block_size)
    np.testing.assert_array_equal(dequantize(again), dequantize(q))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_bad_weights_that_are_not_finite(bad):
    w = normal((4, 100))
    w[2, 99] = bad
    with pytest.raises(ValueError, match=r"w must be finite.*element 299"):
        quantize(w)


@pytest.mark.parametrize("shape", [(3,), (2, 3, 4), (0, 4)])
def test_bad_weights_that_are_no_matrix(shape):
    with pytest.raises(ValueError, match=r"must have two axes"):
        quantize(np.zeros(shape, np.float32))


def entries(**changes):
    tensors = to_bitsandbytes(quantize(normal((4, 64))), "x.weight")
    key = "x.weight.quant_state.bitsandbytes__nf4"
    state = json.loads(tensors[key].tobytes()) | changes
    return tensors | {key: np.frombuffer(json.dumps(state).encode(), np.uint8)}


def test_bad_packed_weight_without_its_scales():
    tensors = entries()
    del tensors["x.weight.absmax"], tensors["x.weight.nested_quant_map"]
    with pytest.raises(ValueError, match=r"lacks x.weight.absmax, x.weight.nested_quant_map"):
        from_bitsandbytes(tensors, "x.weight")
    with pytest.raises(ValueError, match=r"no quantization state"):
        from_bitsandbytes({"x.weight": tensors["x.weight"]}, "x.weight")
    state = "x.weight.quant_state.bitsandbytes__nf4"
    for text in (b"{", b"[]", b'{"shape": [8]}', entries()[state].tobytes().replace(b"dtype", b"d-ype")):
        with pytest.raises(ValueError, match=f"{state} is no quantization state: the checkpoint is damaged"):
            from_bitsandbytes(entries() | {state: np.frombuffer(text, np.uint8)}, "x.weight")


def test_bad_packed_weight_of_another_format():
    with pytest.raises(ValueError, match=r"blocks of 128"):
        from_bitsandbytes(entries(blocksize=128), "x.weight")
    with pytest.raises(ValueError, match=r"needs 256 bytes of codes and 8 block scales.*holds 128 and 4"):
        from_bitsandbytes(entries(shape=[8, 64]), "x.weight")
    with pytest.raises(ValueError, match=r"not the table of NF4"):
        from_bitsandbytes(entries() | {"x.weight.quant_map": NF4_CODE[::-1]}, "x.weight")
    with pytest.raises(ValueError, match=r"packed in FP4"):
        from_bitsandbytes({"x.weight.quant_state.bitsandbytes__fp4": np.zeros(1, np.uint8)}, "x.weight")


def test_dynamic_map_has_the_published_ends():
    assert DYNAMIC_CODE.size == 256
    assert DYNAMIC_CODE[-1] == 1.0
    assert DYNAMIC_CODE[0] == pytest.approx(-0.99297, abs=1e-5)
    assert jnp.asarray(DYNAMIC_CODE).dtype == jnp.float32
