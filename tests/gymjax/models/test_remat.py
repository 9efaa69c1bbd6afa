"""Words of remat, and what layers compute that keep this and that."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gymjax.adapters.lora import LoraSpec, attach
from gymjax.adapters.select import train_all
from gymjax.config.sections import KEPT_NAMES
from gymjax.models import remat
from gymjax.models.decoder_config import LayerKind, Stack
from gymjax.nn.moe import MoEConfig
from gymjax.optim.labels import Trained

MOE = MoEConfig(experts=4, top_k=2, ffn_width=12, renormalize=False)
STACKS = {
    "alike": (Stack((LayerKind(experts=MOE),), 3),),
    "mixed": (Stack((LayerKind(), LayerKind(experts=MOE)), 2), Stack((LayerKind(),), 1)),
}


@pytest.mark.parametrize("word", ["none", "full", "selective", "offload", "q", "q,k,v", "hidden,gate"])
def test_known_words(word):
    remat.check(word)


@pytest.mark.parametrize("word", ["", "some", "full,q", "q,q", "selective,full", "auto"])
def test_unknown_words(word):
    with pytest.raises(ValueError, match=r"remat must be one of none, .* joined by commas, not "):
        remat.check(word)


def test_what_words_keep():
    assert remat.kept_names("full") == remat.kept_names("offload") == frozenset()
    assert remat.kept_names("selective") == set(KEPT_NAMES)
    assert remat.kept_names("v,gate") == {"v", "gate"}


def results(model, word):
    """Gradients of a sum over hidden states and router statistics, by trained weights and input, and both of these."""
    graphdef, params, frozen = nnx.split(model, Trained, ...)
    x_BTD = 0.3 * jax.random.normal(jax.random.key(1), (2, 7, model.cfg.width))

    def loss(params, x_BTD):
        counted = jnp.ones((2, 7), bool)
        hidden, stats = nnx.merge(graphdef, params, frozen).trunk(
            x_BTD, key=jax.random.key(2), remat=word, counted_BT=counted
        )
        return jnp.sum(hidden**2) + jnp.sum(stats.z), (hidden, stats)

    return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(params, x_BTD)


@pytest.mark.parametrize(
    ("stacks", "train", "word"),
    [
        ("alike", "lora", "selective"),
        ("alike", "full", "full"),
        ("mixed", "lora", "q,gate,up,hidden"),
        ("mixed", "full", "gate,rows"),
    ],
)
def test_words_change_nothing_but_memory(make_model, stacks, train, word):
    model = make_model(stacks=STACKS[stacks], qk_norm="projection")
    if train == "full":
        train_all(model)
    else:
        attach(model, LoraSpec(rank=2, alpha=4), key=jax.random.key(0))
        nnx.update(model, jax.tree.map(lambda leaf: leaf + 0.02, nnx.state(model, Trained)))  # b is 0 at first
    for a, b in zip(*(jax.tree.leaves(results(model, which)) for which in ("none", word)), strict=True):
        # f32; XLA fuses other groups of operations, and sums over tokens cancel
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * float(jnp.max(jnp.abs(a))))


def test_the_backward_pass_does_not_route_again(make_model):
    model = make_model(stacks=STACKS["alike"])
    attach(model, LoraSpec(rank=2, alpha=4), key=jax.random.key(0))
    graphdef, params, frozen = nnx.split(model, Trained, ...)
    x_BTD = jnp.zeros((1, 5, model.cfg.width))

    def loss(params):
        return jnp.sum(nnx.merge(graphdef, params, frozen).trunk(x_BTD, remat="full")[0])

    jaxpr = jax.make_jaxpr(jax.grad(loss))(params).jaxpr
    assert times(jaxpr, "top_k") == 1
    assert times(jaxpr, "sort") == 1


def times(jaxpr, name):
    """How often a primitive stands in a jaxpr and those inside it."""
    inner = [part for eqn in jaxpr.eqns for part in jax.tree.leaves(eqn.params)]
    jaxprs = [getattr(part, "jaxpr", part) for part in inner if hasattr(getattr(part, "jaxpr", part), "eqns")]
    return sum(eqn.primitive.name == name for eqn in jaxpr.eqns) + sum(times(part, name) for part in jaxprs)


@pytest.mark.parametrize("word", ["selective", "offload"])
def test_weights_without_gradients_are_named_when_differentiated(make_model, word):
    model = make_model(stacks=STACKS["alike"])
    attach(model, LoraSpec(rank=2, alpha=4), key=jax.random.key(0))
    graphdef, trained, frozen = nnx.split(model, Trained, ...)
    x_BTD = jnp.ones((1, 3, model.cfg.width))

    def loss(frozen):
        return jnp.sum(nnx.merge(graphdef, trained, frozen).trunk(x_BTD, remat=word)[0])

    with pytest.raises(TypeError, match=rf"(?s)no gradient by .*'q'.*: with remat='{word}' only Trained weights"):
        jax.grad(loss, allow_int=True)(frozen)
