"""The update: independence of how a batch is cut, frozen bits, precision, broken steps, a golden first step."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from gymjax.adapters.lora import LoraSpec, attach, merge
from gymjax.adapters.select import train_all
from gymjax.config import OptimConfig
from gymjax.optim.build import build
from gymjax.quant import nf4
from gymjax.training import loss_scale
from gymjax.training.step import StepSettings, batch_loss, init_state, make_eval_step, make_step, split_model

SETTINGS = StepSettings(seed=0, max_grad_norm=0.0)


def lora_model(make_model, spec=None, **changes):
    model = make_model(**changes)
    attach(model, spec or LoraSpec(rank=4, alpha=8), key=jax.random.key(1))
    for i, lora in enumerate(layer.adapter for layer in _linears(model)):
        lora.b.set_value(jax.random.normal(jax.random.key(i), lora.b.get_value().shape) * 0.1)
    return model


def _linears(model):
    for blocks in model.stacks:
        for block in blocks:
            yield from (block.attn.q, block.attn.k, block.attn.v, block.attn.o)
            yield from (block.mlp.gate, block.mlp.up, block.mlp.down)


RAW_GRADIENTS = optax.sgd(1.0)  # its update is minus the gradient, so that the step shows its gradient


@functools.cache
def jitted_step(graphdef, settings):
    """Of models that are alike one program, as several tests ask for it."""
    return jax.jit(make_step(graphdef, RAW_GRADIENTS, settings))


def one_step(model, batch, settings=SETTINGS, scale=None):
    graphdef, params, frozen = split_model(model)
    state = init_state(params, RAW_GRADIENTS, scale)
    new, metrics = jitted_step(graphdef, settings)(state, frozen, batch)
    grads = jax.tree.map(jnp.subtract, params, new.params)
    return metrics, grads, new


@pytest.mark.parametrize("cut", [(2, 4), (1, 8), (4, 2)])
def test_accumulation_never_changes_the_update(make_model, random_batch, cut):
    model = lora_model(make_model)
    nnx.update(model, jax.tree.map(lambda leaf: leaf * 0.3, nnx.state(model)))  # a loss near log(V), as of real models
    metrics, grads, _ = one_step(model, random_batch(8, 1))
    other, other_grads, _ = one_step(model, random_batch(*cut))
    # The sums run in another order, which costs an ulp or two of f32 (5e-7 at this loss).
    assert float(metrics["loss"]) == pytest.approx(float(other["loss"]), abs=1e-6)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(other_grads), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_loss_is_the_mean_over_supervised_tokens(make_model, random_batch):
    model = lora_model(make_model)
    batch = random_batch(2, 3)
    metrics, _, _ = one_step(model, batch)
    total, count = 0.0, 0.0
    for i in range(2):
        micro = {name: array[i] for name, array in batch.items()}
        logits = model.logits(model(micro["tokens"], segment_ids_BT=micro["segment_ids"]))
        nll = -jnp.take_along_axis(jax.nn.log_softmax(logits), micro["targets"][..., None], -1)[..., 0]
        total, count = total + float((nll * micro["loss_weights"]).sum()), count + float(micro["loss_weights"].sum())
    assert float(metrics["loss"]) == pytest.approx(total / count, rel=1e-5)  # f32 sums in another order
    assert float(metrics["supervised"]) == count


@pytest.mark.parametrize("remat", ["full", "selective", "offload", "q,k,v", "gate"])
def test_remat_changes_nothing_but_memory(make_model, random_batch, remat):
    model = lora_model(make_model)
    _, grads, _ = one_step(model, random_batch(1, 4))
    _, other, _ = one_step(model, random_batch(1, 4), StepSettings(seed=0, max_grad_norm=0.0, remat=remat))
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)  # XLA fuses the recomputed layer differently


def test_unpacked_rows_need_no_segments(make_model, random_batch):
    model = lora_model(make_model)
    packed, grads, _ = one_step(model, random_batch(1, 4))
    causal, other, _ = one_step(model, random_batch(1, 4), StepSettings(seed=0, max_grad_norm=0.0, packed=False))
    assert float(packed["loss"]) == pytest.approx(float(causal["loss"]), abs=1e-6)  # only rounding differs
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_packed_documents_have_the_losses_of_separate_rows(make_model):
    model = make_model(qk_norm="head")
    rng = np.random.default_rng(3)
    lengths, row = (5, 9, 2), {}
    documents = [rng.integers(0, 272, n).astype(np.int32) for n in lengths]
    row["tokens"] = np.concatenate([*documents, np.zeros(3, np.int32)])[None]
    row["segment_ids"] = np.concatenate([*(np.full(n, i + 1) for i, n in enumerate(lengths)), np.zeros(3)])[
        None
    ].astype(np.int32)
    row["positions"] = np.concatenate([*(np.arange(n) for n in lengths), np.zeros(3)])[None].astype(np.int32)
    hidden = model(row["tokens"], positions_BT=row["positions"], segment_ids_BT=row["segment_ids"])
    start = 0
    for document in documents:
        alone = model(document[None])
        got = hidden[:, start : start + len(document)]
        np.testing.assert_allclose(got, alone, atol=2e-5)  # f32 sums over another number of keys
        start += len(document)


def test_frozen_base_keeps_every_bit_and_has_no_optimizer_state(make_model, random_batch, leaves_equal):
    model = lora_model(make_model)
    graphdef, params, frozen = split_model(model)
    before = jax.tree.map(lambda leaf: np.array(leaf), frozen)
    optimizer = build(OptimConfig(learning_rate=1e-2), 10, params)
    state = init_state(params, optimizer, None)
    step = jax.jit(make_step(graphdef, optimizer, SETTINGS), donate_argnums=0)
    adapters = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
    assert sum(leaf.nbytes for leaf in moments) == 2 * adapters  # Adam's two moments of the adapters, nothing else
    for _ in range(3):
        state, _ = step(state, frozen, random_batch(1, 4))
    assert leaves_equal(before, frozen)


def quantized_model(make_model):
    model = make_model(width=64, ffn_width=128, head_dim=16)
    for layer in _linears(model):
        rows = [nf4.quantize(np.asarray(w), dtype="float32") for w in layer.w.get_value()]
        layer.w = nnx.Param(jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows))
    return model


def test_nf4_base_trains_like_its_dequantized_values(make_model, random_batch):
    from pallas_kernels.nf4_linear import dequantize

    packed, dense = quantized_model(make_model), quantized_model(make_model)
    for layer in _linears(dense):
        layer.w = nnx.Param(jax.vmap(dequantize)(layer.w.get_value()))
    results = []
    for model in (packed, dense):
        attach(model, LoraSpec(rank=4, alpha=8), key=jax.random.key(1))
        results.append(one_step(model, random_batch(1, 4), StepSettings(seed=0, max_grad_norm=0.0, remat="full")))
    assert float(results[0][0]["loss"]) == pytest.approx(float(results[1][0]["loss"]), abs=1e-6)  # same values
    for a, b in zip(jax.tree.leaves(results[0][1]), jax.tree.leaves(results[1][1]), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_merged_adapter_equals_the_attached_one(make_model, random_batch):
    model = lora_model(make_model)
    tokens = random_batch(1, 4)["tokens"][0]
    attached = model.logits(model(tokens))
    merge(model)
    np.testing.assert_allclose(model.logits(model(tokens)), attached, atol=1e-4)  # one f32 rounding of the weights
    assert all(layer.adapter is None for layer in _linears(model))


def test_dropout_and_noise_are_functions_of_seed_and_step(make_model, random_batch):
    settings = StepSettings(seed=3, max_grad_norm=0.0, dropout=True, neftune_alpha=5.0)
    model = lora_model(make_model, LoraSpec(rank=4, alpha=8, dropout=0.5))
    batch = random_batch(2, 2)
    first = float(one_step(model, batch, settings)[0]["loss"])
    jitted_step.cache_clear()  # traced again: nothing random comes from tracing
    assert first == float(one_step(model, batch, settings)[0]["loss"])
    assert first != float(one_step(model, batch, SETTINGS)[0]["loss"])
    graphdef, params, frozen = split_model(model)
    micro = {name: array[0] for name, array in batch.items()}
    quiet = make_eval_step(graphdef, settings)(params, frozen, micro)[0]
    assert float(quiet) == float(batch_loss(model, micro, SETTINGS, None)[0])  # evaluation has neither


def test_clipping_scales_to_the_norm(make_model, random_batch):
    model = lora_model(make_model)
    free, grads, _ = one_step(model, random_batch(1, 4))
    clipped, small, _ = one_step(model, random_batch(1, 4), StepSettings(seed=0, max_grad_norm=0.01))
    assert float(clipped["grad_norm"]) == pytest.approx(float(free["grad_norm"]))  # reported before clipping
    assert float(optax.tree.norm(small)) == pytest.approx(0.01, rel=1e-2)  # norm + 1e-6 in the divisor, f32 differences
    assert float(optax.tree.norm(grads)) > 0.01


def poisoned(batch):
    return batch | {"loss_weights": batch["loss_weights"].at[0, 0, 3].set(jnp.inf)}


def test_a_broken_step_changes_nothing_from_then_on(make_model, random_batch, leaves_equal):
    graphdef, params, frozen = split_model(lora_model(make_model))
    step = jitted_step(graphdef, SETTINGS)
    good = random_batch(1, 4)
    first, _ = step(init_state(params, RAW_GRADIENTS, None), frozen, good)
    second, metrics = step(first, frozen, poisoned(good))
    third, later = step(second, frozen, good)
    assert int(metrics["broken_step"]) == 1
    assert int(later["broken_step"]) == 1
    assert leaves_equal(first.params, third.params)


def test_fp16_backs_off_skips_and_grows(make_model, random_batch, leaves_equal):
    model = lora_model(make_model, dtype=jnp.float16)
    graphdef, params, frozen = split_model(model)
    step = jitted_step(graphdef, SETTINGS)
    state = init_state(params, RAW_GRADIENTS, 2.0**24)
    batch = random_batch(1, 4)
    skipped = 0
    for _ in range(12):
        before = state.params
        state, metrics = step(state, frozen, batch)
        if int(metrics["skipped_steps"]) > skipped:
            skipped += 1
            assert leaves_equal(before, state.params)
    assert 0 < skipped < 12
    assert float(metrics["loss_scale"]) == 2.0 ** (24 - skipped)
    assert int(metrics["broken_step"]) == -1
    # Same gradient as without scaling, within fp16's rounding of activations (11 bits) over two layers.
    _, scaled, _ = one_step(model, batch, scale=1024.0)
    _, plain, _ = one_step(model, batch, scale=1.0)
    np.testing.assert_allclose(optax.tree.norm(scaled), optax.tree.norm(plain), rtol=1e-2)


def test_loss_scale_grows_after_a_clean_interval():
    grown = loss_scale.adjust(
        loss_scale.LossScale(jnp.float32(8), jnp.int32(loss_scale.GROWTH_INTERVAL - 1), jnp.int32(2)), jnp.bool_(True)
    )
    assert (float(grown.scale), int(grown.clean), int(grown.skipped)) == (16.0, 0, 2)
    lowest = loss_scale.LossScale(jnp.float32(loss_scale.SMALLEST), jnp.int32(0), jnp.int32(0))
    assert bool(loss_scale.exhausted(lowest, jnp.bool_(False)))
    assert not bool(loss_scale.exhausted(lowest, jnp.bool_(True)))


def test_full_fine_tuning_trains_every_weight(make_model, random_batch):
    model = make_model(tie_embeddings=False, qkv_bias=True)
    train_all(model)
    assert not jax.tree.leaves(split_model(model)[2])
    _, grads, _ = one_step(model, random_batch(1, 8, width=24))
    assert all(float(jnp.abs(grad).max()) > 0 for grad in jax.tree.leaves(grads))


# Of the first step at these seeds; they move only when the mathematics of model, loss or adapter does.
GOLDEN_LOSS = 7.172092
GOLDEN_NORM = 4.137587


def test_golden_first_step(make_model, random_batch):
    metrics, _, _ = one_step(lora_model(make_model), random_batch(2, 2))
    # 1e-4: matrix products of other CPUs sum in other orders.
    assert float(metrics["loss"]) == pytest.approx(GOLDEN_LOSS, rel=1e-4)
    assert float(metrics["grad_norm"]) == pytest.approx(GOLDEN_NORM, rel=1e-4)


def test_fused_operations_do_not_change_the_update(make_model, random_batch):
    model = lora_model(make_model)
    metrics, grads, _ = one_step(model, random_batch(2, 1))
    plain, plain_grads, _ = one_step(model, random_batch(2, 1), dataclasses.replace(SETTINGS, fused_ops=False))
    # the same arithmetic in f32, in another order
    assert float(metrics["loss"]) == pytest.approx(float(plain["loss"]), abs=1e-5)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(plain_grads), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
