import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gymjax.adapters.lora import LoraB, LoraSpec, attach
from gymjax.inference import decode as programs
from gymjax.inference.sample import Sampling
from gymjax.models.decoder import Decoder

PROMPTS = [[5], list(range(40, 57)), [9, 200, 3, 77, 12, 250, 8], list(range(100, 110))]
NEW = 10


@functools.partial(jax.jit, static_argnums=0)
def last_logits(graphdef, state, tokens, end):
    model = nnx.merge(graphdef, state)
    return model.logits(model(tokens[None])[0, end])


def naive(model, prompt, new):
    """Greedy tokens by a full forward pass for each of them; causal attention never looks at the zeros behind."""
    tokens = np.zeros(32, np.int32)
    tokens[: len(prompt)] = prompt
    for end in range(len(prompt), len(prompt) + new):
        tokens[end] = last_logits(*nnx.split(model), tokens, end - 1).argmax()
    return tokens[len(prompt) : len(prompt) + new].tolist()


def greedy(model, prompts, new=NEW, stops=()):
    graphdef, state = nnx.split(model)
    tokens, segment_ids = programs.pad_prompts(prompts)
    keys = jax.random.split(jax.random.key(0), len(tokens))
    stops = programs.pad_stops(stops)
    answers = programs.prefill(graphdef, state, tokens, segment_ids, keys, stops, Sampling(), room=programs.bucket(new))
    answers = programs.decode(graphdef, state, answers, stops, Sampling(), new)
    return [row[:made].tolist() for row, made in zip(np.asarray(answers.tokens), np.asarray(answers.made))], answers


def test_cached_greedy_equals_repeated_full_forward(any_model):
    ours, _ = greedy(any_model, PROMPTS)
    assert ours == [naive(any_model, prompt, NEW) for prompt in PROMPTS]


def test_a_batch_gives_what_its_rows_give_alone(model):
    together, _ = greedy(model, PROMPTS)
    assert together == [greedy(model, [prompt])[0][0] for prompt in PROMPTS]


def test_bf16_model_keeps_its_cache_in_bf16(make_model):
    model = make_model(dtype=jnp.bfloat16)
    _, answers = greedy(model, PROMPTS[:2])
    assert {leaf.dtype for leaf in jax.tree.leaves((answers.cache.k, answers.cache.v))} == {jnp.dtype(jnp.bfloat16)}


def test_adapters_take_part(make_model):
    model = make_model()
    base, _ = greedy(model, PROMPTS)
    attach(model, LoraSpec(rank=4, alpha=8.0), key=jax.random.key(1))
    assert greedy(model, PROMPTS)[0] == base  # b is zero
    noise = jax.tree.map(lambda b: b + 0.3 * jax.random.normal(jax.random.key(2), b.shape), nnx.state(model, LoraB))
    nnx.update(model, noise)
    ours, _ = greedy(model, PROMPTS)
    assert ours != base
    assert ours == [naive(model, prompt, NEW) for prompt in PROMPTS]


def test_stop_tokens_end_rows_and_the_loop(model):
    free, _ = greedy(model, PROMPTS, new=16)
    stop = free[1][3]
    ours, answers = greedy(model, PROMPTS, new=16, stops=(stop, 271))
    for row, whole in zip(ours, free):
        assert row == whole[: whole.index(stop) + 1 if stop in whole else None]
    assert answers.tokens[1, len(ours[1]) :].tolist() == [programs.NO_TOKEN] * (16 - len(ours[1]))
    _, answers = greedy(model, [PROMPTS[1]], new=16, stops=(stop,))
    assert int(answers.step) == len(ours[1])  # nothing is computed after the last row has finished


def test_rows_of_padding_are_finished_from_the_start(model):
    _, answers = greedy(model, [*PROMPTS, [3]])
    assert answers.made.tolist() == [NEW] * 5 + [0]
    assert answers.finished.tolist() == [False] * 5 + [True]


def test_same_buckets_compile_nothing_new(model, monkeypatch):
    traces = []
    cached = Decoder.cached
    monkeypatch.setattr(Decoder, "cached", lambda *args, **options: traces.append(1) or cached(*args, **options))
    jax.clear_caches()
    greedy(model, [[1, 2, 3], [4]], new=5)
    first = len(traces)
    assert first >= 2
    greedy(model, [list(range(16)), [7, 8]], new=11)
    greedy(model, [[1], [2, 3]], new=16, stops=(3, 4, 5))
    assert len(traces) == first
    greedy(model, [list(range(17))], new=5)
    assert len(traces) > first


def test_weights_are_arguments_of_the_program(model):
    graphdef, state = nnx.split(model)
    tokens, segment_ids = programs.pad_prompts(PROMPTS)
    keys = jax.random.split(jax.random.key(0), len(tokens))
    stops = programs.pad_stops(())
    answers = programs.prefill(graphdef, state, tokens, segment_ids, keys, stops, Sampling(), room=16)
    text = programs.decode.lower(graphdef, state, answers, stops, Sampling(), 9).as_text()
    largest = max(leaf.size for leaf in jax.tree.leaves(state))
    constants = [line for line in text.splitlines() if 'stablehlo.constant dense<"0x' in line]
    assert all(len(line) < largest for line in constants)


def test_prompts_are_padded_on_the_right_to_buckets():
    tokens, segment_ids = programs.pad_prompts([[3, 4], list(range(1, 18)), [9], [9], [9]])
    assert tokens.shape == (6, 24)
    assert tokens[0, :3].tolist() == [3, 4, 0]
    assert segment_ids.sum(1).tolist() == [2, 17, 1, 1, 1, 0]
    assert [programs.bucket(n, smallest=1) for n in (1, 2, 3, 4, 5, 7, 9)] == [1, 2, 3, 4, 6, 8, 12]
    assert [programs.bucket(n) for n in (1, 16, 17, 25, 33, 49, 1000, 1025)] == [16, 16, 24, 32, 48, 64, 1024, 1536]
    assert programs.pad_stops(range(9)).tolist() == [*range(9), *[programs.NO_TOKEN] * 7]


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature_is_no_constant_of_the_program(model, monkeypatch, temperature):
    graphdef, state = nnx.split(model)
    traces = []
    trunk = Decoder.trunk
    tokens, segment_ids = programs.pad_prompts(PROMPTS)
    keys = jax.random.split(jax.random.key(0), len(tokens))
    stops = programs.pad_stops(())

    def run(temperature):
        how = Sampling(temperature=jnp.float32(temperature), greedy=False)
        return programs.prefill(graphdef, state, tokens, segment_ids, keys, stops, how, room=16)

    run(1.5)
    monkeypatch.setattr(Decoder, "trunk", lambda *args, **options: traces.append(1) or trunk(*args, **options))
    run(temperature)
    assert not traces
