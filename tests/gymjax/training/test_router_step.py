"""Router losses in a step: exact over the global batch however it is cut, without padding; every way of training."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from gymjax.adapters.lora import LoraSpec, attach
from gymjax.adapters.select import train_all, train_layers
from gymjax.losses.router import expert_fractions, load_balancing_loss, router_z_loss
from gymjax.models.decoder_config import LayerKind, Stack
from gymjax.models.names import linears
from gymjax.nn.moe import ExpertLinear, MoEConfig
from gymjax.nn.routing import RouterStats
from gymjax.quant import nf4
from gymjax.training.logs import ROUTER_KEYS
from gymjax.training.router import router_loss
from gymjax.training.step import StepSettings, batch_loss, init_state, make_step, split_model

MOE = MoEConfig(experts=4, top_k=2, ffn_width=12, renormalize=True)
STACKS = (Stack((LayerKind(experts=MOE),), 2),)
MIXED = (Stack((LayerKind(), LayerKind(experts=MOE)), 2),)
PLAIN = StepSettings(seed=0, max_grad_norm=0.0)
SETTINGS = dataclasses.replace(PLAIN, moe_aux_loss_coef=2.0, router_z_loss_coef=0.1)


def stepper(model, settings):
    """A function from a batch to (metrics, gradients)."""
    graphdef, params, frozen = split_model(model)
    optimizer = optax.sgd(1.0)
    step = jax.jit(make_step(graphdef, optimizer, settings))

    def run(batch):
        new, metrics = step(init_state(params, optimizer, None), frozen, batch)
        return metrics, jax.tree.map(lambda old, new: np.asarray(old) - np.asarray(new), params, new.params)

    return run


def full(make_model, stacks=STACKS):
    model = make_model(stacks=stacks)
    train_all(model)
    return model


def largest(tree):
    return max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(tree))


def largest_difference(a, b):
    return largest(jax.tree.map(lambda x, y: np.asarray(x) - np.asarray(y), a, b))


@pytest.fixture(scope="module")
def step(make_model):
    """Full fine-tuning of experts in every layer, with both losses."""
    return stepper(full(make_model), SETTINGS)


@pytest.fixture(scope="module")
def whole(step, random_batch):
    """Six rows as one microbatch."""
    return step(random_batch(1, 6))


def test_accumulation_never_changes_the_update(step, whole, random_batch):
    metrics, grads = whole
    cut, cut_grads = step(random_batch(3, 2))
    for key in ("loss", *ROUTER_KEYS):
        assert float(cut[key]) == pytest.approx(float(metrics[key]), rel=1e-5), key  # f32 sums in another order
    assert largest_difference(grads, cut_grads) < 1e-5 * largest(grads)


def test_losses_are_those_of_the_whole_batch(whole, make_model, random_batch):
    """The step's gradient is that of the formulas over all rows at once."""
    rows = jax.tree.map(lambda leaf: leaf[0], random_batch(1, 6))
    graphdef, params, frozen = split_model(full(make_model))

    def loss(params):
        nll, stats = batch_loss(nnx.merge(graphdef, params, frozen), rows, PLAIN, jax.random.key(0))
        tokens = jnp.sum(rows["segment_ids"] != 0)
        balance = load_balancing_loss(expert_fractions(stats.counts), stats.probs, tokens)
        routers = 2.0 * balance + 0.1 * router_z_loss(stats.z, tokens)
        return nll / jnp.sum(rows["loss_weights"]) + routers, routers

    exact, routers = jax.jit(jax.grad(loss, has_aux=True))(params)
    metrics, grads = whole
    assert largest_difference(grads, exact) < 1e-5 * largest(exact)  # f32 sums in another order
    logged = 2.0 * metrics["moe_aux_loss"] + 0.1 * metrics["router_z_loss"]
    assert float(logged) == pytest.approx(float(routers), rel=1e-5)
    assert float(routers) > 1  # beside a loss of some nats: it counts


def test_padding_is_not_counted(step, whole, random_batch):
    batch = random_batch(1, 6)
    other = batch | {"tokens": jnp.where(batch["segment_ids"] == 0, 7, batch["tokens"])}
    assert (other["tokens"] != batch["tokens"]).any()
    metrics, grads = whole
    padded, padded_grads = step(other)
    assert [float(padded[key]) for key in ROUTER_KEYS] == [float(metrics[key]) for key in ROUTER_KEYS]
    assert largest_difference(grads, padded_grads) < 1e-6 * largest(grads)  # f32: rows of experts change places
    assert 1 <= float(metrics["expert_load_max"]) <= 4 / 2
    assert 0 < float(metrics["expert_entropy"]) <= 1
    assert float(metrics["expert_dropped"]) == 0


def test_a_loss_without_a_coefficient_is_not_computed():
    stats = RouterStats(counts=jnp.ones((2, 4)), probs=jnp.full((2, 4), jnp.nan), z=jnp.full(2, jnp.nan))
    options = {"stats": stats, "counts_LE": stats.counts, "tokens": jnp.float32(8)}
    assert router_loss(**options, balance=0.0, z=0.0) == 0
    assert jnp.isnan(router_loss(**options, balance=1.0, z=0.0))
    assert jnp.isnan(router_loss(**options, balance=0.0, z=1.0))


def test_a_dense_model_has_no_routers(make_model, random_batch):
    metrics, _ = stepper(full(make_model, (Stack((LayerKind(),), 1),)), PLAIN)(random_batch(1, 2))
    assert not set(ROUTER_KEYS) & set(metrics)


def packed(make_model):
    model = make_model(stacks=STACKS)
    for layer, names in linears(model):
        if isinstance(layer, ExpertLinear):
            w = layer.w.get_value()
            rows = [nf4.quantize(np.asarray(w[index]), dtype="float32") for index in names]
            stack = lambda *leaves, w=w: jnp.stack(leaves).reshape(*w.shape[:2], *leaves[0].shape)  # noqa: E731
            layer.w = nnx.Param(jax.tree.map(stack, *rows))
    return model


@pytest.mark.parametrize("base", ["dense", "nf4"])
def test_adapters_train_over_every_base(base, make_model, random_batch):
    """Every adapter moves, and rematerialisation changes nothing."""
    model = make_model(stacks=STACKS) if base == "dense" else packed(make_model)
    attach(model, LoraSpec(rank=2, alpha=4), key=jax.random.key(0))
    metrics, grads = stepper(model, SETTINGS)(random_batch(1, 4))
    assert jnp.isfinite(metrics["loss"])
    for remat in ("full", "selective", "offload") if base == "nf4" else ():
        _, again = stepper(model, dataclasses.replace(SETTINGS, remat=remat))(random_batch(1, 4))
        assert largest_difference(grads, again) < 1e-5  # the same products, made again
    moved = [bool(np.abs(leaf).max() > 0) for leaf in jax.tree.leaves(grads)]
    assert sum(moved) * 2 == len(moved)  # b, not a: b is zero at first


def test_the_last_layers_alone(make_model, random_batch):
    """Freezing cuts the stack of groups, experts and all, without changing the model."""
    model = make_model(stacks=MIXED)
    tokens = jax.random.randint(jax.random.key(0), (2, 9), 0, 272)
    before = model(tokens)
    cut = train_layers(model, 1, ("all",), ())
    np.testing.assert_allclose(cut(tokens), before, atol=2e-5)  # f32 in another order
    metrics, _ = stepper(cut, SETTINGS)(random_batch(1, 2))
    assert jnp.isfinite(metrics["moe_aux_loss"])
