"""Every family on a tiny random model: cached decoding, packing, and a training step of each kind."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from gymjax.adapters.lora import LoraSpec, attach
from gymjax.adapters.select import train_all
from gymjax.checkpoint.weights import load_decoder
from gymjax.models import FAMILIES, decoder_config
from gymjax.models.decoder import empty_cache
from gymjax.models.names import hf_weights
from gymjax.training.step import StepSettings, init_state, make_step, split_model

TINY = json.loads((Path(__file__).parents[2] / "tiny_families.json").read_text())
PROMPT, ANSWER, ROOM = (9, 6), 5, 8  # room is beyond the answer, as buckets are
F32 = {"atol": 2e-5, "rtol": 1e-5}  # f32 sums in another order, on states of size 1 to 10


class RandomSource:
    """Named tensors of a model's shapes."""

    origin = "random weights"

    def __init__(self, cfg):
        self.shapes = {weight.name: weight.shape for weight in hf_weights(cfg)}
        self._offset = cfg.norm_offset

    def read(self, name):
        rng = np.random.default_rng(list(name.encode()))
        noise = rng.normal(0, 0.2, self.shapes[name]).astype(np.float32)
        return noise + (1 - self._offset if "norm" in name else 0)


def random_model(hf, **options):
    cfg = decoder_config(hf)
    return load_decoder(cfg, RandomSource(cfg), dtype="float32", **options)


def test_every_family_is_here():
    assert {entry["model_type"] for entry in TINY.values()} == set(FAMILIES)


@pytest.mark.parametrize("name", TINY)
def test_cached_decoding_and_packing_equal_the_full_pass(name):
    """Two prompts of different lengths in one padded batch, continued; the same rows whole; both packed into one."""
    model = random_model(TINY[name])
    graphdef, state = nnx.split(model)
    rng = np.random.default_rng(0)
    lengths = [prompt + ANSWER for prompt in PROMPT]
    rows = np.zeros((2, max(lengths)), np.int32)
    for row, length in enumerate(lengths):
        rows[row, :length] = rng.integers(1, model.cfg.vocab_size, length)
    real = np.arange(rows.shape[1]) < np.asarray(lengths)[:, None]
    positions = np.where(real, np.arange(rows.shape[1]), 0)
    packed = np.concatenate([rows[row, :length] for row, length in enumerate(lengths)])[None]
    documents = np.repeat([1, 2], lengths)[None]
    restarted = np.concatenate([np.arange(length) for length in lengths])[None]
    context = np.asarray(PROMPT) + ROOM

    @jax.jit
    def compute(state):
        model = nnx.merge(graphdef, state)

        def logits(*args, **options):
            return model.logits(model(*args, **options))

        prompts = jnp.asarray(rows[:, : max(PROMPT)])
        segments = (np.arange(max(PROMPT)) < np.asarray(PROMPT)[:, None]).astype(np.int32)
        cache = empty_cache(model.cfg, 2, max(PROMPT) + ROOM, jnp.float32)
        hidden, cache = model.cached(prompts, cache, segment_ids_BT=segments)

        def turn(cache, _):
            token = jnp.take_along_axis(jnp.asarray(rows), cache.length[:, None], axis=1)
            hidden, cache = model.cached(token, cache)
            return cache, model.logits(hidden[:, 0])

        cache, answers = jax.lax.scan(turn, cache, None, ANSWER)
        return {
            "prompt": model.logits(hidden),
            "answer": answers,
            "context": cache.context,
            "full": logits(rows, segment_ids_BT=real.astype(np.int32), positions_BT=positions, context_B=context),
            "rows": logits(rows, positions_BT=positions),
            "packed": logits(packed, segment_ids_BT=documents, positions_BT=restarted),
        }

    found = jax.device_get(compute(state))
    np.testing.assert_array_equal(found["context"], context)
    assert np.ptp(found["full"]) > 1  # random enough for a wrong layer to show
    for row, (prompt, length) in enumerate(zip(PROMPT, lengths)):
        np.testing.assert_allclose(found["prompt"][row, :prompt], found["full"][row, :prompt], **F32)
        np.testing.assert_allclose(found["answer"][:, row], found["full"][row, prompt:length], **F32)
        start = sum(lengths[:row])
        np.testing.assert_allclose(found["packed"][0, start : start + length], found["rows"][row, :length], **F32)
    if not any(rope.by_length for rope in model.cfg.ropes):
        np.testing.assert_allclose(found["full"][0], found["rows"][0], **F32)


@pytest.mark.parametrize("method", ["qlora", "full"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_step_trains(name, method):
    """The update lowers the loss of its own batch, and every trained weight takes part; two layers, of each kind."""
    hf = TINY[name] | {"num_hidden_layers": 2}
    hf |= {key: hf[key][1:] for key in ("layer_types", "no_rope_layers") if key in hf}
    model = random_model(hf, quantize_nf4=method == "qlora")
    if method == "full":
        train_all(model)
    else:
        attach(model, LoraSpec(rank=4, alpha=8.0), key=jax.random.key(0))
    graphdef, params, frozen = split_model(model)
    optimizer = optax.sgd(1e-3)
    step = jax.jit(make_step(graphdef, optimizer, StepSettings(seed=0, max_grad_norm=1.0)))
    tokens = np.random.default_rng(1).integers(1, model.cfg.vocab_size, (1, 1, 12), dtype=np.int32)
    ones = np.ones(tokens.shape, np.int32)
    batch = {
        "tokens": tokens,
        "targets": np.roll(tokens, -1, axis=-1),
        "loss_weights": ones.astype(np.float32),
        "segment_ids": ones,
        "positions": np.broadcast_to(np.arange(12, dtype=np.int32), tokens.shape),
    }
    state = init_state(params, optimizer, None)
    losses = []
    for _ in range(3):
        before, (state, metrics) = state, step(state, frozen, batch)
        losses.append(float(metrics["loss"]))
    assert losses[2] < losses[1] < losses[0]
    still = [  # after the second step: adapters' A has no gradient while B is zero
        jax.tree_util.keystr(path)
        for path, changed in jax.tree_util.tree_leaves_with_path(
            jax.tree.map(lambda a, b: bool((a != b).any()), before.params, state.params)
        )
        if not changed
    ]
    assert still == []
