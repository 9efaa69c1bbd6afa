"""Which characters and tokens of a conversation are trained.

Characters: from the template's {% generation %} marks, else as the difference between the text of the turns before an
answer and the text with the answer. Tokens: those that hold such a character, by the tokenizer's offsets.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from gymjax.data.conversation import Message
from gymjax.data.errors import DataError
from gymjax.data.template import ChatTemplate

Span = tuple[int, int, float]  # first character, one past the last, loss weight
GENERATION_REMEDY = (
    "or give template: path.jinja whose {% generation %} tags enclose the answers and their end-of-turn token"
)


def _fields(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [message.fields() for message in messages]


def spans_by_marks(template: ChatTemplate, messages: Sequence[Message], tools: Any) -> tuple[str, list[Span]]:
    """Return a conversation's text, and the spans inside the template's {% generation %} tags.

    Raises:
        DataError: the tags do not match the assistant turns one to one, and turns have different weights.
    """
    text, marks = template.render_marked(_fields(messages), tools=tools)
    weights = [turn.weight for turn in messages if turn.role == "assistant"]
    if len(marks) == len(weights):
        return text, [(start, end, weight) for (start, end), weight in zip(marks, weights) if weight > 0]
    if all(weight == 1.0 for weight in weights) and marks:
        return text, [(start, end, 1.0) for start, end in marks]
    raise DataError(
        f"the chat template ({template.origin}) marks {len(marks)} answers with {{% generation %}}, the row has "
        f"{len(weights)} assistant turns; mark each one once (mask_history and per-turn weights need it)"
    )


def spans_by_prefix(
    template: ChatTemplate, messages: Sequence[Message], tools: Any, added: Sequence[str]
) -> tuple[str, list[Span]]:
    """Return a conversation's text, and the spans that each trained answer adds to the text of the turns before it.

    An answer begins where the text of the turns before it ends, written up to where the assistant begins to speak.

    Args:
        template: without {% generation %} tags.
        messages: turns with their loss weights.
        tools: for the template.
        added: texts of the tokens that can end a turn, longest first.

    Raises:
        DataError: the text of the turns before an answer is not how the whole text begins.
    """
    text = template.render(_fields(messages), tools=tools)
    spans = []
    for index, turn in enumerate(messages):
        if turn.role != "assistant" or turn.weight == 0:
            continue
        before = template.render(_fields(messages[:index]), tools=tools, add_generation_prompt=True)
        if not text.startswith(before):
            raise DataError(_prefix_message(template, index, text, before))
        whole = index + 1 == len(messages)
        after = text if whole else template.render(_fields(messages[: index + 1]), tools=tools)
        end = len(after) if text.startswith(after) else _verbatim_end(text, len(before), turn.content, added)
        if end is None:
            raise DataError(_prefix_message(template, index, text, after))
        spans.append((len(before), end, turn.weight))
    return text, spans


def _verbatim_end(text: str, start: int, content: str, added: Sequence[str]) -> int | None:
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
        f"the chat template ({template.origin}) writes turn {index + 1} differently in the whole conversation than "
        f"when it is spoken (after {text[max(0, same - 30) : same]!r}: {text[same : same + 30]!r} against "
        f"{part[same : same + 30]!r}), as templates that drop earlier thoughts do, so its tokens cannot be "
        "told apart. Set mask_history: true to train the last answer only, take the thoughts out of earlier answers, "
        f"{GENERATION_REMEDY}"
    )


def tokens_of(offsets: np.ndarray, is_added: np.ndarray, spans: Sequence[Span]) -> list[np.ndarray]:
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


def drop_after_closing(inside: np.ndarray, offsets: np.ndarray, is_added: np.ndarray, text: str) -> np.ndarray:
    """Leave out the white space that a template writes after an answer's closing token: it is never generated.

    Raises:
        DataError: the answer has no token at all, or no closing token ends it.
    """
    if not len(inside):
        raise DataError(
            "the chat template writes nothing for an assistant turn, so no token would be trained; use the "
            f"tokenizer's own template, {GENERATION_REMEDY}"
        )
    last = len(inside) - 1
    while last >= 0 and not is_added[inside[last]] and not text[slice(*offsets[inside[last]])].strip():
        last -= 1
    if last >= 0 and is_added[inside[last]]:
        return inside[: last + 1]
    tail = text[: offsets[inside[-1]][1]][-30:]
    raise DataError(
        f"the end of an assistant turn is not trained (the trained text ends in {tail!r}), so the model would never "
        "stop; let the template end each answer with {{ eos_token }} or the model's end-of-turn token, inside the "
        "{% generation %} tags where it has them"
    )
