"""Experts against the dense sum over all of them, in values and gradients; what is routed, counted and kept."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gymjax.nn.moe import ClampedSwiGLU, MoE, MoEConfig
from gymjax.nn.routing import (
    combine,
    dispatch,
    route,
    router_logits,
    router_stats,
    scatter,
    sort_by_expert,
    weights_of_rows,
)

D = 12
PLAIN = MoEConfig(experts=5, top_k=2, ffn_width=9, renormalize=True)
VARIANTS = {
    "renormalized": PLAIN,
    "not-renormalized": dataclasses.replace(PLAIN, renormalize=False),
    "top-1": dataclasses.replace(PLAIN, top_k=1),
    "all-experts": dataclasses.replace(PLAIN, top_k=5),
    "shared": dataclasses.replace(PLAIN, renormalize=False, shared_ffn_width=7),
    "biases-and-clamp": dataclasses.replace(PLAIN, use_bias=True, activation=ClampedSwiGLU(1.702, 0.8)),
}


def random_moe(cfg, seed=0):
    moe = MoE(D, cfg, dtype=jnp.float32)
    rng = np.random.default_rng(seed)
    nnx.update(moe, jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 0.5, leaf.shape), leaf.dtype), nnx.state(moe)))
    return moe


def tokens(seed=1, shape=(2, 7)):
    return jnp.asarray(np.random.default_rng(seed).normal(0, 1, (*shape, D)), jnp.float32)


def dense(moe, x):
    """Every expert applied to every token, weighted by what the router gives it; experts not chosen get 0."""
    cfg = moe.cfg

    def product(layer, x):
        y = jnp.einsum("eoi,...i->...eo" if x.ndim == 3 else "eoi,...ei->...eo", layer.w.get_value(), x)
        return y if layer.b is None else y + layer.b.get_value()

    probs = jax.nn.softmax(moe.router(x), axis=-1)
    threshold = jnp.sort(probs, axis=-1)[..., -cfg.top_k, None]
    weight = jnp.where(probs >= threshold, probs, 0)
    weight = weight / weight.sum(-1, keepdims=True) if cfg.renormalize else weight
    gate, up = product(moe.gate, x), product(moe.up, x)
    hidden = cfg.activation(gate, up) if cfg.activation else jax.nn.silu(gate) * up
    y = jnp.einsum("...e,...ed->...d", weight, product(moe.down, hidden))
    if moe.shared is not None:
        y = y + jax.nn.sigmoid(moe.shared_gate(x)) * moe.shared(x)
    return y


@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_the_dense_sum(variant):
    graphdef, state = nnx.split(random_moe(VARIANTS[variant]))
    x = tokens()
    dy = tokens(2)

    def run(function):
        def loss(state, x):
            y = function(nnx.merge(graphdef, state), x)
            return jnp.sum(y * dy), y

        return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(state, x)

    ours, theirs = run(lambda moe, x: moe(x)[0]), run(dense)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)  # f32 sums of some dozen terms, in another order


def test_one_token_and_bf16():
    moe = random_moe(PLAIN)
    one = tokens(shape=(1, 1))
    np.testing.assert_allclose(moe(one)[0], dense(moe, one), atol=1e-5)  # as above
    half = MoE(D, PLAIN, dtype=jnp.bfloat16)
    nnx.update(half, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), nnx.state(moe)))
    assert half(tokens().astype(jnp.bfloat16))[0].dtype == jnp.bfloat16


def test_the_backward_pass_keeps_no_sorted_copies():
    """Of arrays with a row for each copy only gate and up may stay."""
    cfg = dataclasses.replace(PLAIN, experts=3, top_k=2, ffn_width=5)
    graphdef, state = nnx.split(random_moe(cfg))
    x = tokens(shape=(4, 16))
    rows = 4 * 16 * cfg.top_k
    _, pull_back = jax.vjp(lambda state, x: nnx.merge(graphdef, state)(x)[0], state, x)
    kept = [leaf for leaf in jax.tree.leaves(pull_back) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    wide = [leaf.shape for leaf in kept if leaf.ndim == 2 and leaf.shape[0] == rows]
    assert sorted(wide) == [(rows, 5), (rows, 5)]


def test_renormalized_is_the_softmax_of_the_chosen():
    logits = jnp.asarray(np.random.default_rng(0).normal(0, 3, (50, 8)), jnp.float32)
    probs = jax.nn.softmax(logits, axis=-1)
    expert, weight = route(logits, 3, renormalize=False)
    np.testing.assert_allclose(weight, jnp.take_along_axis(probs, expert, -1), rtol=1e-5)  # exp and logsumexp in f32
    np.testing.assert_array_equal(expert, jnp.argsort(-logits, axis=-1, stable=True)[:, :3])
    same, normalized = route(logits, 3, renormalize=True)
    np.testing.assert_array_equal(same, expert)
    np.testing.assert_allclose(normalized, weight / weight.sum(-1, keepdims=True), rtol=1e-5)


@pytest.mark.parametrize("renormalize", [False, True])
def test_gradients_of_the_chosen_weights(renormalize):
    """Against what JAX makes of the same formula."""
    rng = np.random.default_rng(1)
    logits, factor = (jnp.asarray(rng.normal(0, 2, shape), jnp.float32) for shape in ((50, 8), (50, 3)))

    def plain(logits):
        probs = jnp.take_along_axis(jax.nn.softmax(logits, axis=-1), jnp.argsort(-logits, axis=-1)[:, :3], -1)
        return jnp.sum(factor * (probs / probs.sum(-1, keepdims=True) if renormalize else probs))

    got = jax.grad(lambda logits: jnp.sum(factor * route(logits, 3, renormalize=renormalize)[1]))(logits)
    np.testing.assert_allclose(got, jax.grad(plain)(logits), atol=1e-6)  # f32; of numbers up to 1, two formulas


def test_ties_go_to_the_lower_expert():
    expert, _ = route(jnp.asarray([[0.0, 2.0, 2.0, 2.0], [1.0, 1.0, 1.0, 1.0]]), 2, renormalize=True)
    np.testing.assert_array_equal(expert, [[1, 2], [0, 1]])


def test_dispatch_sorts_and_drops_nothing():
    expert = jnp.asarray([[2, 0], [0, 3], [2, 3]])
    to = dispatch(expert, 5)
    np.testing.assert_array_equal(to.sizes, [2, 0, 2, 2, 0])
    np.testing.assert_array_equal(to.expert, [0, 0, 2, 2, 3, 3])
    np.testing.assert_array_equal(to.token, [0, 1, 0, 2, 1, 2])
    np.testing.assert_array_equal(to.source // 2, to.token)
    np.testing.assert_array_equal(to.row.reshape(-1)[to.source], np.arange(6))


@pytest.mark.parametrize("k", [1, 3])
def test_moving_rows_has_the_gradients_of_indexing(k):
    rng = np.random.default_rng(k)
    to = dispatch(jnp.asarray(np.stack([rng.permutation(5)[:k] for _ in range(7)])), 5)
    token, copy = np.divmod(np.asarray(to.source), k)
    x, rows = rng.normal(0, 1, (7, 4)), rng.normal(0, 1, (7 * k, 4))
    weight, row = rng.normal(0, 1, (7, k)), rng.normal(0, 1, 7 * k)
    summed, placed = np.zeros((7, 4)), np.zeros((7, k))
    np.add.at(summed, token, rows)
    np.add.at(placed, (token, copy), row)
    cases = ((scatter, x, rows, x[token], summed), (combine, rows, x, summed, x[token]))
    for move, a, da, want, dwant in (*cases, (weights_of_rows, weight, row, weight[token, copy], placed)):
        got, pull = jax.vjp(lambda a, move=move: move(a, to), jnp.asarray(a, jnp.float32))
        np.testing.assert_allclose(got, want, atol=1e-6)  # f32 sums of at most three
        np.testing.assert_allclose(pull(jnp.asarray(da, jnp.float32))[0], dwant, atol=1e-6)


def test_statistics_leave_padding_out():
    logits = jnp.asarray(np.random.default_rng(0).normal(0, 1, (6, 4)), jnp.float32)
    expert, _ = route(logits, 2, renormalize=True)
    counted = jnp.asarray([True, True, False, True, False, True])
    some, real = router_stats(logits, expert, counted), np.flatnonzero(counted)
    every = router_stats(logits[real], expert[real], jnp.ones(4, bool))
    for a, b in zip(jax.tree.leaves(some), jax.tree.leaves(every), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)  # zeros among the summands
    assert some.counts.sum() == 2 * 4
    np.testing.assert_allclose(some.probs.sum(), 4, rtol=1e-6)
    np.testing.assert_allclose(some.z, np.sum(np.log(np.exp(np.asarray(logits)[real]).sum(1)) ** 2), rtol=1e-5)


@pytest.mark.parametrize("experts", [3, 2**30])
def test_experts_are_sorted_whether_or_not_their_places_fit_beside_them(experts):
    expert = np.random.default_rng(0).integers(0, 3, 50).astype(np.int32)
    ordered, order = sort_by_expert(jnp.asarray(expert), experts)
    np.testing.assert_array_equal(order, np.argsort(expert, kind="stable"))
    np.testing.assert_array_equal(ordered, np.sort(expert))


@pytest.mark.parametrize("w_dtype", [jnp.float32, jnp.bfloat16])
def test_router_of_bf16_tokens_is_as_exact_as_f32(w_dtype):
    rng = np.random.default_rng(0)
    x, dy = jnp.asarray(rng.normal(0, 1, (64, 96)), jnp.bfloat16), jnp.asarray(rng.normal(0, 1, (64, 8)), jnp.float32)
    w = jnp.asarray(rng.normal(0, 1, (8, 96)), w_dtype)
    y, pull_back = jax.vjp(jax.jit(router_logits), x, w)
    dx, dw = pull_back(dy)
    exact_x, exact_w, exact_dy = (np.asarray(array, np.float64) for array in (x, w, dy))
    np.testing.assert_allclose(y, exact_x @ exact_w.T, rtol=0, atol=2e-5)  # f32 sums of 96 products of unit size
    assert (dx.dtype, dw.dtype) == (jnp.bfloat16, w_dtype)
    # rounding to 8 bits of dy, w and dx; of dw where it is bf16
    np.testing.assert_allclose(dx.astype(jnp.float32), exact_dy @ exact_w, rtol=0, atol=0.06)
    np.testing.assert_allclose(
        dw.astype(jnp.float32), exact_dy.T @ exact_x, rtol=0, atol=2e-5 if w_dtype == jnp.float32 else 0.1
    )
