"""From answer tokens to text: stop texts, and pieces for streaming that never cut a character."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_UNFINISHED = "\ufffd"  # what a tokenizer writes for bytes that are no whole character yet


def to_text(tokenizer: Any, ids: Sequence[int]) -> str:
    """Text of answer tokens without special tokens, spaces left as the model wrote them."""
    return tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)


def find_stop(text: str, stops: Sequence[str]) -> int:
    """Where the first stop text begins, -1 when none is there."""
    return min((at for stop in stops if (at := text.find(stop)) >= 0), default=-1)


def settled(text: str, stops: Sequence[str]) -> int:
    """How much of a text that goes on may be shown: no half character, nothing that may become a stop text."""
    end = len(text.rstrip(_UNFINISHED))
    for stop in stops:
        for size in range(min(len(stop) - 1, end), 0, -1):
            if text.endswith(stop[:size], 0, end):
                end -= size
                break
    return end
