"""Families with experts: their config.json, and the invariances of a decoder that has some."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gymjax.models import decoder_config
from gymjax.models.decoder import Decoder
from gymjax.models.names import hf_weights, linears, node_at

BASE = {
    "vocab_size": 60,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts_per_tok": 2,
}
QWEN = {"num_experts": 4, "moe_intermediate_size": 12, "mlp_only_layers": [0]}
FAMILIES = {
    "mixtral": {"num_local_experts": 3, "sliding_window": 5},
    "olmoe": {"num_experts": 4},
    "qwen2_moe": {"shared_expert_intermediate_size": 8, **QWEN},
    "qwen3_moe": {"head_dim": 8, "norm_topk_prob": True, **QWEN},
    "gpt_oss": {"num_local_experts": 3, "head_dim": 8, "sliding_window": 4},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_has_one_name_and_the_named_shape(family):
    cfg = decoder_config(BASE | FAMILIES[family] | {"model_type": family})
    model = Decoder(cfg, dtype=jnp.float32)
    weights = hf_weights(model.cfg)
    assert len({weight.name for weight in weights}) == len(weights)
    for weight in weights:
        assert node_at(model, weight.path).get_value()[weight.at].shape == weight.shape, weight.name
    named = sum(int(np.prod(weight.shape)) for weight in weights)
    assert named == sum(
        leaf.size for leaf in jax.tree.leaves(nnx.state(model))
    )  # nothing of the tree is without a name
    layers = {name for _, rows in linears(model) for name in rows.values()}
    assert layers == {weight.name.removesuffix(".weight") for weight in weights if is_matrix(weight)}


def is_matrix(weight):
    return weight.name.endswith(".weight") and len(weight.shape) == 2 and "embed_tokens" not in weight.name


def test_statistics_come_only_when_asked_for(make_model):
    cfg = decoder_config(BASE | FAMILIES["qwen2_moe"] | {"model_type": "qwen2_moe", "num_hidden_layers": 4})
    model = Decoder(cfg, dtype=jnp.float32)
    x = jnp.zeros((1, 5, 16))
    assert model.trunk(x)[1] is None
    counted = jnp.asarray([[True, True, True, False, False]])
    _, stats = model.trunk(x, counted_BT=counted)
    assert stats.counts.shape == (3, 4)  # of four layers the first is dense
    np.testing.assert_array_equal(stats.counts.sum(-1), 3 * 2)
    dense = make_model()
    assert dense.trunk(jnp.zeros((1, 5, 32)), counted_BT=counted)[1] is None


def test_layers_of_qwen():
    hf = BASE | FAMILIES["qwen2_moe"] | {"model_type": "qwen2_moe", "num_hidden_layers": 6, "decoder_sparse_step": 2}
    cfg = decoder_config(hf | {"mlp_only_layers": [3], "use_sliding_window": True, "sliding_window": 9})
    assert [kind.experts is not None for kind in cfg.kinds] == [False, True, False, False, False, True]
    assert [kind.window for kind in cfg.kinds] == [9, None] * 3
    assert cfg.sparse_layers == 2


def test_qwen3_coder_writes_no_shared_expert_as_0():
    hf = BASE | FAMILIES["qwen3_moe"] | {"model_type": "qwen3_moe"}
    plain = decoder_config(hf)
    assert decoder_config(hf | {"shared_expert_intermediate_size": 0, "use_qk_norm": True, "qkv_bias": False}) == plain


def test_gpt_oss_defaults():
    hf = {key: value for key, value in BASE.items() if key != "num_experts_per_tok"}
    cfg = decoder_config(hf | {"model_type": "gpt_oss"})
    assert [kind.window for kind in cfg.kinds] == [128, None]
    moe = cfg.kinds[0].experts
    assert (moe.experts, moe.top_k, moe.activation.alpha, moe.activation.limit) == (128, 4, 1.702, 7.0)
    assert cfg.attn_sinks
    assert not cfg.ropes[0].scaling.truncate


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 5},
            "num_experts_per_tok 5 must be in 1..num_",
        ),
        ({"model_type": "mixtral", "hidden_act": "gelu"}, "hidden_act 'gelu' is not supported for experts"),
    ],
)
def test_what_is_not_done_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        decoder_config(BASE | changes)
