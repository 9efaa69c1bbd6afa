"""Row norms without the dense matrix, stacks with untouched layers, first pass, merge."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gymjax.adapters.dora import Dora, row_norm
from gymjax.adapters.lora import Lora, LoraSpec, attach, lora_modules, merge
from gymjax.adapters.tensors import MAGNITUDE, B, adapter_tensors, set_adapter_tensors
from gymjax.optim.labels import Trained, labels
from gymjax.quant import quantize
from pallas_kernels.nf4_linear import dense

TOKENS = jnp.arange(12).reshape(2, 6)


def attached(model, **spec):
    attach(model, LoraSpec(**{"rank": 4, "alpha": 8.0, "use_dora": True, **spec}), key=jax.random.key(0))
    return model


def perturbed(model):
    rng = np.random.default_rng(0)
    noise = {
        name: value + (0.2 * rng.normal(size=value.shape) if name.endswith((B, MAGNITUDE)) else 0)
        for name, value in adapter_tensors(model).items()
    }
    assert set_adapter_tensors(model, noise) == []
    return model


def logits(model):
    return np.asarray(model.logits(model(TOKENS)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "nf4"])
def test_row_norm_is_that_of_the_dense_sum(stored, dtype):
    """Odd shapes; in 16 bits the base counts as it is multiplied, rounded to them."""
    rng = np.random.default_rng(0)
    w_OI, a_RI, b_OR = (rng.normal(size=shape).astype(np.float32) for shape in ((37, 29), (5, 29), (37, 5)))
    w = quantize(w_OI, dtype="bfloat16") if stored == "nf4" else jnp.asarray(w_OI, stored)
    held = np.asarray(dense(w, dtype), np.float64)
    base_norm = jnp.asarray(np.square(held).sum(1), jnp.float32)
    norm = row_norm(w, base_norm, jnp.asarray(a_RI), jnp.asarray(b_OR), jnp.float32(0.7), dtype=dtype)
    wanted = np.linalg.norm(held + 0.7 * b_OR.astype(np.float64) @ a_RI, axis=1)
    # f32 sums of 29 terms; in 16 bits a is cut into two parts, which leaves 2^-16 of it
    np.testing.assert_allclose(norm, wanted, rtol=2e-6 if dtype == "float32" else 2e-5)


def test_a_row_of_zeros_stays_finite():
    w = jnp.zeros((2, 3)).at[1].set(1.0)
    zero = jnp.zeros
    norm = row_norm(w, jnp.asarray([0.0, 3.0]), zero((1, 3)), zero((2, 1)), jnp.float32(1))
    np.testing.assert_allclose(norm, [0, 3**0.5], rtol=1e-6)


def test_a_new_adapter_changes_nothing_and_starts_with_the_rows_lengths(make_model):
    model = make_model()
    before, w = logits(model), np.asarray(model.stacks[0][0].mlp.down.w.get_value())
    attached(model)
    np.testing.assert_allclose(logits(model), before, atol=1e-4)  # division by a norm and product with it, f32
    magnitude = adapter_tensors(model)["model.layers.1.mlp.down_proj.lora_magnitude_vector"]
    np.testing.assert_allclose(magnitude, np.linalg.norm(w[1], axis=1), rtol=1e-6)


def test_layers_without_an_adapter_keep_their_lengths(make_model):
    """One layer of a stack is a target; the others' magnitudes do nothing and get no gradient."""
    model = attached(make_model(), targets=("model.layers.1.mlp.up_proj",))
    before = logits(model)
    slot = model.stacks[0][0].mlp.up.adapter
    slot.magnitude.set_value(slot.magnitude.get_value().at[0].multiply(3.0))
    np.testing.assert_array_equal(logits(model), before)
    assert list(adapter_tensors(model)) == [
        f"model.layers.1.mlp.up_proj.{kind}" for kind in ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")
    ]
    graphdef, params, frozen = nnx.split(model, Trained, ...)
    grads = jax.grad(lambda params: jnp.sum(nnx.merge(graphdef, params, frozen)(TOKENS) ** 2))(params)
    grad = grads["stacks"][0][0]["mlp"]["up"]["adapter"]["magnitude"].get_value()
    assert not np.asarray(grad[0]).any()
    assert np.abs(grad[1]).max() > 0


@pytest.mark.parametrize("tied", [True, False])
def test_merged_weights_compute_what_the_adapter_computes(make_model, tied):
    targets = ("all",) if tied else ("q_proj", "lm_head")
    model = perturbed(attached(make_model(tie_embeddings=tied), targets=targets, rank_pattern={"q_proj": 2}))
    wanted = logits(model)
    merge(model)
    np.testing.assert_allclose(logits(model), wanted, atol=1e-5 * np.abs(wanted).max())  # f32 in another order
    assert not list(lora_modules(model))


@pytest.mark.parametrize("nf4", [False, True])
def test_bf16_layer_is_as_exact_as_the_product_with_its_merged_weight(nf4):
    rng = np.random.default_rng(0)
    w_OI, a_RI, b_OR, x_BI = (
        rng.normal(size=shape).astype(np.float32) for shape in ((48, 70), (4, 70), (48, 4), (33, 70))
    )
    w = quantize(w_OI) if nf4 else jnp.asarray(w_OI, jnp.bfloat16)
    lora = Lora(jnp.asarray(a_RI), jnp.asarray(b_OR), np.float32(0.5), dropout=0.0, rows=())
    layer, x = Dora(lora, w, stacked=False), jnp.asarray(x_BI, jnp.bfloat16)
    layer.magnitude.set_value(layer.magnitude.get_value() * jnp.linspace(0.5, 2, 48))
    merged = layer.effective(dense(w, jnp.float32))
    wanted = np.asarray(x, np.float64) @ np.asarray(merged, np.float64).T
    error = np.abs(np.asarray(layer(x, w, None), np.float64) - wanted).mean()
    plain = np.abs(np.asarray(x @ merged.astype(jnp.bfloat16).T, np.float64) - wanted).mean()
    # base and low-rank product are rounded before they are summed, and the sum again when it is scaled
    assert error < 1.75 * plain


def test_dropout_reaches_base_and_adapter(make_model):
    """No dropout in inference; in training y depends on the mask through the scaled base too."""
    model = perturbed(attached(make_model(), dropout=0.5))
    slot, w = model.stacks[0][0].mlp.up.adapter, model.stacks[0][0].mlp.up.w.get_value()[0]
    graphdef, state = nnx.split(slot)
    layer: Dora = nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf[0], state))
    layer.lora.b.set_value(jnp.zeros_like(layer.lora.b.get_value()))
    x = jnp.ones((3, 32))
    without, dropped = layer(x, w, None), layer(x, w, jax.random.key(1))
    assert np.abs(without - dropped).max() > 0.01
    np.testing.assert_allclose(without, layer.magnitude.get_value() / jnp.linalg.norm(w, axis=1) * (x @ w.T), rtol=1e-4)


def test_magnitudes_are_labelled_for_the_optimizer(make_model):
    _, params, _ = nnx.split(attached(make_model()), Trained, ...)
    assert set(jax.tree.leaves(labels(params))) == {"lora_a", "lora_b", "lora_magnitude"}
