"""Choosing the next token: logit processors in the order transformers applies them, then greedy or random choice."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from gymjax.config import GenerateConfig

_MASKED = -jnp.inf


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a token is chosen. A processor that is None is left out of the program; values that are set are traced.

    Attributes:
        temperature: () f32, divides the logits.
        top_p: () f32, probability mass of the smallest set of likeliest tokens that stays.
        min_p: () f32, share of the likeliest token's probability below which a token goes.
        repetition_penalty: () f32, above 1 makes tokens that already occurred less likely.
        top_k: number of likeliest tokens that stay; 0 for all.
        greedy: take the likeliest token; of the processors only the repetition penalty applies.
    """

    temperature: Float[Array, ""] | None = None
    top_p: Float[Array, ""] | None = None
    min_p: Float[Array, ""] | None = None
    repetition_penalty: Float[Array, ""] | None = None
    top_k: int = dataclasses.field(default=0, metadata={"static": True})
    greedy: bool = dataclasses.field(default=True, metadata={"static": True})


def sampling(settings: GenerateConfig) -> Sampling:
    """Sampling of a configuration; settings that change nothing are left out.

    Raises:
        ValueError: a value out of its range; the message names the key.
    """
    check(settings)
    penalty = None if settings.repetition_penalty == 1 else jnp.float32(settings.repetition_penalty)
    if not settings.do_sample or settings.temperature == 0:
        return Sampling(repetition_penalty=penalty)
    return Sampling(
        temperature=None if settings.temperature == 1 else jnp.float32(settings.temperature),
        top_p=None if settings.top_p == 1 else jnp.float32(settings.top_p),
        min_p=None if settings.min_p == 0 else jnp.float32(settings.min_p),
        repetition_penalty=penalty,
        top_k=settings.top_k,
        greedy=False,
    )


def check(settings: GenerateConfig) -> None:
    """Checks the ranges of what is sampled with.

    Raises:
        ValueError: a value out of its range; the message names the key, the value and the range.
    """
    ranges = {
        "temperature": (settings.temperature >= 0, "at least 0 (0 is greedy)"),
        "top_p": (0 < settings.top_p <= 1, "above 0 and at most 1 (1 keeps all tokens)"),
        "top_k": (settings.top_k >= 0, "at least 0 (0 keeps all tokens)"),
        "min_p": (0 <= settings.min_p <= 1, "between 0 and 1 (0 keeps all tokens)"),
        "repetition_penalty": (settings.repetition_penalty > 0, "above 0 (1 changes nothing)"),
        "max_new_tokens": (settings.max_new_tokens >= 1, "at least 1"),
    }
    for name, (good, wanted) in ranges.items():
        if not good:
            raise ValueError(f"{name} must be {wanted}, is {getattr(settings, name)}")
    if any(not text for text in settings.stop):
        raise ValueError("stop must hold texts of at least one character; an empty text would end every answer")


def penalize_repeats(
    logits: Float[Array, "B V"], seen: Bool[Array, "B V"], penalty: Float[Array, ""]
) -> Float[Array, "B V"]:
    """Divides positive and multiplies negative logits of tokens that occurred (arXiv 1909.05858, section 4.1)."""
    return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


def keep_top_k(logits: Float[Array, "B V"], k: int) -> Float[Array, "B V"]:
    """Masks all but the k likeliest tokens; tokens that tie with the k-th stay, as in transformers."""
    if k <= 0 or k >= logits.shape[-1]:
        return logits
    kth_B1 = jax.lax.top_k(logits, k)[0][:, -1:]
    return jnp.where(logits < kth_B1, _MASKED, logits)


def keep_top_p(logits: Float[Array, "B V"], p: Float[Array, ""], *, left: int = 0) -> Float[Array, "B V"]:
    """Masks all but the smallest set of likeliest tokens whose probabilities reach p (arXiv 1904.09751, eq. 2).

    The likeliest token always stays; of tokens with equal logits that straddle the border, all stay.

    Args:
        logits: scores, -inf where masked.
        p: probability mass to keep, above 0.
        left: tokens that keep_top_k left unmasked, ties apart; saves sorting the vocabulary. 0 for all.
    """
    size = left if 0 < left < logits.shape[-1] else 0
    sorted_BC = jax.lax.top_k(logits, size)[0] if size else jnp.sort(logits, axis=-1, descending=True)
    probs_BC = jnp.exp(sorted_BC - jax.nn.logsumexp(logits, axis=-1, keepdims=True))
    before_BC = jnp.cumsum(probs_BC, axis=-1) - probs_BC  # mass of the likelier tokens
    kept_B1 = jnp.sum(before_BC < p, axis=-1, keepdims=True)
    least_B1 = jnp.take_along_axis(sorted_BC, jnp.maximum(kept_B1 - 1, 0), axis=-1)
    return jnp.where(logits < least_B1, _MASKED, logits)


def keep_min_p(logits: Float[Array, "B V"], p: Float[Array, ""]) -> Float[Array, "B V"]:
    """Masks tokens less likely than p times the likeliest (arXiv 2407.01082, section 3)."""
    floor_B1 = jnp.max(logits, axis=-1, keepdims=True) + jnp.log(p)
    return jnp.where(logits < floor_B1, _MASKED, logits)


def process(logits: Float[Array, "B V"], how: Sampling, seen: Bool[Array, "B V"] | None = None) -> Float[Array, "B V"]:
    """Applies repetition penalty, temperature, top-k, top-p and min-p, in this order, in f32.

    Args:
        logits: scores of the next token.
        how: processors to apply.
        seen: tokens of the prompt and the answer so far; needed with a repetition penalty.

    Returns:
        Scores, -inf where a token may not be chosen.

    Raises:
        ValueError: a repetition penalty without `seen`.
    """
    logits = logits.astype(jnp.float32)
    if how.repetition_penalty is not None:
        if seen is None:
            raise ValueError("a repetition penalty needs `seen`, the tokens that occurred")
        logits = penalize_repeats(logits, seen, how.repetition_penalty)
    if how.greedy:
        return logits
    if how.temperature is not None:
        logits = logits / how.temperature
    logits = keep_top_k(logits, how.top_k)
    if how.top_p is not None:
        logits = keep_top_p(logits, how.top_p, left=how.top_k)
    if how.min_p is not None:
        logits = keep_min_p(logits, how.min_p)
    return logits


def choose(
    logits: Float[Array, "B V"], how: Sampling, keys: Key[Array, " B"], seen: Bool[Array, "B V"] | None = None
) -> Int[Array, " B"]:
    """One token a row: the likeliest, or one drawn from the softmax of the processed logits.

    Args:
        logits: scores of the next token.
        how: processors to apply.
        keys: randomness of each row, so that a row's answer does not depend on its neighbours.
        seen: as in `process`.

    Returns:
        int32 tokens.
    """
    scores_BV = process(logits, how, seen)
    if how.greedy:
        return jnp.argmax(scores_BV, axis=-1).astype(jnp.int32)
    return jax.vmap(jax.random.categorical)(keys, scores_BV).astype(jnp.int32)
