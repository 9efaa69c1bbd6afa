"""From prompts to token ids, through the code that writes the training text, and the tokens that end an answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gymjax.config import GenerateConfig
from gymjax.data.chat import Encoder
from gymjax.data.errors import DataError
from gymjax.data.template import chat_template

Messages = Sequence[Mapping[str, Any]]
Prompt = str | Messages


def encode(
    tokenizer: Any,
    prompts: Sequence[Prompt],
    *,
    template: str | None = None,
    default_system: str | None = None,
    names: Sequence[str] | None = None,
) -> list[list[int]]:
    """Token ids of prompts.

    Args:
        tokenizer: a Hugging Face fast tokenizer.
        prompts: texts to continue, tokenized with the tokenizer's own BOS; or conversations ({"role", "content"} each)
            to answer, written by the chat template, which brings its own special tokens.
        template: which chat template, as in training; None for the tokenizer's own.
        default_system: system text of conversations that have none.
        names: of the prompts in errors; None for their numbers.

    Raises:
        ValueError: a prompt is empty, or the template refuses it; the message says which.
    """
    encoder = None
    ids = []
    for name, prompt in zip(names or numbered(len(prompts)), prompts, strict=True):
        if isinstance(prompt, str):
            ids.append(tokenizer(prompt, verbose=False)["input_ids"] if prompt else [])
        else:
            encoder = encoder or Encoder(
                tokenizer, chat_template(tokenizer, template)[0], default_system=default_system
            )
            _check_turns(prompt, name)
            try:
                ids.append(encoder.prompt(prompt) if prompt else [])
            except DataError as error:
                raise DataError(f"{name}: {error}") from error
        if not ids[-1]:
            raise ValueError(f"{name}: the prompt is empty; give it at least one token")
    return ids


def numbered(count: int) -> list[str]:
    """Names of prompts that come from no file."""
    return [f"prompt {number} of {count}" for number in range(1, count + 1)]


def _check_turns(messages: Messages, name: str) -> None:
    for turn in messages:
        if not isinstance(turn, Mapping) or not {"role", "content"} <= set(turn):
            raise ValueError(f"{name}: a turn must have role and content, found {turn!r:.80}")


def stop_tokens(
    tokenizer: Any,
    *,
    generation_eos: int | Iterable[int] | None = None,
    template: str | None = None,
    texts: Iterable[str] = (),
) -> tuple[int, ...]:
    """Tokens that end an answer: the tokenizer's EOS, those of generation_config.json, the template's end of a turn.

    Args:
        tokenizer: a Hugging Face fast tokenizer.
        generation_eos: `eos_token_id` of generation_config.json.
        template: which chat template, as in training.
        texts: stop texts; those that are one special token, which text never shows, count as tokens.
    """
    found = {tokenizer.eos_token_id}
    found |= {generation_eos} if isinstance(generation_eos, int) else set(generation_eos or ())
    if template is not None or getattr(tokenizer, "chat_template", None):
        found.add(_end_of_turn(tokenizer, template))
    special = {str(token): number for number, token in tokenizer.added_tokens_decoder.items()}
    found |= {special.get(text) for text in texts}
    return tuple(sorted(found - {None}))


def _end_of_turn(tokenizer: Any, template: str | None) -> int | None:
    """The special token that the template writes right after what the assistant says, if it writes one."""
    said = "4711"
    turns = [{"role": "user", "content": "0815"}, {"role": "assistant", "content": said}]
    try:
        text = chat_template(tokenizer, template)[0].render(turns)
    except DataError:  # texts can be continued all the same; a conversation meets the error when it is encoded
        return None
    _, found, after = text.rpartition(said)
    ids = tokenizer(after.lstrip(), add_special_tokens=False)["input_ids"] if found else []
    return ids[0] if ids and ids[0] in tokenizer.added_tokens_decoder else None


def check_length(
    ids: Sequence[Sequence[int]], settings: GenerateConfig, max_positions: int, names: Sequence[str] | None = None
) -> None:
    """Checks that prompts and their answers fit into the model's positions.

    Raises:
        ValueError: one does not; the message has both numbers and the remedy.
    """
    for name, prompt in zip(names or numbered(len(ids)), ids, strict=True):
        if len(prompt) + settings.max_new_tokens > max_positions:
            room = max_positions - len(prompt)
            remedy = f"set max_new_tokens to {room} or less" if room > 0 else "shorten the prompt"
            raise ValueError(
                f"{name}: {len(prompt)} tokens + max_new_tokens {settings.max_new_tokens} = "
                f"{len(prompt) + settings.max_new_tokens} exceeds the model's {max_positions} positions; {remedy}"
            )
