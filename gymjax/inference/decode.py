"""Prefill and the token loop: two compiled programs that serve every call whose sizes fall into the same buckets."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from gymjax.inference.sample import Sampling, choose
from gymjax.models.decoder import Decoder, KVCache, empty_cache
from pallas_kernels import Implementation

_STOP_SLOTS = 8
NO_TOKEN = -1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Answers:
    """A batch of answers under way; every part lives on the device.

    Attributes:
        cache: keys and values of the prompts and of all answer tokens but the last.
        tokens: (B, N) int32, the answers so far, NO_TOKEN where there is none (yet).
        last: (B,) int32, newest token of each row.
        made: (B,) int32, tokens of each answer, its stop token included.
        finished: (B,) bool, rows that met a stop token.
        step: () int32, tokens that the longest answer has.
        keys: (B,) randomness of each row; a token's own is folded in from its place.
        seen: (B, V) bool, tokens of prompt and answer; None without a repetition penalty.
    """

    cache: KVCache
    tokens: Int[Array, "B N"]
    last: Int[Array, " B"]
    made: Int[Array, " B"]
    finished: Bool[Array, " B"]
    step: Int[Array, ""]
    keys: Key[Array, " B"]
    seen: Bool[Array, "B V"] | None


def bucket(size: int, smallest: int = 16) -> int:
    """The smallest of n, 1.5n, 2n, 3n, 4n, 6n, ... that holds `size` (n = smallest), so that few sizes are compiled."""
    step = smallest
    while step < size:
        step *= 2
    middle = step * 3 // 4
    return middle if middle > smallest and size <= middle else step


def pad_prompts(prompts: Sequence[Sequence[int]]) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, "B T"]]:
    """Right-pads prompts to bucketed sizes.

    Args:
        prompts: token ids of each prompt.

    Returns:
        Tokens, and segment ids that are 1 on tokens and 0 on padding. Rows beyond the prompts are all padding.
    """
    rows = bucket(len(prompts), smallest=1)
    tokens_BT = np.zeros((rows, bucket(max(map(len, prompts)))), np.int32)
    segment_ids_BT = np.zeros_like(tokens_BT)
    for row, prompt in enumerate(prompts):
        tokens_BT[row, : len(prompt)] = prompt
        segment_ids_BT[row, : len(prompt)] = 1
    return tokens_BT, segment_ids_BT


def pad_stops(stop_ids: Sequence[int]) -> Int[np.ndarray, " n"]:
    """Stop tokens in an array whose size rarely changes, NO_TOKEN in the free places."""
    slots = -(-max(len(stop_ids), 1) // _STOP_SLOTS) * _STOP_SLOTS
    return np.array([*stop_ids, *[NO_TOKEN] * (slots - len(stop_ids))], np.int32)


@functools.partial(jax.jit, static_argnames=("graphdef", "room", "attention"))
def prefill(
    graphdef: nnx.GraphDef,
    state: nnx.State,
    tokens: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    keys: Key[Array, " B"],
    stops: Int[Array, " n"],
    how: Sampling,
    *,
    room: int,
    attention: Implementation | None = None,
) -> Answers:
    """Reads right-padded prompts into a fresh cache and chooses the first token of each answer.

    Args:
        graphdef: structure of the decoder.
        state: its weights, adapters included; arguments of the program, never constants in it.
        tokens: prompts.
        segment_ids: 1 on tokens, 0 on padding; a row of padding alone is finished from the start.
        keys: randomness of each row.
        stops: tokens that end an answer, from `pad_stops`.
        how: choice of tokens.
        room: N, tokens that an answer may have.
        attention: flash-attention implementation; None for the fastest.
    """
    model: Decoder = nnx.merge(graphdef, state)
    B, T = tokens.shape
    cache = empty_cache(model.cfg, B, T + room, model.compute_dtype)
    hidden_BTD, cache = model.cached(tokens, cache, segment_ids_BT=segment_ids, attention=attention)
    last_B1 = jnp.maximum(cache.length - 1, 0)[:, None, None]
    logits_BV = model.logits(jnp.take_along_axis(hidden_BTD, last_B1, axis=1)[:, 0])
    seen_BV = None
    if how.repetition_penalty is not None:
        rows_B1 = jnp.arange(B)[:, None]
        seen_BV = jnp.zeros(logits_BV.shape, bool).at[rows_B1, tokens].max(segment_ids != 0)
    answers = Answers(
        cache=cache,
        tokens=jnp.full((B, room), NO_TOKEN, jnp.int32),
        last=jnp.zeros(B, jnp.int32),
        made=jnp.zeros(B, jnp.int32),
        finished=cache.length == 0,
        step=jnp.int32(0),
        keys=keys,
        seen=seen_BV,
    )
    return _add_token(answers, logits_BV, stops, how)


@functools.partial(jax.jit, static_argnames=("graphdef",), donate_argnames=("answers",))
def decode(
    graphdef: nnx.GraphDef,
    state: nnx.State,
    answers: Answers,
    stops: Int[Array, " n"],
    how: Sampling,
    until: Int[Array, ""],
) -> Answers:
    """Continues answers, one token a row and turn, until each is finished or has `until` tokens.

    The whole loop is one program; the cache is updated in place and the host reads nothing before the end.
    """
    model: Decoder = nnx.merge(graphdef, state)

    def unfinished(answers: Answers) -> Bool[Array, ""]:
        return (answers.step < until) & ~jnp.all(answers.finished)

    def turn(answers: Answers) -> Answers:
        hidden_B1D, cache = model.cached(answers.last[:, None], answers.cache)
        answers = dataclasses.replace(answers, cache=cache)
        return _add_token(answers, model.logits(hidden_B1D[:, 0]), stops, how)

    return jax.lax.while_loop(unfinished, turn, answers)


def _add_token(answers: Answers, logits_BV: Float[Array, "B V"], stops: Int[Array, " n"], how: Sampling) -> Answers:
    """Chooses a token for every row; rows that are finished keep what they have."""
    keys_B = jax.vmap(jax.random.fold_in, (0, None))(answers.keys, answers.step)
    token_B = choose(logits_BV, how, keys_B, answers.seen)
    live_B = ~answers.finished
    seen_BV = answers.seen
    if seen_BV is not None:
        seen_BV = seen_BV.at[jnp.arange(token_B.shape[0]), token_B].set(True)
    return dataclasses.replace(
        answers,
        tokens=answers.tokens.at[:, answers.step].set(jnp.where(live_B, token_B, NO_TOKEN)),
        last=token_B,
        made=answers.made + live_B,
        finished=answers.finished | jnp.any(token_B[:, None] == stops, axis=-1),
        step=answers.step + 1,
        seen=seen_BV,
    )
