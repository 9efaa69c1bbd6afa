"""Matrix products of a step in 16 bits: none with a weight, nor for a weight's gradient, has an operand in f32."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.extend.core import jaxprs_in_params

from gymjax.adapters.lora import LoraSpec, attach
from gymjax.adapters.select import train_all
from gymjax.models.decoder_config import LayerKind, Stack
from gymjax.nn.moe import MoEConfig
from gymjax.training.step import StepSettings, init_state, make_step, split_model

MOE = MoEConfig(experts=4, top_k=2, ffn_width=12, renormalize=False, shared_ffn_width=20)
MODELS = {"dense": {"tie_embeddings": False}, "experts": {"stacks": (Stack((LayerKind(experts=MOE),), 2),)}}


def products(jaxpr):
    """Every product of a program, those of the programs inside it too."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("dot_general", "ragged_dot_general"):
            yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from products(inner)


def wide_products(model, batch, settings):
    """Products with an operand in f32 in which an operand or the result has a weight's shape."""
    graphdef, params, frozen = split_model(model)
    step, optimizer = make_step(graphdef, optax.sgd(1.0), settings), optax.sgd(1.0)
    leaves = [leaf for leaf in jax.tree.leaves((params, frozen)) if leaf.ndim > 1]
    weights = {tuple(sorted(leaf.shape[1:] if leaf.ndim > 2 else leaf.shape)) for leaf in leaves}
    found = list(products(jax.make_jaxpr(step)(init_state(params, optimizer, None), frozen, batch).jaxpr))
    assert found
    return [
        equation
        for equation in found
        if any(var.aval.dtype == jnp.float32 for var in equation.invars[:2])
        and any(tuple(sorted(var.aval.shape)) in weights for var in (*equation.invars[:2], *equation.outvars))
    ]


@pytest.mark.parametrize("trained", ["all", "adapters", "some adapters"])
@pytest.mark.parametrize("name", MODELS)
def test_no_product_with_a_weight_is_in_f32(make_model, random_batch, name, trained):
    model = make_model(dtype=jnp.bfloat16, **MODELS[name])
    if trained == "all":
        train_all(model)
    else:
        targets = ("all",) if trained == "adapters" else ("q_proj", "down_proj")
        attach(model, LoraSpec(rank=4, alpha=8, targets=targets), key=jax.random.key(1))
    settings = StepSettings(seed=0, max_grad_norm=0.0, remat="attention,attention_lse")
    assert not wide_products(model, random_batch(1, 2), settings)
