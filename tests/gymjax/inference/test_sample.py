import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gymjax.config import GenerateConfig
from gymjax.inference import sample

PLAIN = GenerateConfig(temperature=1.0, top_p=1.0, top_k=0)


def probabilities(logits):
    shifted = np.exp(logits - logits.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


def oracle(logits, settings, seen):
    """The definitions in f64, one row and one token at a time."""
    out = logits.astype(np.float64)
    for row, marks in zip(out, seen):
        for v in np.flatnonzero(marks):
            row[v] = row[v] * settings.repetition_penalty if row[v] < 0 else row[v] / settings.repetition_penalty
        row /= settings.temperature
        if settings.top_k:
            kth = np.sort(row)[-min(settings.top_k, len(row))]
            row[row < kth] = -np.inf
        probs, mass = probabilities(row), 0.0
        kept = []
        for v in np.argsort(-row, kind="stable"):
            if mass < settings.top_p:
                kept.append(v)
            mass += probs[v]
        row[np.setdiff1d(np.arange(len(row)), kept)] = -np.inf
        probs = probabilities(row)
        row[probs < settings.min_p * probs.max()] = -np.inf
    return out


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 3},
        {"top_k": 500},
        {"top_p": 0.6},
        {"top_p": 1e-6},
        {"min_p": 0.3},
        {"repetition_penalty": 1.7},
        {"temperature": 1.4, "top_k": 9, "top_p": 0.8, "min_p": 0.1, "repetition_penalty": 0.8},
        {"temperature": 0.7, "top_p": 0.9, "min_p": 0.05},
    ],
    ids=str,
)
def test_processors_follow_their_definitions(changes):
    settings = dataclasses.replace(PLAIN, **changes)
    rng = np.random.default_rng(1)
    logits = rng.normal(0, 2, (5, 23)).astype(np.float32)
    seen = rng.random((5, 23)) < 0.4
    ours = np.asarray(sample.process(jnp.asarray(logits), sample.sampling(settings), jnp.asarray(seen)))
    wanted = oracle(logits, settings, seen)
    assert np.array_equal(np.isinf(ours), np.isinf(wanted))
    np.testing.assert_allclose(ours, wanted, rtol=1e-6)  # one or two f32 roundings each


def test_ties_with_the_kth_token_stay():
    logits = jnp.array([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]])
    kept = np.isfinite(np.asarray(sample.keep_top_k(logits, 3)))
    assert kept.tolist() == [[False, True, True, True, True, False]]


def test_top_p_of_few_tokens_needs_no_sorted_vocabulary():
    logits = jnp.asarray(np.random.default_rng(2).normal(0, 3, (4, 50)), jnp.float32)
    cut = sample.keep_top_k(logits, 7)
    whole, few = (sample.keep_top_p(cut, jnp.float32(0.7), left=left) for left in (0, 7))
    assert np.array_equal(whole, few)
    program = jax.make_jaxpr(lambda x: sample.keep_top_p(x, 0.7, left=7))(cut)
    assert "sort[" not in str(program)


def test_greedy_takes_the_likeliest_after_the_penalty():
    logits = jnp.array([[2.0, 1.5, 0.0]])
    seen = jnp.array([[True, False, False]])
    how = sample.sampling(dataclasses.replace(PLAIN, do_sample=False, repetition_penalty=2.0, top_k=1))
    assert sample.choose(logits, how, jax.random.split(jax.random.key(0), 1), seen).tolist() == [1]
    assert sample.sampling(dataclasses.replace(PLAIN, temperature=0.0)).greedy


def test_drawn_tokens_follow_the_processed_distribution():
    settings = dataclasses.replace(PLAIN, temperature=1.3, top_k=6, top_p=0.95)
    how, draws = sample.sampling(settings), 20000
    logits = np.random.default_rng(3).normal(0, 1.5, (1, 9)).astype(np.float32)
    keys = jax.random.split(jax.random.key(11), draws)
    tokens = np.asarray(sample.choose(jnp.tile(logits, (draws, 1)), how, keys))
    wanted = probabilities(oracle(logits, settings, np.zeros((1, 9), bool)))[0] * draws
    counts = np.bincount(tokens, minlength=9)
    assert not counts[wanted == 0].any()
    kept = wanted > 0
    chi2 = ((counts - wanted)[kept] ** 2 / wanted[kept]).sum()
    assert chi2 < 20.5  # 99.9 % quantile of chi-square with 5 degrees of freedom; the seed is fixed


def test_a_rows_token_depends_on_its_key_alone():
    how = sample.sampling(PLAIN)
    logits = jnp.asarray(np.random.default_rng(4).normal(size=(6, 40)), jnp.float32)
    keys = jax.random.split(jax.random.key(5), 6)
    together = sample.choose(logits, how, keys).tolist()
    alone = [sample.choose(logits[i : i + 1], how, keys[i : i + 1]).item() for i in range(6)]
    assert together == alone


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": -0.1}, "temperature must be at least 0 (0 is greedy), is -0.1"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1 (1 keeps all tokens), is 0.0"),
        ({"top_k": -1}, "top_k must be at least 0 (0 keeps all tokens), is -1"),
        ({"min_p": 1.5}, "min_p must be between 0 and 1 (0 keeps all tokens), is 1.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be above 0 (1 changes nothing), is 0.0"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, is 0"),
        ({"stop": ("a", "")}, "stop must hold texts of at least one character"),
    ],
)
def test_values_out_of_range_are_named(changes, message):
    with pytest.raises(ValueError) as error:
        sample.sampling(dataclasses.replace(PLAIN, **changes))
    assert message in str(error.value)
