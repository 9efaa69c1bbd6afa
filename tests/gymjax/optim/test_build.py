"""Schedules against their definitions, optimizers by label."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gymjax.adapters.lora import LoraSpec, attach
from gymjax.adapters.select import train_all, train_modules
from gymjax.config import OptimConfig
from gymjax.optim.build import build, schedule, warmup_steps
from gymjax.optim.labels import Trained, labels


def by_definition(kind, step, total, warmup, floor):
    if step < warmup:
        return step / warmup
    p = (step - warmup) / (total - warmup)
    shape = {"constant": 1.0, "linear": 1 - p, "cosine": (1 + math.cos(math.pi * p)) / 2}[kind]
    return shape if kind == "constant" else floor + (1 - floor) * shape


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
@pytest.mark.parametrize(("warmup", "floor"), [(0, 0.0), (3, 0.0), (3, 0.1)])
def test_schedules(kind, warmup, floor):
    optim = OptimConfig(learning_rate=2e-4, lr_scheduler_type=kind, warmup_steps=warmup, min_lr_ratio=floor)
    rate = schedule(optim, 10)
    got = [float(rate(jnp.int32(step))) for step in range(10)]
    expected = [2e-4 * by_definition(kind, step, 10, warmup, floor) for step in range(10)]
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-12)  # f32


def test_warmup_ratio_rounds_up():
    assert warmup_steps(OptimConfig(warmup_ratio=0.1), 25) == 3
    assert warmup_steps(OptimConfig(warmup_ratio=0.1), 30) == 3
    assert warmup_steps(OptimConfig(warmup_steps=7), 30) == 7


def adapted(make_model):
    model = make_model()
    attach(model, LoraSpec(rank=4, alpha=8), key=jax.random.key(0))
    train_modules(model, ["norm", "embed_tokens"], key="x")
    return nnx.split(model, Trained, ...)[1]


def test_labels_come_from_types(make_model):
    found = set(jax.tree.leaves(labels(adapted(make_model))))
    assert found == {"lora_a", "lora_b", "base", "base/no_decay"}


def first_update(params, grad=1.0, **keys):
    optim = OptimConfig(lr_scheduler_type="constant", **keys)
    optimizer = build(optim, 10, params, lora_plus_ratio=keys.pop("ratio", None))
    grads = jax.tree.map(lambda p: jnp.full_like(p, grad), params)
    return optimizer.update(grads, optimizer.init(params), params)[0]


def test_lora_plus_scales_b_alone(make_model):
    params = adapted(make_model)
    optim = OptimConfig(learning_rate=1e-3, lr_scheduler_type="constant")
    optimizer = build(optim, 10, params, lora_plus_ratio=16.0)
    grads = jax.tree.map(jnp.ones_like, params)
    updates = optimizer.update(grads, optimizer.init(params), params)[0]
    for path, update in nnx.to_flat_state(updates):
        expected = -16e-3 if path[-1] == "b" else -1e-3  # Adam's first step is the learning rate
        np.testing.assert_allclose(update.get_value(), expected, rtol=1e-4)


def test_decay_spares_norms_and_biases(make_model):
    model = make_model(qkv_bias=True)
    train_all(model)
    params = nnx.split(model, Trained, ...)[1]
    updates = first_update(params, grad=0.0, learning_rate=1.0, weight_decay=0.1)
    for (path, update), (_, value) in zip(nnx.to_flat_state(updates), nnx.to_flat_state(params), strict=True):
        expected = np.zeros(value.get_value().shape) if path[-1] in ("scale", "b") else -0.1 * value.get_value()
        np.testing.assert_allclose(update.get_value(), expected, atol=1e-6)


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "adafactor", "lion", "sgd", "muon"])
def test_every_optimizer_descends(make_model, name):
    params = adapted(make_model)
    updates = first_update(params, learning_rate=1e-3, optim=name)
    for update in jax.tree.leaves(updates):
        assert np.isfinite(update).all()
        assert float(jnp.sum(update)) < 0


def test_muon_orthogonalises_each_layers_matrix(make_model):
    params = adapted(make_model)
    optim = OptimConfig(learning_rate=1.0, lr_scheduler_type="constant", optim="muon")
    optimizer = build(optim, 10, params)
    grads = jax.tree.map(lambda p: jax.random.normal(jax.random.key(0), p.shape), params)
    updates = optimizer.update(grads, optimizer.init(params), params)[0]
    flat = dict(nnx.to_flat_state(updates))
    a_LRI = flat[("stacks", 0, 0, "attn", "q", "adapter", "a")].get_value()
    singular = np.linalg.svd(np.asarray(a_LRI), compute_uv=False)
    # Five Newton-Schulz steps bring singular values near 1 (0.7 to 1.2), times sqrt(max(1, rows / columns)).
    assert singular.min() > 0.5
    assert singular.max() < 1.5
