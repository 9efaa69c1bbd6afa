"""The adapted linear layer against float64: values, gradients, dropout, and what it keeps."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.lora_linear import Projection, lora_linear, lora_linears
from pallas_kernels.nf4_linear import dequantize
from pallas_kernels.nf4_linear.cases import random_weight

SCALE = 0.7


def oracle(
    x: jax.Array, w: jax.Array, a: jax.Array, b: jax.Array, dy: jax.Array, keep: np.ndarray | float = 1.0
) -> tuple[np.ndarray, tuple]:
    """Return the output and the gradients of x, a and b; keep multiplies the adapter's input."""
    x, w, a, b, dy = (np.asarray(t, np.float64) for t in (x, w, a, b, dy))
    low = (x * keep) @ a.T
    rows, dlow = dy.reshape(-1, w.shape[0]), SCALE * dy @ b
    da = dlow.reshape(-1, a.shape[0]).T @ (x * keep).reshape(-1, a.shape[1])
    db = SCALE * rows.T @ low.reshape(-1, a.shape[0])
    return x @ w.T + SCALE * low @ b.T, (dy @ w + (dlow @ a) * keep, da, db)


@pytest.mark.parametrize(
    ("leading", "out", "width", "rank"), [((1,), 1, 1, 1), ((2, 65), 127, 33, 4), ((5,), 7, 129, 3)]
)
def test_f32_matches_float64(
    leading: tuple[int, ...], out: int, width: int, rank: int, normal: Callable, out_and_grads: Callable
) -> None:
    x, w, a, b, dy = normal(0, (*leading, width), (out, width), (rank, width), (out, rank), (*leading, out))
    got = out_and_grads(lambda x, a, b: lora_linear(x, w, a, b, SCALE), (x, a, b), dy)
    for ours, exact in zip(jax.tree.leaves(got), jax.tree.leaves(oracle(x, w, a, b, dy)), strict=True):
        # f32 has 24 bits; sums of up to 130 terms whose total can be near 0 while its terms are of size 100
        np.testing.assert_allclose(ours, exact, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("packed", [False, True])
def test_bf16_with_f32_adapters(
    packed: bool, normal: Callable, out_and_grads: Callable, no_worse_than_dense: Callable
) -> None:
    out, width, rank = 65, 129, 8
    x, dy, w = normal(1, (127, width), (127, out), (out, width), dtype=jnp.bfloat16)
    a, b = normal(2, (rank, width), (out, rank))
    w = random_weight(jax.random.key(0), (out, width)) if packed else w
    array = jax.jit(dequantize)(w) if packed else w

    def dense(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        low = (x @ a.astype(x.dtype).T) @ b.astype(x.dtype).T
        return x @ array.T + jnp.bfloat16(SCALE) * low

    got = out_and_grads(lambda x, a, b: lora_linear(x, w, a, b, SCALE), (x, a, b), dy)
    assert [leaf.dtype for leaf in jax.tree.leaves(got)] == [jnp.bfloat16, jnp.bfloat16, jnp.float32, jnp.float32]
    no_worse_than_dense(got, out_and_grads(dense, (x, a, b), dy), oracle(x, array, a, b, dy))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("rows", [3, 600])  # few: products are added; many: operands are joined
@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_layers_of_one_input_are_as_each_alone(rate, rows, packed, normal, out_and_grads) -> None:
    width, outs, ranks, scales = 40, (48, 24, 56, 8), (3, None, 17, 4), (0.7, 1.0, -2.0, 0.1)
    (x,) = normal(9, (rows, width))
    dys = normal(10, *((rows, out) for out in outs))
    ws = normal(11, *((out, width) for out in outs))
    if packed:
        ws = [random_weight(jax.random.key(i), (out, width), "float32") for i, out in enumerate(outs)]
    adapters = [
        None if rank is None else normal(12 + i, (rank, width), (outs[i], rank)) for i, rank in enumerate(ranks)
    ]
    keys = list(jax.random.split(jax.random.key(3), 4)) if rate else None

    def together(x, adapters):
        layers = [
            Projection(w, *(adapter or (None, None)), jnp.float32(scale))
            for w, adapter, scale in zip(ws, adapters, scales, strict=True)
        ]
        return lora_linears(x, layers, dropout_rate=rate, keys=keys)

    def alone(x, adapters):
        return tuple(
            lora_linear(x, w, *adapter, scale, dropout_rate=rate, key=keys and keys[i])
            if adapter
            else x @ (dequantize(w) if packed else w).T
            for i, (w, adapter, scale) in enumerate(zip(ws, adapters, scales, strict=True))
        )

    got, want = (out_and_grads(function, (x, adapters), dys) for function in (together, alone))
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        # f32 sums of up to 600 terms in another order
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=2e-5 * float(jnp.abs(theirs).max()))


def test_layers_without_adapters_are_refused(normal: Callable) -> None:
    x, w = normal(13, (3, 8), (5, 8))
    with pytest.raises(ValueError, match="none of the 1 layers has an adapter"):
        lora_linears(x, [Projection(w, None, None, jnp.float32(1))])


def test_dropout_scales_what_it_keeps_and_repeats_its_mask(normal: Callable, out_and_grads: Callable) -> None:
    width, rate, key = 64, 0.25, jax.random.key(7)
    x, w, dy, b = normal(3, (40, width), (9, width), (40, 9), (9, width))
    call = partial(lora_linear, dropout_rate=rate, key=key)
    # A zero base under identities shows the mask itself.
    shown = jax.jit(call)(jnp.ones((40, width)), jnp.zeros((width, width)), jnp.eye(width), jnp.eye(width), 1.0)
    np.testing.assert_allclose(np.unique(shown), [0, 1 / (1 - rate)], rtol=1e-6)
    dropped = float((np.asarray(shown) == 0).mean())
    assert abs(dropped - rate) < 4 * (rate * (1 - rate) / shown.size) ** 0.5  # four standard deviations
    a = jnp.eye(width)
    got = out_and_grads(lambda x, a, b: call(x, w, a, b, SCALE), (x, a, b), dy)
    for ours, exact in zip(
        jax.tree.leaves(got), jax.tree.leaves(oracle(x, w, a, b, dy, np.asarray(shown))), strict=True
    ):
        np.testing.assert_allclose(ours, exact, rtol=1e-4, atol=1e-3)  # f32 sums of 64 terms, as above


def test_without_a_rate_the_key_does_nothing(normal: Callable) -> None:
    x, w, a, b = normal(4, (3, 8), (5, 8), (2, 8), (5, 2))
    np.testing.assert_array_equal(lora_linear(x, w, a, b, 1.0, key=jax.random.key(0)), lora_linear(x, w, a, b, 1.0))


def test_base_scale_and_key_get_no_gradient(normal: Callable) -> None:
    x, w, a, b = normal(5, (3, 8), (5, 8), (2, 8), (5, 2))

    def total(w: jax.Array, scale: jax.Array) -> jax.Array:
        return lora_linear(x, w, a, b, scale, dropout_rate=0.5, key=jax.random.key(0)).sum()

    dw, dscale = jax.jit(jax.grad(total, (0, 1)))(w, jnp.float32(SCALE))
    assert not dw.any()
    assert not dscale


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_the_backward_pass_keeps_x_the_low_product_and_the_arguments(rate: float, normal: Callable) -> None:
    out, width, rank, rows = 64, 96, 4, 128
    (x,) = normal(6, (rows, width), dtype=jnp.bfloat16)
    a, b = normal(7, (rank, width), (out, rank))
    w = random_weight(jax.random.key(0), (out, width))
    key = jax.random.key(1)
    _, pull_back = jax.vjp(lambda x, a, b: lora_linear(x, w, a, b, SCALE, dropout_rate=rate, key=key), x, a, b)
    kept = sum(
        leaf.nbytes for leaf in jax.tree.leaves(pull_back) if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    )
    arguments = sum(leaf.nbytes for leaf in jax.tree.leaves((w, a, b)))
    assert kept <= x.nbytes + rows * 16 * 2 + arguments + 64  # low padded to 16; the matrix would be 12,288 more


def test_a_scan_over_stacked_layers_trains_the_adapters_alone(normal: Callable) -> None:
    layers, width, rank = 3, 16, 2
    x, a, b = normal(8, (4, width), (layers, rank, width), (layers, width, rank))
    packed = [random_weight(jax.random.key(i), (width, width), "float32") for i in range(layers)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *packed)

    def loss(a: jax.Array, b: jax.Array) -> jax.Array:
        body = jax.checkpoint(lambda h, layer: (lora_linear(h, *layer, SCALE), None))
        return jax.lax.scan(body, x, (stacked, a, b))[0].sum()

    da, db = jax.jit(jax.grad(loss, (0, 1)))(a, b)
    h, inputs = np.asarray(x, np.float64), []
    for i, w in enumerate(packed):
        inputs.append(h)
        h = oracle(h, dequantize(w), a[i], b[i], np.zeros_like(h))[0]
    dy = np.ones_like(h)
    for i in reversed(range(layers)):
        dy, want_da, want_db = oracle(inputs[i], dequantize(packed[i]), a[i], b[i], dy)[1]
        # three layers of f32 sums whose values grow to about 1e4
        np.testing.assert_allclose(da[i], want_da, rtol=1e-3, atol=1e-5 * np.abs(want_da).max())
        np.testing.assert_allclose(db[i], want_db, rtol=1e-3, atol=1e-5 * np.abs(want_db).max())


@pytest.mark.parametrize(
    ("x", "w", "a", "b", "message"),
    [
        ((3, 7), (5, 8), (2, 8), (5, 2), r"width 8 to meet w; got float32\(3, 7\)"),
        ((3, 8), (5, 8), (2, 7), (5, 2), r"a must be \(R, 8\) .* got \(2, 7\) and \(5, 2\)"),
        ((3, 8), (5, 8), (2, 8), (5, 3), r"b \(5, R\) to meet w \(5, 8\); got \(2, 8\) and \(5, 3\)"),
        ((3, 8), (4, 5, 8), (2, 8), (5, 2), r"one layer's \(O, I\) weight; got \(4, 5, 8\)"),
    ],
)
def test_wrong_shapes_are_named(x: tuple, w: tuple, a: tuple, b: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lora_linear(*(jnp.zeros(shape) for shape in (x, w, a, b)), 1.0)


@pytest.mark.parametrize(("dtypes", "message"), [("iff", "got w int8"), ("fii", "got a int8, b int8")])
def test_wrong_dtypes_are_named(dtypes: str, message: str) -> None:
    shapes = ((5, 8), (2, 8), (5, 2))
    arrays = [jnp.zeros(shape, {"i": "int8", "f": "float32"}[kind]) for shape, kind in zip(shapes, dtypes, strict=True)]
    with pytest.raises(ValueError, match=f"lora_linear: w, a and b must be floating-point.*{message}"):
        lora_linear(jnp.zeros((3, 8)), *arrays, 1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout_rate": 1.0, "key": jax.random.key(0)}, r"must be in \[0, 1\), with a key if positive; got 1.0"),
        ({"dropout_rate": 0.1}, "got 0.1 and key=None"),
        ({"scale": np.ones(2)}, r"scale must be a scalar; got shape \(2,\)"),
    ],
)
def test_wrong_options_are_named(options: dict, message: str) -> None:
    arrays = (jnp.zeros(shape) for shape in ((3, 8), (5, 8), (2, 8), (5, 2)))
    with pytest.raises(ValueError, match=message):
        lora_linear(*arrays, **{"scale": 1.0} | options)
