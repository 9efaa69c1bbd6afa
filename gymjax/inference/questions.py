"""Prompts from files, with the answers that are expected where the file has them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gymjax.data.errors import DataError
from gymjax.data.read import Row, read_rows
from gymjax.inference.prompts import Prompt

SHAPES = "{prompt}, {messages: [{role, content}]}, {instruction, input} or {text}"


@dataclasses.dataclass(frozen=True)
class Question:
    """A prompt from a file.

    Attributes:
        prompt: a text, or turns that end before the assistant's.
        label: the expected answer; empty where the file has none.
        source: "file:line".
    """

    prompt: Prompt
    label: str
    source: str


def read_questions(path: Path | str) -> list[Question]:
    """Prompts of a json, jsonl, csv, parquet or txt (one a line) file.

    A row is {"prompt": text or turns}, {"messages": turns} whose last assistant turn becomes the label, {"instruction",
    "input"} or {"text"}; the expected answer may stand in "label", "completion" or "output".

    Raises:
        DataError: the file cannot be read, has no row, or a row holds no prompt; names file and line.
    """
    questions = list(_questions(Path(path)))
    if not questions:
        raise DataError(f"{path}: holds no prompt; give one a row: {SHAPES}")
    return questions


def _questions(path: Path) -> Iterator[Question]:
    for row in read_rows(path):
        prompt = _prompt(row)
        label = next((str(row.fields[key]) for key in ("label", "completion", "output") if row.fields.get(key)), "")
        if not isinstance(prompt, str) and prompt[-1].get("role") == "assistant":
            prompt, label = prompt[:-1], str(prompt[-1].get("content") or "")
        if not prompt:
            raise DataError(f"{row.source}: the prompt is empty; drop the row or give it text")
        yield Question(prompt, label, row.source)


def _prompt(row: Row) -> Prompt:
    fields = row.fields
    for key in ("prompt", "messages"):
        if key in fields:
            return _checked(fields[key], row.source, key)
    if "instruction" in fields:
        parts = [_text(fields.get(key), row.source, key) for key in ("instruction", "input")]
        return "\n".join(part for part in parts if part)
    if "text" in fields:
        return _text(fields["text"], row.source, "text")
    raise DataError(f"{row.source}: no prompt among the columns {', '.join(fields)}; a row is {SHAPES}")


def _checked(value: Any, source: str, key: str) -> Prompt:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(turn, dict) for turn in value):
        return value
    raise DataError(f"{source}: {key} must be a text or a list of turns, found {value!r:.60}")


def _text(value: Any, source: str, key: str) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    raise DataError(f"{source}: {key} must be a text, found {value!r:.60}")
