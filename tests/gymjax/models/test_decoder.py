"""The decoder: grouping of layers into scans, names of weights, and invariances of the forward pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gymjax.models.decoder_config import LayerKind, Stack, stack_layers
from gymjax.models.names import hf_weights, layer_places, linears, node_at

LOCAL, FULL = LayerKind(4), LayerKind()


@pytest.mark.parametrize(
    ("kinds", "cut", "stacks"),
    [
        ((FULL,) * 5, None, (Stack((FULL,), 5),)),
        ((LOCAL, FULL) * 3, None, (Stack((LOCAL, FULL), 3),)),
        ((LOCAL, LOCAL, FULL) * 2 + (LOCAL,), None, (Stack((LOCAL, LOCAL, FULL), 2), Stack((LOCAL,), 1))),
        ((FULL,) * 3 + (LOCAL,) * 2, None, (Stack((FULL,), 3), Stack((LOCAL,), 2))),
        ((FULL,) * 5, 3, (Stack((FULL,), 3), Stack((FULL,), 2))),
        ((FULL,) * 5, 0, (Stack((FULL,), 5),)),
        ((FULL,), None, (Stack((FULL,), 1),)),
    ],
)
def test_layers_are_grouped_into_few_scans(kinds, cut, stacks):
    assert stack_layers(kinds, cut) == stacks


def test_places_follow_the_order_of_layers(make_model):
    cfg = make_model(stacks=(Stack((LOCAL, FULL), 2), Stack((LOCAL,), 1))).cfg
    assert cfg.kinds == (LOCAL, FULL, LOCAL, FULL, LOCAL)
    assert layer_places(cfg) == [(0, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1), (1, 0, 0)]


@pytest.mark.parametrize(
    "features",
    [
        {"qk_norm": "head"},
        {"qk_norm": "projection", "norms": "post"},
        {"norms": "sandwich", "norm_offset": 1.0},
        {"fused": True},
    ],
    ids=str,
)
def test_every_weight_has_one_name_and_the_named_shape(features, make_model):
    model = make_model(qkv_bias=True, out_bias=True, mlp_bias=True, tie_embeddings=False, **features)
    weights = hf_weights(model.cfg)
    assert len({weight.name for weight in weights}) == len(weights)
    for weight in weights:
        shape = node_at(model, weight.path).get_value().shape
        assert shape == (weight.shape if weight.index is None else (2, *weight.shape)), weight.name
    named = {(weight.path, weight.index) for weight in weights}
    rows = sum(
        1 if path[0] != "stacks" else value.get_value().shape[0] for path, value in nnx.to_flat_state(nnx.state(model))
    )
    assert len(named) == rows  # nothing of the tree is without a name


def test_linears_name_every_layer(make_model):
    names = [name for _, rows in linears(make_model(tie_embeddings=False)) for name in rows.values()]
    assert len(names) == 2 * 7 + 1
    assert names[-1] == "lm_head"
    assert {"model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"} <= set(names)


def test_stacking_never_changes_the_result(make_model):
    """Windows alternate: one scan over pairs, against one scan per layer with the same weights."""
    grouped = make_model(stacks=(Stack((LOCAL, FULL), 2),))
    single = make_model(stacks=tuple(Stack((kind,), 1) for kind in (LOCAL, FULL, LOCAL, FULL)))
    for a, b in zip(hf_weights(grouped.cfg), hf_weights(single.cfg), strict=True):
        value = node_at(grouped, a.path).get_value()
        node_at(single, b.path).set_value(value if a.index is None else value[a.index][None])
    tokens = jax.random.randint(jax.random.key(0), (2, 11), 0, 272)
    np.testing.assert_allclose(grouped(tokens), single(tokens), atol=2e-5)  # f32 in another order


def test_padding_and_later_tokens_never_reach_a_token(make_model):
    model = make_model()
    tokens = jax.random.randint(jax.random.key(0), (1, 9), 0, 272)
    segments = jnp.asarray([[1] * 6 + [0] * 3])
    other = tokens.at[0, 6:].set(7)
    a, b = (model(t, segment_ids_BT=segments) for t in (tokens, other))
    np.testing.assert_array_equal(a[:, :6], b[:, :6])
    np.testing.assert_array_equal(model(tokens)[:, :6], model(other)[:, :6])


def test_bad_remat_is_named(make_model):
    with pytest.raises(
        ValueError,
        match=r"remat must be one of none, full, selective, offload, or names of .*q, k, .* by commas, .*not 'some'",
    ):
        make_model()(jnp.zeros((1, 2), jnp.int32), remat="some")
