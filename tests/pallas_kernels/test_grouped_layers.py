"""Layers of experts over one input against float64, through each expert's dense weight."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import GroupedLayer, grouped_layers
from pallas_kernels.lora_linear import LOW_NAME
from pallas_kernels.nf4_linear import NF4Weight, dequantize

SIZES = np.array([5, 0, 7, 1])
E, D, ROWS = len(SIZES), 16, 15  # two rows of no group
SHAPES = {"with": (10, 3), "other rank": (12, 2), "without": (6, 0)}  # out, rank


def random_layers(packed=False):
    """Layers of SHAPES, f32."""
    rng = np.random.default_rng(0)

    def array(*shape):
        return jnp.asarray(rng.normal(0, 1, shape), jnp.float32)

    layers = []
    for out, rank in SHAPES.values():
        w = array(E, out, D)
        if packed:
            codes = jnp.asarray(rng.integers(0, 256, (E, out * D // 2)), jnp.uint8)
            absmax = jnp.asarray(rng.uniform(0.5, 2, (E, -(-out * D // 64))), jnp.float32)
            w = NF4Weight(codes, absmax, None, None, (out, D), dtype="float32")
        adapter = (array(E, rank, D), array(E, out, rank), array(E)) if rank else ()
        layers.append(GroupedLayer(w, *adapter))
    return array(ROWS, D), layers, [array(ROWS, out) for out, _ in SHAPES.values()]


def oracle(x, layers, dys):
    """Results, and gradients of x and of each layer's w, a and b, in f64."""
    wide = [[None if leaf is None else np.asarray(leaf, np.float64) for leaf in layer] for layer in layers]
    x, dys = np.asarray(x, np.float64), [np.asarray(dy, np.float64) for dy in dys]
    ys, dx, gradients = [np.zeros_like(dy) for dy in dys], np.zeros_like(x), []
    for (w, a, b, factor), y, dy in zip(wide, ys, dys, strict=True):
        dw = np.zeros_like(w)
        for e, start in enumerate(np.cumsum(SIZES) - SIZES):
            rows = slice(start, start + SIZES[e])
            whole = w[e] if a is None else w[e] + factor[e] * b[e] @ a[e]
            y[rows] = x[rows] @ whole.T
            dx[rows] += dy[rows] @ whole
            dw[e] = dy[rows].T @ x[rows]
        if a is None:
            gradients.append((dw, None, None))
            continue
        scale = factor[:, None, None]
        gradients.append((dw, scale * b.swapaxes(1, 2) @ dw, scale * dw @ a.swapaxes(1, 2)))
    return ys, dx, gradients


@pytest.mark.parametrize("packed", [False, True])
def test_equals_dense_experts_in_f64(packed):
    x, layers, dys = random_layers(packed)
    sizes = jnp.asarray(SIZES, jnp.int32)

    def run(x, ws, factors):
        chosen = [
            layer._replace(w=layer.w if packed else w, a=a, b=b)
            for layer, w, (a, b) in zip(layers, ws, factors, strict=True)
        ]
        return grouped_layers(x, chosen, sizes)

    ws = [None if packed else layer.w for layer in layers]
    ys, pull_back = jax.vjp(run, x, ws, [(layer.a, layer.b) for layer in layers])
    dx, dws, dfactors = pull_back(tuple(dys))
    dense = [layer._replace(w=dequantize(layer.w)) for layer in layers] if packed else layers
    exact_ys, exact_dx, exact = oracle(x, dense, dys)
    tolerance = {"rtol": 0, "atol": 3e-4}  # f32: products of sums of 16 and of 3 terms of unit size
    for ours, truth in zip((*ys, dx), (*exact_ys, exact_dx), strict=True):
        np.testing.assert_allclose(ours, truth, **tolerance)
    for dw, (da, db), (exact_w, exact_a, exact_b) in zip(dws, dfactors, exact, strict=True):
        for ours, truth in ((dw, exact_w), (da, exact_a), (db, exact_b)):
            if ours is not None:
                np.testing.assert_allclose(ours, truth, **tolerance)
    assert not np.asarray(ys[0])[SIZES.sum() :].any()


def test_low_products_can_be_kept():
    x, layers, _ = random_layers()
    kept = jax.checkpoint_policies.save_only_these_names(LOW_NAME)

    def run(x):
        return sum(jnp.sum(y) for y in grouped_layers(x, layers, jnp.asarray(SIZES, jnp.int32)))

    _, pull_back = jax.vjp(jax.checkpoint(run, policy=kept), x)
    assert (ROWS, 5) in [leaf.shape for leaf in jax.tree.leaves(pull_back)]


def test_shapes_that_do_not_fit_are_refused():
    x, layers, _ = random_layers()
    with pytest.raises(
        ValueError, match=r"grouped_layers: with w of 4 groups, \(10, 16\), .*got .*'group_sizes': \(3,\)"
    ):
        grouped_layers(x, layers, jnp.asarray(SIZES[:3]))
    with pytest.raises(ValueError, match=r"'b': \(4, 10, 3\).*got .*'b': \(4, 12, 2\)"):
        grouped_layers(x, [layers[0]._replace(b=layers[1].b)], jnp.asarray(SIZES))
