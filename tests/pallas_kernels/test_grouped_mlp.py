"""Gated blocks of experts over one input against float64, through each expert's dense weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import GroupedLayer, grouped_mlp, reference
from pallas_kernels.lora_linear import LOW_NAME

SIZES = np.array([5, 0, 7, 1])
E, D, F, ROWS = len(SIZES), 16, 12, 15  # two rows of no group
RANKS = {"all": (3, 2, 4), "gate's and down's": (3, 0, 4), "none": (0, 0, 0)}


def random_block(ranks):
    """x, the three layers, weight and the result's gradient, f32."""
    rng = np.random.default_rng(0)

    def array(*shape):
        return jnp.asarray(rng.normal(0, 1, shape), jnp.float32)

    layers = []
    for (out, width), rank in zip(((F, D), (F, D), (D, F)), ranks, strict=True):
        adapter = (array(E, rank, width), array(E, out, rank), array(E)) if rank else ()
        layers.append(GroupedLayer(array(E, out, width) * 0.3, *adapter))
    return array(ROWS, D), layers, array(ROWS), array(ROWS, D)


def oracle(x, layers, weight, dy):
    """The result, and gradients of x, of weight and of each layer's w, a and b, in f64."""
    wide = [[None if leaf is None else np.asarray(leaf, np.float64) for leaf in layer] for layer in layers]
    x, weight, dy = (np.asarray(array, np.float64) for array in (x, weight, dy))
    y, dx, dweight = np.zeros_like(dy), np.zeros_like(x), np.zeros_like(weight)
    dws = [np.zeros_like(w) for w, *_ in wide]
    for e, start in enumerate(np.cumsum(SIZES) - SIZES):
        rows = slice(start, start + SIZES[e])
        gate_w, up_w, down_w = (w[e] if a is None else w[e] + f[e] * b[e] @ a[e] for w, a, b, f in wide)
        gate, up, scale = x[rows] @ gate_w.T, x[rows] @ up_w.T, weight[rows, None]
        sigmoid = 1 / (1 + np.exp(-gate))
        hidden = gate * sigmoid * up
        y[rows] = (hidden * scale) @ down_w.T
        d = dy[rows] @ down_w
        dweight[rows] = np.sum(d * hidden, axis=1)
        d = d * scale
        dgate, dup = d * up * sigmoid * (1 + gate * (1 - sigmoid)), d * gate * sigmoid
        dx[rows] = dgate @ gate_w + dup @ up_w
        for dw, over, below in zip(dws, (dgate, dup, dy[rows]), (x[rows], x[rows], hidden * scale), strict=True):
            dw[e] = over.T @ below
    gradients = []
    for dw, (_, a, b, factor) in zip(dws, wide, strict=True):
        scale = None if factor is None else factor[:, None, None]
        more = (None, None) if a is None else (scale * b.swapaxes(1, 2) @ dw, scale * dw @ a.swapaxes(1, 2))
        gradients.append((dw, *more))
    return y, dx, dweight, gradients


class OnePass:
    """A pass for a low product and a factor's gradient in plain jnp, as kernels have it."""

    def fits(self, x, rank):
        return True

    def __call__(self, x, b, low, sizes):
        expert = jnp.repeat(jnp.arange(E), SIZES, total_repeat_length=SIZES.sum())
        x, low = x[: len(expert)], low[: len(expert)]
        product = jnp.einsum("mn,mnr->mr", x, b[expert], precision="highest")
        each = jnp.einsum("mn,mr->mnr", x, low, precision="highest")
        return jnp.pad(product, ((0, ROWS - len(x)), (0, 0))), jnp.zeros(b.shape).at[expert].add(each)


@pytest.mark.parametrize("narrow", [None, OnePass()], ids=["apart", "one pass"])
@pytest.mark.parametrize("ranks", RANKS)
def test_equals_dense_experts_in_f64(ranks, narrow, monkeypatch):
    monkeypatch.setattr(reference, "narrow", narrow)
    x, layers, weight, dy = random_block(RANKS[ranks])
    sizes = jnp.asarray(SIZES, jnp.int32)

    def run(x, weight, parts):
        return grouped_mlp(
            x, *(layer._replace(w=w, a=a, b=b) for layer, (w, a, b) in zip(layers, parts, strict=True)), weight, sizes
        )

    y, pull_back = jax.vjp(run, x, weight, [(layer.w, layer.a, layer.b) for layer in layers])
    dx, dweight, parts = pull_back(dy)
    exact_y, exact_dx, exact_dweight, exact = oracle(x, layers, weight, dy)
    for ours, truth in ((y, exact_y), (dx, exact_dx), (dweight, exact_dweight)):
        np.testing.assert_allclose(ours, truth, rtol=0, atol=1e-5 * np.abs(truth).max())  # f32, three products deep
    for gradient, truths in zip(parts, exact, strict=True):
        for ours, truth in zip(gradient, truths, strict=True):
            assert (ours is None) == (truth is None)
            if truth is not None:
                np.testing.assert_allclose(ours, truth, rtol=0, atol=1e-5 * np.abs(truth).max())
    assert not np.asarray(y)[SIZES.sum() :].any()


def test_what_is_kept():
    x, layers, weight, _ = random_block(RANKS["all"])
    policy = jax.checkpoint_policies.save_only_these_names("gate", "up", LOW_NAME)
    run = jax.checkpoint(lambda x: jnp.sum(grouped_mlp(x, *layers, weight, jnp.asarray(SIZES))), policy=policy)
    kept = [leaf.shape for leaf in jax.tree.leaves(jax.vjp(run, x)[1])]
    assert [kept.count(shape) for shape in ((ROWS, F), (ROWS, 5), (ROWS, 4))] == [2, 1, 1]


def test_shapes_that_do_not_fit_are_refused():
    x, (gate, up, down), weight, _ = random_block(RANKS["none"])
    sizes = jnp.asarray(SIZES)
    with pytest.raises(ValueError, match=r"weight \(15,\); got 12, 12 and \(14,\)"):
        grouped_mlp(x, gate, up, down, weight[1:], sizes)
    with pytest.raises(ValueError, match=r"'x': \(15, 16\).*got .*'x': \(15, 12\)"):
        grouped_mlp(x, gate, up, gate, weight, sizes)


@pytest.mark.parametrize("rank", [0, 8, 16])
def test_the_kernels_of_the_gpu_lower(rank, monkeypatch):
    """In a layer of which gate, up and low products are kept, so that no product is made again."""
    monkeypatch.setattr("pallas_kernels._platform.compute_capability", lambda: (9, 0))
    rows, groups, width, out = 1024, 8, 512, 256

    def layer_of(high, wide):
        w = jax.ShapeDtypeStruct((groups, high, wide), jnp.bfloat16)
        if not rank:
            return GroupedLayer(w)
        factors = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((groups, rank, wide), (groups, high, rank)))
        return GroupedLayer(w, *factors, jax.ShapeDtypeStruct((groups,), jnp.float32))

    layers = [layer_of(out, width), layer_of(out, width), layer_of(width, out)]
    policy = jax.checkpoint_policies.save_only_these_names("gate", "up", LOW_NAME)

    @functools.partial(jax.checkpoint, policy=policy)
    def loss(x, adapters, weight, ws, sizes):
        whole = [GroupedLayer(w, *adapter) for w, adapter in zip(ws, adapters, strict=True)]
        return jnp.sum(grouped_mlp(x, *whole, weight, sizes, implementation="mosaic_gpu").astype(jnp.float32) ** 2)

    x, weight = jax.ShapeDtypeStruct((rows, width), jnp.bfloat16), jax.ShapeDtypeStruct((rows,), jnp.float32)
    args = x, [layer[1:] for layer in layers], weight, [layer.w for layer in layers]
    gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    traced = gradients.trace(*args, jax.ShapeDtypeStruct((groups,), jnp.int32))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    # gated, down, their gradients; with adapters two low products, two passes of three, as gate's is up's, and both
    # gradients of down-projections
    assert text.count("@mosaic_gpu_v2") == (4 if not rank else 10)
