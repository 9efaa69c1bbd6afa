"""Answers to prompts: whole, or streamed piece by piece."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from gymjax.config import GenerateConfig
from gymjax.inference.decode import Answers, bucket, decode, pad_prompts, pad_stops, prefill
from gymjax.inference.prompts import Prompt, check_length, encode, stop_tokens
from gymjax.inference.sample import Sampling, sampling
from gymjax.inference.text import find_stop, settled, to_text
from gymjax.models.decoder import Decoder

_STOP_CHECK = 16  # tokens between two looks for stop texts


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a model said.

    Attributes:
        text: without special tokens; cut where a stop text began.
        token_ids: all tokens made, a stop token included.
        finish_reason: "stop" for a stop token or text, "length" for max_new_tokens.
        prompt_tokens: tokens of the prompt.
    """

    text: str
    token_ids: list[int]
    finish_reason: Literal["stop", "length"]
    prompt_tokens: int


def generate(
    model: Decoder,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    settings: GenerateConfig,
    *,
    seed: int = 0,
    template: str | None = None,
    default_system: str | None = None,
    generation_eos: int | Sequence[int] | None = None,
    batch_size: int = 8,
    attention: str | None = None,
    names: Sequence[str] | None = None,
    on_batch: Callable[[dict[int, Answer]], None] | None = None,
) -> list[Answer]:
    """Answers prompts of any lengths in batches; an answer depends on its prompt, place and seed, not on its batch.

    Args:
        model: a decoder, with adapters or not, its base packed or not.
        tokenizer: a Hugging Face fast tokenizer.
        prompts: texts to continue, or conversations to answer ([{"role": "user", "content": "..."}]).
        settings: how tokens are chosen, how many, and texts that end an answer.
        seed: randomness; the same seed gives the same answers.
        template: chat template, as in training; None for the tokenizer's own.
        default_system: system text of conversations that have none.
        generation_eos: `eos_token_id` of the model's generation_config.json, in addition to the tokenizer's own.
        batch_size: prompts answered at a time.
        attention: flash-attention implementation of the prefill; None for the fastest.
        names: of the prompts in errors, such as "file:line"; None for their numbers.
        on_batch: called with each batch's answers by the numbers of their prompts, as soon as they are there; prompts
            of alike lengths come together.

    Returns:
        One answer a prompt, in the order of the prompts.

    Raises:
        ValueError: an empty prompt, a prompt and answer beyond the model's positions, a setting out of its range.
    """
    ids = encode(tokenizer, prompts, template=template, default_system=default_system, names=names)
    run = _start(model, tokenizer, ids, settings, seed, template, generation_eos, attention, names)
    order = sorted(range(len(ids)), key=lambda number: len(ids[number]))  # alike lengths waste little padding
    chunk = _STOP_CHECK if settings.stop else settings.max_new_tokens
    answers: dict[int, Answer] = {}
    for start in range(0, len(ids), batch_size):
        numbers = order[start : start + batch_size]
        *_, (batch, _) = _partial_answers(run, [ids[number] for number in numbers], numbers, chunk)
        made = dict(zip(numbers, batch))
        answers |= made
        if on_batch is not None:
            on_batch(made)
    return [answers[number] for number in range(len(ids))]


def stream(
    model: Decoder,
    tokenizer: Any,
    prompt: Prompt,
    settings: GenerateConfig,
    *,
    seed: int = 0,
    template: str | None = None,
    default_system: str | None = None,
    generation_eos: int | Sequence[int] | None = None,
    chunk: int = 8,
    attention: str | None = None,
) -> Generator[str, None, Answer]:
    """Answers one prompt and yields its text as it comes; the generator's return value is the whole Answer.

    The pieces joined equal `generate`'s text of the same arguments. The token loop runs `chunk` tokens a time on the
    device; other arguments and errors are those of `generate`.
    """
    ids = encode(tokenizer, [prompt], template=template, default_system=default_system)
    run = _start(model, tokenizer, ids, settings, seed, template, generation_eos, attention)
    answer, shown = None, 0
    for (answer,), ended in _partial_answers(run, ids, [0], chunk):
        end = len(answer.text) if ended else settled(answer.text, settings.stop)
        if end > shown:
            yield answer.text[shown:end]
            shown = end
    return answer


@dataclasses.dataclass(frozen=True)
class _Run:
    """What the batches of one call share."""

    graphdef: nnx.GraphDef
    state: nnx.State
    tokenizer: Any
    settings: GenerateConfig
    how: Sampling
    stop_ids: tuple[int, ...]
    stops: Array
    key: jax.Array
    attention: str | None


def _start(model, tokenizer, ids, settings, seed, template, generation_eos, attention, names=None) -> _Run:
    how = sampling(settings)
    check_length(ids, settings, model.cfg.max_positions, names)
    stop_ids = stop_tokens(tokenizer, generation_eos=generation_eos, template=template, texts=settings.stop)
    graphdef, state = nnx.split(model)
    stops, key = jnp.asarray(pad_stops(stop_ids)), jax.random.key(seed)
    return _Run(graphdef, state, tokenizer, settings, how, stop_ids, stops, key, attention)


def _partial_answers(
    run: _Run, prompts: Sequence[Sequence[int]], numbers: Sequence[int], chunk: int
) -> Iterator[tuple[list[Answer], bool]]:
    """A batch's answers after its first token and after every `chunk` more, and whether they have ended."""
    tokens_BT, segment_ids_BT = pad_prompts(prompts)
    numbers_B = np.resize(np.asarray(numbers, np.uint32), len(tokens_BT))
    keys_B = jax.vmap(jax.random.fold_in, (None, 0))(run.key, numbers_B)
    limit = run.settings.max_new_tokens
    state = prefill(
        run.graphdef, run.state, tokens_BT, segment_ids_BT, keys_B, run.stops, run.how,
        room=bucket(limit), attention=run.attention,
    )  # fmt: skip
    made = 1
    while True:
        answers = _read(run, state, prompts)
        finished = [answer.finish_reason == "stop" for answer in answers]
        ended = made == limit or all(finished)
        yield answers, ended
        if ended:
            return
        if run.settings.stop:
            finished_B = np.array(finished + [True] * (len(tokens_BT) - len(prompts)))
            state = dataclasses.replace(state, finished=jnp.asarray(finished_B))
        made = min(made + chunk, limit)
        state = decode(run.graphdef, run.state, state, run.stops, run.how, jnp.int32(made))


def _read(run: _Run, state: Answers, prompts: Sequence[Sequence[int]]) -> list[Answer]:
    """The answers so far, on the host."""
    tokens, made, finished = jax.device_get((state.tokens, state.made, state.finished))
    return [
        _answer(run, tokens[row, : made[row]].tolist(), bool(finished[row]), len(prompt))
        for row, prompt in enumerate(prompts)
    ]


def _answer(run: _Run, ids: list[int], finished: bool, prompt_tokens: int) -> Answer:
    stopped = finished and ids[-1] in run.stop_ids
    text = to_text(run.tokenizer, ids[:-1] if stopped else ids)
    if find_stop(text, run.settings.stop) < 0:
        return Answer(text, ids, "stop" if finished else "length", prompt_tokens)
    # What was made before the text was seen goes first: an earlier stop text may end in it.
    while find_stop(shorter := to_text(run.tokenizer, ids[:-1]), run.settings.stop) >= 0:
        ids, text = ids[:-1], shorter
    return Answer(text[: find_stop(text, run.settings.stop)], ids, "stop", prompt_tokens)
