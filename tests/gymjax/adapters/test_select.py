"""Which base weights become trained: all, the last or first layers, named modules."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gymjax.adapters.select import train_all, train_layers, train_modules
from gymjax.models.names import hf_weights, node_at
from gymjax.optim.labels import Trained


def trained_names(model):
    return {weight.name for weight in hf_weights(model.cfg) if isinstance(node_at(model, weight.path), Trained)}


def test_all(make_model):
    model = make_model(dtype=jnp.bfloat16)
    train_all(model)
    assert trained_names(model) == {weight.name for weight in hf_weights(model.cfg)}
    assert {value.get_value().dtype for _, value in nnx.to_flat_state(nnx.state(model))} == {jnp.dtype("float32")}


@pytest.mark.parametrize(("layers", "expected"), [(1, {1}), (-1, {0}), (2, {0, 1})])
def test_layers_from_either_end(make_model, layers, expected):
    model, tokens = make_model(), jnp.arange(6)[None]
    before = model(tokens)
    model = train_layers(model, layers, ("all",), ())
    assert {int(name.split(".")[2]) for name in trained_names(model)} == expected
    np.testing.assert_allclose(model(tokens), before, atol=1e-6)  # the same weights, cut into other scans


def test_modules_inside_and_outside_the_layers(make_model):
    model = train_layers(make_model(), 1, ("mlp",), ("norm",))
    assert trained_names(model) == {
        "model.norm.weight",
        *(f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    }


def test_named_modules(make_model):
    model = make_model(tie_embeddings=False)
    train_modules(model, ["embed_tokens", "lm_head"], key="additional_target")
    assert trained_names(model) == {"model.embed_tokens.weight", "lm_head.weight"}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: train_modules(m, ["embed"], key="additional_target"), "additional_target: 'embed' names no module"),
        (lambda m: train_modules(m, ["lm_head"], key="additional_target"), "lm_head is tied to embed_tokens"),
        (lambda m: train_layers(m, 3, ("all",), ()), "freeze_trainable_layers must lie in 1..2 or -2..-1 .* not 3"),
        (lambda m: train_layers(m, 1, ("ffn",), ()), "freeze_trainable_modules: 'ffn' names nothing; known: all, "),
        (lambda m: train_layers(m, 1, ("all",), ("ln",)), "freeze_extra_modules: 'ln' names no module"),
    ],
)
def test_bad_names(make_model, call, message):
    with pytest.raises(ValueError, match=message):
        call(make_model())
