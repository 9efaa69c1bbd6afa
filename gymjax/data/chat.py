"""Conversations to token ids and loss weights.

The whole conversation is rendered once and tokenized once. What is trained is found as character spans of that text:
from the template's {% generation %} marks, else as the difference between the text of the turns before an answer (up to
where the assistant begins to speak) and the text with the answer. Spans become tokens by the tokenizer's offsets.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from gymjax.data.conversation import Conversation, Message, RawText
from gymjax.data.errors import DataError
from gymjax.data.template import CLOSE_MARK, NO_TEMPLATE, OPEN_MARK, ChatTemplate, adds_special_tokens

Span = tuple[int, int, float]
GENERATION_REMEDY = (
    "or give template: path.jinja whose {% generation %} tags enclose the answers and their end-of-turn token"
)


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
        added = np.array(sorted(closing_tokens(self.tokenizer)), np.int64)
        before, _ = adds_special_tokens(self.tokenizer)
        examples = []
        for row, (text, spans), ids, offsets in zip(rows, located, encoded["input_ids"], encoded["offset_mapping"]):
            ids, offsets = np.array(ids, np.int32), np.array(offsets, np.int64).reshape(-1, 2)
            weights = np.zeros(len(ids), np.float32)
            is_added = np.isin(ids, added)
            for (_, _, weight), inside in zip(spans, _tokens_of(offsets, is_added, spans)):
                if isinstance(row, Conversation) and not self.train_on_prompt:
                    inside = _at(row.source, _drop_after_closing, inside, offsets, is_added, text)
                weights[inside] = weight
            if isinstance(row, RawText):
                examples.append(self._finish_raw(row, ids, weights, before))
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

    def _locate(self, row: Conversation) -> tuple[str, list[Span]]:
        """Return a conversation's text and its trained character spans."""
        if self.template is None:
            raise DataError(f"{row.source}: {NO_TEMPLATE}")
        messages = self._weighted(row)
        _check_text(messages, row.source, self.template)
        if self.train_on_prompt:
            text = _at(row.source, self.template.render, _fields(messages), tools=row.tools)
            return text, [(0, len(text), 1.0)]
        if self.template.marks_generation:
            return _at(row.source, _spans_by_marks, self.template, messages, row.tools)
        added = _added_texts(self.tokenizer)
        return _at(row.source, _spans_by_prefix, self.template, messages, row.tools, added)

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

    def _finish_raw(self, row: RawText, ids: np.ndarray, weights: np.ndarray, before: list[int]) -> Example:
        """Put the tokenizer's own first tokens (BOS) before raw text, and EOS after it, where the text lacks them."""
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
                f"{row.source}: the text begins with two BOS tokens ({self.tokenizer.bos_token}); the chat template writes one, "
                "remove the other from the template or from the row"
            )
        wanted = any(turn.weight > 0 for turn in self._weighted(row))
        if wanted and not np.any(weights[1:] > 0):
            raise DataError(
                f"{row.source}: no token would be trained although the row has an answer; the chat template does not write "
                f"assistant turns as expected; use the tokenizer's own template, {GENERATION_REMEDY}"
            )
        scored = weights[1:] if len(ids) and ids[0] == bos else weights
        others = any(turn.role != "assistant" for turn in row.messages)
        if others and not self.train_on_prompt and len(scored) and np.all(scored > 0):
            raise DataError(
                f"{row.source}: every token would be trained although the row has turns that are not the assistant's; "
                "move the template's {% generation %} tags around the answers, or set train_on_prompt: true to train all"
            )


def _at[**P, T](source: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function; its DataError gets the row's file and line in front."""
    try:
        return function(*args, **kwargs)
    except DataError as error:
        raise DataError(f"{source}: {error}") from error


def closing_tokens(tokenizer: Any) -> set[int]:
    """Return ids that can end a turn: the tokenizer's added tokens (<|im_end|>, </s>, ...) and EOS."""
    ids = set(tokenizer.added_tokens_decoder)
    return ids if tokenizer.eos_token_id is None else ids | {tokenizer.eos_token_id}


def _added_texts(tokenizer: Any) -> tuple[str, ...]:
    texts = {str(token.content) for token in tokenizer.added_tokens_decoder.values()} | {tokenizer.eos_token or ""}
    return tuple(sorted(texts - {""}, key=len, reverse=True))


def _fields(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [message.fields() for message in messages]


def _check_text(messages: Sequence[Message], source: str, template: ChatTemplate) -> None:
    for number, turn in enumerate(messages, start=1):
        if OPEN_MARK in turn.content or CLOSE_MARK in turn.content:
            raise DataError(f"{source}: turn {number} holds the noncharacter U+FDD0 or U+FDD1; remove it")
        if turn.extra.get("tool_calls") and "tool_calls" not in template.text:
            raise DataError(
                f"{source}: turn {number} calls a tool, but the chat template ({template.origin}) does not write tool_calls; "
                "use a model or template with tool use, or drop the row"
            )


def _spans_by_marks(template: ChatTemplate, messages: Sequence[Message], tools: Any) -> tuple[str, list[Span]]:
    text, marks = template.render_marked(_fields(messages), tools=tools)
    weights = [turn.weight for turn in messages if turn.role == "assistant"]
    if len(marks) == len(weights):
        return text, [(start, end, weight) for (start, end), weight in zip(marks, weights) if weight > 0]
    if all(weight == 1.0 for weight in weights) and marks:
        return text, [(start, end, 1.0) for start, end in marks]
    raise DataError(
        f"the chat template ({template.origin}) marks {len(marks)} answers with {{% generation %}}, the row has {len(weights)} "
        "assistant turns; mark each one once (mask_history and per-turn weights need it)"
    )


def _spans_by_prefix(
    template: ChatTemplate, messages: Sequence[Message], tools: Any, added: tuple[str, ...]
) -> tuple[str, list[Span]]:
    text = template.render(_fields(messages), tools=tools)
    spans = []
    for index, turn in enumerate(messages):
        if turn.role != "assistant" or turn.weight == 0:
            continue
        before = template.render(_fields(messages[:index]), tools=tools, add_generation_prompt=True)
        if not text.startswith(before):
            raise DataError(_prefix_message(template, index, text, before))
        end: int | None = len(text)
        if index + 1 < len(messages):
            after = template.render(_fields(messages[: index + 1]), tools=tools)
            end = len(after) if text.startswith(after) else _verbatim_end(text, len(before), turn.content, added)
        if end is None:
            raise DataError(_prefix_message(template, index, text, after))
        spans.append((len(before), end, turn.weight))
    return text, spans


def _verbatim_end(text: str, start: int, content: str, added: tuple[str, ...]) -> int | None:
    """Return where an answer's closing token ends, if the answer stands word for word at start, else None.

    Qwen3's template writes an empty thought block before an answer only while it is the last one; in the whole
    conversation the earlier answers stand as they are, right where the assistant begins to speak.
    """
    content = content.strip()
    begin = start + len(text[start:]) - len(text[start:].lstrip())
    if not content or not text.startswith(content, begin):
        return None
    rest = begin + len(content)
    closing = next((token for token in added if text.startswith(token, rest)), None)
    return None if closing is None else rest + len(closing)


def _prefix_message(template: ChatTemplate, index: int, text: str, part: str) -> str:
    same = next((at for at, (a, b) in enumerate(zip(text, part)) if a != b), min(len(text), len(part)))
    return (
        f"the chat template ({template.origin}) writes turn {index + 1} differently in the whole conversation than when "
        f"it is spoken (after {text[max(0, same - 30) : same]!r}: {text[same : same + 30]!r} against "
        f"{part[same : same + 30]!r}), as templates that drop earlier thoughts do, so its tokens cannot be told apart. Set "
        f"mask_history: true to train the last answer only, take the thoughts out of earlier answers, {GENERATION_REMEDY}"
    )


def _tokens_of(offsets: np.ndarray, is_added: np.ndarray, spans: Sequence[Span]) -> list[np.ndarray]:
    """Return, for each span, the tokens that hold one of its characters; an added token belongs where it starts.

    Byte-level tokenizers may trim spaces from offsets: characters between two tokens belong to the second.
    """
    ends = offsets[:, 1]
    before = np.concatenate([[0], np.maximum.accumulate(ends)])[: len(ends)]
    starts = np.minimum(offsets[:, 0], before)
    found = []
    for begin, end, _ in spans:
        overlap = ~is_added & (starts < end) & (ends > begin)
        found.append(np.flatnonzero(overlap | ((starts >= begin) & (starts < end))))
    return found


def _drop_after_closing(inside: np.ndarray, offsets: np.ndarray, is_added: np.ndarray, text: str) -> np.ndarray:
    """Leave out the white space that a template writes after an answer's closing token: it is never generated.

    Raises:
        DataError: no closing token ends the answer.
    """
    last = len(inside) - 1
    while last >= 0 and not is_added[inside[last]] and not text[slice(*offsets[inside[last]])].strip():
        last -= 1
    if last >= 0 and is_added[inside[last]]:
        return inside[: last + 1]
    tail = text[: offsets[inside[-1]][1]][-30:] if len(inside) else ""
    raise DataError(
        f"the end of an assistant turn is not trained (the trained text ends in {tail!r}), so the model would never stop; "
        "let the template end each answer with {{ eos_token }} or the model's end-of-turn token, inside the "
        "{% generation %} tags where it has them"
    )
