"""What is attached where: targets, patterns, factors, zero padding of ranks, and messages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gymjax.adapters.lora import LoraSpec, adapters, attach, lora_modules, merge
from gymjax.optim.labels import Trained

KEY = jax.random.key(0)


def attached(model, **spec):
    attach(model, LoraSpec(**{"rank": 4, "alpha": 8.0, **spec}), key=KEY)
    return {row.name: (lora, row) for lora, row in lora_modules(model)}


def test_all_means_every_linear_layer_but_the_head(make_model):
    names = attached(make_model(tie_embeddings=False))
    assert len(names) == 2 * 7
    assert "lm_head" not in names


def test_a_new_adapter_changes_nothing(make_model):
    model, tokens = make_model(), jnp.arange(12).reshape(2, 6)
    before = model(tokens)
    attached(model)
    np.testing.assert_allclose(model(tokens), before, atol=1e-6)  # b is 0; only fusion differs


def test_first_draw_is_uniform_in_pefts_bound(make_model):
    for lora, _ in attached(make_model()).values():
        a = np.asarray(lora.a.get_value())
        bound = 1 / np.sqrt(a.shape[-1])
        assert np.abs(a).max() <= bound
        assert np.abs(a).max() > 0.8 * bound
        assert not np.asarray(lora.b.get_value()).any()


def test_targets_by_name_and_by_path(make_model):
    assert set(attached(make_model(), targets=("q_proj",))) == {f"model.layers.{i}.self_attn.q_proj" for i in range(2)}
    only = attached(make_model(), targets=("model.layers.1.mlp.up_proj",))
    assert set(only) == {"model.layers.1.mlp.up_proj"}


def test_ranks_may_differ_between_layers(make_model):
    names = attached(
        make_model(), rank_pattern={r"layers\.1\.self_attn\.q_proj": 2, "v_proj": 6}, alpha_pattern={"v_proj": 3.0}
    )
    ranks = {name: row.rank for name, (_, row) in names.items()}
    assert ranks["model.layers.0.self_attn.q_proj"] == 4
    assert ranks["model.layers.1.self_attn.q_proj"] == 2
    lora, row = names["model.layers.1.self_attn.q_proj"]
    assert lora.a.get_value().shape[1] == 4
    assert not np.asarray(lora.a.get_value())[1, 2:].any()
    assert float(lora.factor.get_value()[row.index]) == 8.0 / 2
    lora, row = names["model.layers.0.self_attn.v_proj"]
    assert float(lora.factor.get_value()[row.index]) == 3.0 / 6


def test_padding_beyond_a_rank_gets_no_gradient(make_model):
    model = make_model()
    names = attached(model, rank_pattern={r"layers\.1\.self_attn\.q_proj": 2})
    lora, _ = names["model.layers.1.self_attn.q_proj"]
    lora.b.set_value(lora.b.get_value().at[:, :, :2].set(0.1))
    tokens = jnp.arange(12).reshape(2, 6)
    graphdef, params, frozen = nnx.split(model, Trained, ...)
    grads = jax.grad(lambda params: jnp.sum(nnx.merge(graphdef, params, frozen)(tokens) ** 2))(params)
    q = dict(nnx.to_flat_state(grads))
    da, db = (q[("stacks", 0, 0, "attn", "q", "adapter", name)].get_value() for name in ("a", "b"))
    assert np.abs(da[1, :2]).max() > 0
    assert not np.asarray(da)[1, 2:].any()
    assert not np.asarray(db)[1, :, 2:].any()


def test_rslora_divides_by_the_root(make_model):
    lora, row = attached(make_model(), use_rslora=True)["model.layers.0.mlp.up_proj"]
    assert float(lora.factor.get_value()[row.index]) == pytest.approx(8 / 4**0.5)


def test_head_adapter_takes_part_in_logits_and_merges(make_model):
    model, tokens = make_model(tie_embeddings=False), jnp.arange(6)[None]
    lora, _ = attached(model, targets=("lm_head",))["lm_head"]
    before = model.logits(model(tokens))
    lora.b.set_value(jnp.full(lora.b.get_value().shape, 0.3))
    after = model.logits(model(tokens))
    assert float(jnp.abs(after - before).max()) > 1e-3
    merge(model)
    np.testing.assert_allclose(model.logits(model(tokens)), after, atol=1e-5)  # one f32 rounding of the weight
    assert not list(adapters(model))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"targets": ("qproj",)}, "lora_target: 'qproj' names no linear layer; known: all, down_proj"),
        ({"rank_pattern": {"nothing": 2}}, "lora_rank_pattern: 'nothing' matches no targeted layer"),
        ({"targets": ("lm_head",), "dropout": 0.1}, "lora_dropout: 0.1 cannot act on lm_head"),
    ],
)
def test_bad_specs(make_model, spec, message):
    with pytest.raises(ValueError, match=message):
        attached(make_model(tie_embeddings=False), **spec)


def test_bad_second_adapter(make_model):
    model = make_model()
    attached(model)
    with pytest.raises(ValueError, match="has an adapter already; merge it"):
        attached(model)
