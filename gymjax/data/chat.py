"""Conversations and raw text to token ids and loss weights, checked.

The whole conversation is rendered once and tokenized once; masks.py says which of its tokens are trained.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from gymjax.data.conversation import Conversation, Message, RawText
from gymjax.data.errors import DataError
from gymjax.data.masks import (
    Span,
    drop_after_closing,
    spans_by_marks,
    spans_by_prefix,
    tokens_of,
)
from gymjax.data.template import CLOSE_MARK, NO_TEMPLATE, OPEN_MARK, ChatTemplate, adds_special_tokens


@dataclass(frozen=True)
class Example:
    """Token ids of one row, the loss weight of each token as a target, and where the row came from."""

    ids: Int[np.ndarray, " T"]
    weights: Float[np.ndarray, " T"]
    source: str


@dataclass(frozen=True)
class Encoder:
    """Everything that decides how rows become tokens.

    Attributes:
        tokenizer: a Hugging Face fast tokenizer.
        template: its chat template; None where only raw text is encoded.
        train_on_prompt: train every token of conversations and prompts.
        mask_history: train the last answer only.
        default_system: system text for conversations without one.
    """

    tokenizer: Any
    template: ChatTemplate | None = None
    train_on_prompt: bool = False
    mask_history: bool = False
    default_system: str | None = None

    def encode(self, rows: Sequence[Conversation | RawText]) -> list[Example]:
        """Return the examples of some rows, tokenized together.

        Raises:
            DataError: the template refuses a row, or its loss mask would be wrong; names file and line.
        """
        located = [self._locate_raw(row) if isinstance(row, RawText) else self._locate(row) for row in rows]
        encoded = self.tokenizer(
            [text for text, _ in located],
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            verbose=False,
        )
        examples = []
        for row, (text, spans), ids, offsets in zip(rows, located, encoded["input_ids"], encoded["offset_mapping"]):
            ids, offsets = np.array(ids, np.int32), np.array(offsets, np.int64).reshape(-1, 2)
            weights = np.zeros(len(ids), np.float32)
            is_added = np.isin(ids, list(self._added))
            for (_, _, weight), inside in zip(spans, tokens_of(offsets, is_added, spans)):
                if isinstance(row, Conversation) and not self.train_on_prompt:
                    inside = _at(row.source, drop_after_closing, inside, offsets, is_added, text)
                weights[inside] = weight
            if isinstance(row, RawText):
                examples.append(self._finish_raw(row, ids, weights))
            else:
                self._check(row, ids, weights)
                examples.append(Example(ids, weights, row.source))
        return examples

    def prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """Return the ids of a conversation up to where the assistant begins to speak, for generation."""
        if self.template is None:
            raise DataError(NO_TEMPLATE)
        turns = [dict(message) for message in messages]
        if self.default_system and (not turns or turns[0].get("role") != "system"):
            turns.insert(0, {"role": "system", "content": self.default_system})
        text = self.template.render(turns, tools=tools, add_generation_prompt=True)
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    @functools.cached_property
    def _added(self) -> dict[int, str]:
        """Tokens that can end a turn: the tokenizer's added tokens (<|im_end|>, </s>, ...) and EOS."""
        added = {index: token.content for index, token in self.tokenizer.added_tokens_decoder.items()}
        eos = {} if self.tokenizer.eos_token_id is None else {self.tokenizer.eos_token_id: self.tokenizer.eos_token}
        return added | eos

    @functools.cached_property
    def _own_tokens(self) -> tuple[list[int], list[int]]:
        return adds_special_tokens(self.tokenizer)

    def _locate(self, row: Conversation) -> tuple[str, list[Span]]:
        """Return a conversation's text and its trained character spans."""
        if self.template is None:
            raise DataError(f"{row.source}: {NO_TEMPLATE}")
        messages = self._weighted(row)
        _check_text(messages, row, self.template)
        if self.train_on_prompt:
            text = _at(row.source, self.template.render, [turn.fields() for turn in messages], tools=row.tools)
            spans = [(0, len(text), 1.0)]
        elif self.template.marks_generation:
            text, spans = _at(row.source, spans_by_marks, self.template, messages, row.tools)
        else:
            added = tuple(sorted(self._added.values(), key=len, reverse=True))
            text, spans = _at(row.source, spans_by_prefix, self.template, messages, row.tools, added)
        _check_written(text, messages, row.source, self.template)
        return text, spans

    def _weighted(self, row: Conversation) -> tuple[Message, ...]:
        messages = row.messages
        if self.default_system and messages[0].role != "system":
            messages = (Message("system", self.default_system), *messages)
        if not self.mask_history:
            return messages
        history = (Message(turn.role, turn.content, 0.0, turn.extra) for turn in messages[:-1])
        return (*history, messages[-1])

    def _locate_raw(self, row: RawText) -> tuple[str, list[Span]]:
        spans, start = [], 0
        for piece, weight in row.pieces:
            spans.append((start, start + len(piece), 1.0 if self.train_on_prompt else weight))
            start += len(piece)
        return row.text, spans

    def _finish_raw(self, row: RawText, ids: np.ndarray, weights: np.ndarray) -> Example:
        """Put the tokenizer's own first tokens (BOS) before raw text, and EOS after it, where the text lacks them."""
        before, _ = self._own_tokens
        before = [] if len(ids) and before and ids[0] == before[-1] else before
        eos = self.tokenizer.eos_token_id
        if eos is None:
            raise DataError("the tokenizer has no EOS token, so documents cannot be ended; set eos_token in it")
        after = [] if len(ids) and ids[-1] == eos else [eos]
        return Example(
            np.concatenate([np.array(before, np.int32), ids, np.array(after, np.int32)]),
            np.concatenate([np.zeros(len(before), np.float32), weights, np.ones(len(after), np.float32)]),
            row.source,
        )

    def _check(self, row: Conversation, ids: np.ndarray, weights: np.ndarray) -> None:
        bos = self.tokenizer.bos_token_id
        if bos is not None and len(ids) > 1 and ids[0] == ids[1] == bos:
            raise DataError(
                f"{row.source}: the text begins with two BOS tokens ({self.tokenizer.bos_token}); "
                "the chat template writes one, remove the other from the template or from the row"
            )
        scored = weights[1:] if len(ids) and ids[0] == bos else weights
        others = any(turn.role != "assistant" for turn in row.messages)
        if others and not self.train_on_prompt and len(scored) and np.all(scored > 0):
            raise DataError(
                f"{row.source}: every token would be trained although the row has turns that are not the assistant's; "
                "move the template's {% generation %} tags around the answers, or set train_on_prompt: true to train "
                "them all"
            )


def _at[**P, T](source: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function; its DataError gets the row's file and line in front."""
    try:
        return function(*args, **kwargs)
    except DataError as error:
        raise DataError(f"{source}: {error}") from error


def _check_text(messages: Sequence[Message], row: Conversation, template: ChatTemplate) -> None:
    if row.tools and "tools" not in template.text:
        raise DataError(
            f"{row.source}: the row describes tools, but the chat template ({template.origin}) does not write them; "
            "use a model or template with tool use, or drop the column"
        )
    for number, turn in enumerate(messages, start=1):
        if OPEN_MARK in turn.content or CLOSE_MARK in turn.content:
            raise DataError(f"{row.source}: turn {number} holds the noncharacter U+FDD0 or U+FDD1; remove it")
        if turn.extra.get("tool_calls") and "tool_calls" not in template.text:
            raise DataError(
                f"{row.source}: turn {number} calls a tool, but the chat template ({template.origin}) does not write "
                "tool_calls; use a model or template with tool use, or drop the row"
            )


def _check_written(text: str, messages: Sequence[Message], source: str, template: ChatTemplate) -> None:
    """Raise where a template leaves a turn out, as those that expect lists of parts do with text.

    Thoughts may be left out, and what tools answer may be quoted: the last words of the other turns must be there.
    """
    for number, turn in enumerate(messages, start=1):
        last_words = turn.content.rsplit("</think>", 1)[-1].strip()[-16:]
        if turn.role != "tool" and last_words not in text:
            raise DataError(
                f"{source}: the chat template ({template.origin}) does not write the text of turn {number} "
                f"({turn.role}, ends in {last_words!r}); drop the turn, or give template: path.jinja that writes it"
            )
