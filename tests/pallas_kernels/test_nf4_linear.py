"""The NF4 weight and its linear layer against numpy float32 and float64."""

import hashlib
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pallas_kernels.nf4_linear import DYNAMIC_CODE, NF4_CODE, NF4Weight, dequantize, nf4_linear
from pallas_kernels.nf4_linear.cases import random_weight

SHAPES = [(16, 32), (7, 9), (1, 1), (129, 127), (3, 64), (130, 130)]  # odd sizes; blocks across rows; two nested blocks


def make_weight(shape: tuple[int, int], *, double_quant: bool = True, block_size: int = 64) -> NF4Weight:
    rng = np.random.default_rng(shape[0])
    size = math.prod(shape)
    blocks = -(-size // block_size)
    codes = rng.integers(0, 256, -(-size // 2), dtype=np.uint8)
    if not double_quant:
        absmax = rng.uniform(0.5, 2, blocks).astype(np.float32)
        return NF4Weight(codes, absmax, None, None, shape, block_size, "float32")
    absmax = rng.integers(0, 256, blocks, dtype=np.uint8)
    nested = rng.uniform(0.1, 0.3, -(-blocks // 256)).astype(np.float32)
    return NF4Weight(codes, absmax, nested, np.float32(1.2345678), shape, block_size, "float32")


def oracle(w: NF4Weight) -> np.ndarray:
    """Decode one element after another, in f32 with a rounding after each operation."""
    out = np.empty(math.prod(w.shape), np.float32)
    for i in range(out.size):
        byte = int(w.codes[i // 2])
        code = byte // 16 if i % 2 == 0 else byte % 16
        block = i // w.block_size
        absmax = w.absmax[block]
        if w.nested_absmax is not None:
            absmax = np.float32(DYNAMIC_CODE[absmax] * w.nested_absmax[block // 256]) + np.float32(w.offset)
        out[i] = NF4_CODE[code] * np.float32(absmax)
    return out.reshape(w.shape)


@pytest.mark.parametrize("double_quant", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_dequantize_is_exact(shape: tuple[int, int], double_quant: bool) -> None:
    w = make_weight(shape, double_quant=double_quant)
    want = oracle(w)
    np.testing.assert_array_equal(jax.jit(dequantize)(w), want)  # bit for bit: no tolerance
    for dtype in (jnp.bfloat16, jnp.float16):
        got = jax.jit(dequantize, static_argnums=1)(w, dtype)
        np.testing.assert_array_equal(got, want.astype(dtype))  # one rounding from f32


def test_dequantize_takes_other_block_sizes_and_its_own_dtype() -> None:
    w = make_weight((9, 21), double_quant=False, block_size=32)
    np.testing.assert_array_equal(dequantize(w), oracle(w))
    assert dequantize(replace(w, dtype="bfloat16")).dtype == jnp.bfloat16


def test_high_nibble_is_the_first_element() -> None:
    w = NF4Weight(np.array([0x0F], np.uint8), np.array([3.0], np.float32), None, None, (1, 2), 64, "float32")
    np.testing.assert_array_equal(dequantize(w), [[-3.0, 3.0]])


def test_codes_are_the_published_tables() -> None:
    assert NF4_CODE.dtype == DYNAMIC_CODE.dtype == np.float32
    assert (np.diff(NF4_CODE) > 0).all()
    assert (np.diff(DYNAMIC_CODE) > 0).all()
    assert DYNAMIC_CODE.shape == (256,)
    # SHA-256 of the bytes of the nested_quant_map that bitsandbytes 0.50.2 writes
    digest = "e732639a65f497b4ad684bb166a4467708255edd5207757de8b8f0c7e1fda89c"
    assert hashlib.sha256(DYNAMIC_CODE.tobytes()).hexdigest() == digest


@pytest.mark.parametrize("shape", [(16, 32), (7, 9), (129, 127)])
def test_linear_matches_float64(shape: tuple[int, int], normal: Callable, out_and_grads: Callable) -> None:
    w = make_weight(shape)
    x, dy = normal(1, (2, 3, shape[1]), (2, 3, shape[0]))
    y, (dx,) = out_and_grads(lambda x: nf4_linear(x, w), (x,), dy)
    dense = oracle(w).astype(np.float64)
    # f32 sums of up to 129 products of size 1 to 10
    np.testing.assert_allclose(y, np.asarray(x, np.float64) @ dense.T, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(dx, np.asarray(dy, np.float64) @ dense, rtol=1e-4, atol=1e-4)


def test_bf16_is_as_exact_as_dense_bf16(
    normal: Callable, out_and_grads: Callable, no_worse_than_dense: Callable
) -> None:
    w = make_weight((129, 127))
    x, dy = normal(2, (65, 127), (65, 129), dtype=jnp.bfloat16)
    dense = jnp.asarray(oracle(w), jnp.bfloat16)
    truth = oracle(w).astype(np.float64)
    exact = np.asarray(x, np.float64) @ truth.T, (np.asarray(dy, np.float64) @ truth,)
    got = out_and_grads(lambda x: nf4_linear(x, w), (x,), dy)
    assert [leaf.dtype for leaf in jax.tree.leaves(got)] == [jnp.bfloat16, jnp.bfloat16]
    no_worse_than_dense(got, out_and_grads(lambda x: x @ dense.T, (x,), dy), exact)


def test_the_backward_pass_keeps_the_packed_weight_only() -> None:
    w = jax.tree.map(jnp.asarray, make_weight((64, 96)))
    x = jnp.ones((256, 96), jnp.bfloat16)
    _, pull_back = jax.vjp(nf4_linear, x, w)
    kept = sum(leaf.nbytes for leaf in jax.tree.leaves(pull_back))
    assert kept == sum(leaf.nbytes for leaf in jax.tree.leaves(w))  # 64 * 96 / 2 and scales: not x, not the matrix


def test_the_weight_is_a_pytree_everywhere() -> None:
    w = jax.tree.map(jnp.asarray, make_weight((16, 32)))
    assert jax.tree.map(lambda leaf: leaf, w).shape == (16, 32)
    object_leaves = jax.tree.map(lambda leaf: object(), w)
    assert isinstance(object_leaves, NF4Weight)
    abstract = jax.eval_shape(lambda w: w, w)
    assert jax.eval_shape(partial(dequantize, dtype=jnp.bfloat16), abstract) == jax.ShapeDtypeStruct(
        (16, 32), jnp.bfloat16
    )
    param = nnx.Param(w)
    graph, state = nnx.split(nnx.Dict(w=param))
    assert isinstance(nnx.merge(graph, state)["w"].get_value(), NF4Weight)
    placed = jax.device_put(w, jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    np.testing.assert_array_equal(dequantize(placed), dequantize(w))
    no_nesting = make_weight((16, 32), double_quant=False)
    assert len(jax.tree.leaves(no_nesting)) == 2


def test_stacked_layers_scan_and_dequantize_at_once(normal: Callable) -> None:
    layers = [make_weight((24, 24)), replace(make_weight((24, 24)), codes=np.arange(288, dtype=np.uint8))]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    np.testing.assert_array_equal(dequantize(stacked), np.stack([dequantize(w) for w in layers]))
    (x,) = normal(3, (5, 24))

    def run(x: jax.Array) -> jax.Array:
        return jax.lax.scan(jax.checkpoint(lambda h, w: (nf4_linear(h, w), None)), x, stacked)[0]

    out, pull_back = jax.vjp(jax.jit(run), x)
    first, second = (oracle(w).astype(np.float64) for w in layers)
    # two f32 products of 24 terms of size 1
    np.testing.assert_allclose(out, np.asarray(x) @ first.T @ second.T, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(pull_back(out)[0], np.asarray(out) @ second @ first, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"codes": np.zeros(31, np.uint8)}, r"codes must be uint8\(32,\); got uint8\(31,\)"),
        ({"codes": np.zeros(32, np.int8)}, r"codes must be uint8\(32,\); got int8\(32,\)"),
        ({"absmax": np.zeros(1, np.float32)}, r"absmax must be uint8\(1,\); got float32\(1,\)"),
        ({"nested_absmax": np.zeros(2, np.float32)}, r"nested_absmax must be float32\(1,\); got float32\(2,\)"),
        ({"nested_absmax": None}, r"absmax must be float32\(1,\); got uint8\(1,\)"),
        ({"offset": None}, r"offset must be float32\(\); got None"),
        ({"block_size": 63}, "block_size must be even .* got 63"),
        ({"dtype": "int8"}, "dtype one of .* got 64 and 'int8'"),
    ],
)
def test_arrays_that_do_not_fit_are_named(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dequantize(replace(make_weight((8, 8)), **change))


def test_wrong_inputs_are_named() -> None:
    w = random_weight(jax.random.key(0), (8, 6))
    with pytest.raises(ValueError, match=r"width 6 to meet w \(8, 6\); got float32\(2, 8\)"):
        nf4_linear(jnp.zeros((2, 8)), w)
    with pytest.raises(ValueError, match=r"one layer's weight; its codes have leading axes: \(3, 24\)"):
        nf4_linear(jnp.zeros((2, 6)), jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), w))
