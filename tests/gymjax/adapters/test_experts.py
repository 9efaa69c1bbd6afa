"""Adapters of experts: gradients of grouped low-rank products equal those through dense weights of each expert."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gymjax.adapters.lora import LoraSpec, attach, lora_modules, merge
from gymjax.adapters.select import train_modules
from gymjax.models.decoder_config import LayerKind, Stack
from gymjax.models.names import linears
from gymjax.nn.moe import MoEConfig
from gymjax.optim.labels import Trained
from gymjax.quant import nf4
from pallas_kernels.grouped_matmul import GroupedLayer, grouped_layers
from pallas_kernels.nf4_linear import dequantize

E, F, D, R = 4, 10, 16, 3
SIZES = np.array([5, 0, 7, 1])
MOE = MoEConfig(experts=3, top_k=2, ffn_width=20, renormalize=True, shared_ffn_width=12)
SPARSE = (Stack((LayerKind(), LayerKind(experts=MOE)), 2),)


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    shapes = {"x": (15, D), "w": (E, F, D), "a": (E, R, D), "b": (E, F, R), "factor": (E,), "dy": (15, F)}
    return {name: rng.normal(0, 1, shape) for name, shape in shapes.items()}


def oracle(x, w, a, b, factor, dy):
    """Values and gradients of x, a and b in f64, through each expert's dense weight."""
    y, dx, da, db = np.zeros_like(dy), np.zeros_like(x), np.zeros_like(a), np.zeros_like(b)
    start = 0
    for e, size in enumerate(SIZES):
        rows = slice(start, start + size)
        start += size
        dense = w[e] + factor[e] * b[e] @ a[e]
        ddense = dy[rows].T @ x[rows]
        y[rows], dx[rows] = x[rows] @ dense.T, dy[rows] @ dense
        da[e], db[e] = factor[e] * b[e].T @ ddense, factor[e] * ddense @ a[e].T
    return y, dx, da, db


@pytest.mark.parametrize("packed", [False, True])
def test_gradients_equal_dense_experts(packed, arrays):
    if packed:
        rows = [nf4.quantize(w.astype(np.float32), dtype="float32") for w in arrays["w"]]
        w = jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)
        arrays["w"] = np.asarray(dequantize(w), np.float64)
    else:
        w = jnp.asarray(arrays["w"], jnp.float32)
    x, a, b, factor, dy = (jnp.asarray(arrays[name], jnp.float32) for name in ("x", "a", "b", "factor", "dy"))
    sizes = jnp.asarray(SIZES, jnp.int32)
    y, pull_back = jax.vjp(lambda x, a, b: grouped_layers(x, [GroupedLayer(w, a, b, factor)], sizes)[0], x, a, b)
    for ours, exact in zip((y, *pull_back(dy)), oracle(**arrays), strict=True):
        np.testing.assert_allclose(ours, exact, atol=2e-4)  # f32: products of sums of 16 and of 3 terms of unit size


def adapted(make_model, **spec):
    model = make_model(stacks=SPARSE)
    attach(model, LoraSpec(rank=4, alpha=8, **spec), key=jax.random.key(0))
    return model


def test_all_leaves_routers_out_and_names_reach_them(make_model):
    names = {row.name for _, row in lora_modules(adapted(make_model))}
    layer = "model.layers.1.mlp."
    assert {layer + "experts.2.gate_proj", layer + "shared_expert.up_proj", "model.layers.0.mlp.up_proj"} <= names
    assert not names & {layer + "gate", layer + "shared_expert_gate"}
    routers = {row.name for _, row in lora_modules(adapted(make_model, targets=("mlp.gate",)))}
    assert routers == {"model.layers.1.mlp.gate", "model.layers.3.mlp.gate"}


def test_a_model_with_adapted_experts_equals_the_merged_one(make_model):
    model = adapted(make_model, rank_pattern={r"q_proj": 2})
    rng = np.random.default_rng(0)
    for layer, _ in linears(model):
        if layer.adapter is not None:
            live = np.zeros(layer.adapter.b.get_value().shape, np.float32)
            for row in layer.adapter.rows:
                live[row.at][:, : row.rank] = 1
            layer.adapter.b.set_value(jnp.asarray(rng.normal(0, 0.3, live.shape) * live, jnp.float32))
    ranks = {row.name: row.rank for _, row in lora_modules(model)}
    assert ranks["model.layers.1.self_attn.q_proj"] == 2
    assert ranks["model.layers.1.mlp.experts.1.up_proj"] == 4
    tokens = jax.random.randint(jax.random.key(0), (2, 9), 0, 272)
    before = model(tokens)
    merge(model)
    np.testing.assert_allclose(model(tokens), before, atol=2e-4)  # weights of size 1 rounded to f32 once more


def test_routers_are_trained_whole_but_experts_not(make_model):
    model = adapted(make_model, targets=("q_proj",))
    train_modules(model, ["mlp.gate"], key="additional_target")
    assert isinstance(model.stacks[0][1].mlp.router.w, Trained)
    with pytest.raises(ValueError, match="additional_target: 'experts' reaches experts, which no adapter's file holds"):
        train_modules(model, ["experts"], key="additional_target")


def test_mixtral_s_router_is_not_trained_whole_beside_an_adapter(make_model):
    moe = dataclasses.replace(MOE, shared_ffn_width=None, layout="block_sparse_moe")
    model = make_model(stacks=(Stack((LayerKind(experts=moe),), 2),))
    with pytest.raises(ValueError, match=r"additional_target: 'gate' reaches Mixtral's router.*full or freeze"):
        train_modules(model, ["gate"], key="additional_target")


def test_dropout_and_dora_on_experts_are_refused(make_model):
    with pytest.raises(ValueError, match=r"use_dora: true is not done for experts .*leave them out of lora_target"):
        adapted(make_model, use_dora=True)
    with pytest.raises(ValueError, match=r"lora_dropout: 0.1 cannot act on experts .*experts.0.gate_proj"):
        adapted(make_model, dropout=0.1)
    adapted(make_model, dropout=0.1, targets=("q_proj",))


@pytest.mark.parametrize("odd", [{"rank_pattern": {"up_proj": 2}}, {"targets": ("experts.1.up_proj",)}])
def test_experts_do_not_differ(odd, make_model):
    with pytest.raises(
        ValueError, match=r"experts\.\d\.up_proj has rank \d and alpha 8, but experts have all the same"
    ):
        adapted(make_model, **odd)


def test_a_quantized_base_of_experts(make_model):
    model = make_model(stacks=(Stack((LayerKind(experts=dataclasses.replace(MOE, shared_ffn_width=None)),), 2),))
    tokens = jax.random.randint(jax.random.key(0), (2, 9), 0, 272)
    for layer, names in linears(model):
        w = layer.w.get_value()
        if w.ndim == 4:
            rows = [nf4.quantize(np.asarray(w[index]), dtype="float32") for index in names]
            stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves).reshape(2, 3, *leaves[0].shape), *rows)
            layer.w = nnx.Param(stacked)
    assert jnp.isfinite(model(tokens)).all()
    attach(model, LoraSpec(rank=4, alpha=8), key=jax.random.key(0))
    with pytest.raises(ValueError, match="is quantized: load the base in 16 bits"):
        merge(model)
