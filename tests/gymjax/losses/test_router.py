"""Router losses against their formulas, and where they differ from the ones in use elsewhere."""

import jax.numpy as jnp
import numpy as np
import pytest

from gymjax.losses.router import expert_fractions, expert_load, load_balancing_loss, router_z_loss
from gymjax.nn.routing import route, router_stats


def stats_of(logits, top_k):
    """Counts and probabilities of every layer of (L, M, E) logits."""
    layers = [
        router_stats(layer, route(layer, top_k, renormalize=True)[0], jnp.ones(len(layer), bool)) for layer in logits
    ]
    return tuple(jnp.stack([getattr(layer, name) for layer in layers]) for name in ("counts", "probs", "z"))


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_balanced_routing_gives_one(top_k):
    """Every expert gets its share of tokens and of probability, whatever top_k is."""
    experts = 4
    logits = jnp.asarray([np.roll([2.0, 1.5, 1.0, 0.0], shift) for shift in range(experts)], jnp.float32)
    counts, probs, _ = stats_of([logits, logits], top_k)
    assert float(load_balancing_loss(expert_fractions(counts), probs, experts)) == pytest.approx(1.0, rel=1e-6)


def test_layers_are_balanced_one_by_one():
    """Two layers that each use one expert alone, but not the same, are both unbalanced."""
    collapsed = jnp.asarray([[[30.0, 0.0]] * 5, [[0.0, 30.0]] * 5])
    counts, probs, _ = stats_of(collapsed, 1)
    assert float(load_balancing_loss(expert_fractions(counts), probs, 5)) == pytest.approx(2.0, rel=1e-6)
    together = load_balancing_loss(expert_fractions(counts.sum(0, keepdims=True)), probs.sum(0, keepdims=True), 10)
    assert float(together) == pytest.approx(1.0, rel=1e-6)  # what pooling the layers first would say


def test_equals_the_formula_in_f64():
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, (3, 20, 5)).astype(np.float32)
    counts, probs, z = stats_of(jnp.asarray(logits), 2)
    exact = np.exp(logits.astype(np.float64))
    p = exact / exact.sum(-1, keepdims=True)
    chosen = np.argsort(-p, axis=-1)[..., :2]
    f = np.stack([np.bincount(layer.ravel(), minlength=5) / (20 * 2) for layer in chosen])
    np.testing.assert_allclose(
        load_balancing_loss(expert_fractions(counts), probs, 20), np.mean(5 * (f * p.mean(1)).sum(-1)), rtol=1e-5
    )  # f32
    np.testing.assert_allclose(router_z_loss(z, 20), np.mean(np.log(exact.sum(-1)) ** 2), rtol=1e-5)


def test_load():
    load = expert_load(jnp.asarray([[5.0, 5.0, 5.0, 5.0], [20.0, 0.0, 0.0, 0.0]]))
    assert {name: float(value) for name, value in load.items()} == {
        "expert_load_max": 4.0,
        "expert_load_min": 0.0,
        "expert_entropy": pytest.approx(0.5),
    }
    assert float(expert_load(jnp.zeros((1, 4)))["expert_load_max"]) == 0  # a batch without tokens
