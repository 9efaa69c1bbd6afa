"""Prompts from files, with the answers that are expected where the file has them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gymjax.data.errors import DataError
from gymjax.data.formats import read_history, text_field
from gymjax.data.read import Row, read_rows
from gymjax.data.turns import read_messages
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
    "input"} or {"text"}; the expected answer may stand in "label", "completion" or "output". "system" and, beside an
    instruction, "history" come before the question, as in training.

    Raises:
        DataError: the file cannot be read, has no row, or a row holds no prompt; names file and line.
    """
    questions = [_question(row) for row in read_rows(Path(path))]
    if not questions:
        raise DataError(f"{path}: holds no prompt; give one a row: {SHAPES}")
    return questions


def _question(row: Row) -> Question:
    if row.fields.get("tools"):
        raise DataError(f"{row.source}: column tools describes tools, which prompts are not asked with; remove it")
    prompt, label = _prompt(row), _label(row)
    if not isinstance(prompt, str) and prompt[-1]["role"] == "assistant":
        prompt, label = prompt[:-1], prompt[-1]["content"]
    if not prompt:
        raise DataError(f"{row.source}: the prompt is empty; drop the row or give it text")
    return Question(prompt, label, row.source)


def _prompt(row: Row) -> Prompt:
    for key in ("prompt", "messages"):
        if isinstance(value := row.fields.get(key), list):
            return _after_system(row, [turn.fields() for turn in read_messages(value, row)])
        if isinstance(value, str):
            return _asked(row, value, [])
        if key in row.fields:
            raise DataError(f"{row.source}: {key} must be a text or a list of turns, found {value!r:.60}")
    if "instruction" in row.fields:
        parts = [text_field(row, key, required=False) for key in ("instruction", "input")]
        return _asked(row, "\n".join(part for part in parts if part), read_history(row, "history"))
    if "text" in row.fields:
        return text_field(row, "text", required=False)
    raise DataError(f"{row.source}: no prompt among the columns {', '.join(row.fields)}; a row is {SHAPES}")


def _asked(row: Row, question: str, history: Sequence[tuple[str, str]]) -> Prompt:
    """The question alone, or turns that end with it where something comes before."""
    if not question or not (history or row.fields.get("system")):
        return question
    turns = [{"role": role, "content": text} for pair in history for role, text in zip(("user", "assistant"), pair)]
    return _after_system(row, [*turns, {"role": "user", "content": question}])


def _after_system(row: Row, turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    system = text_field(row, "system", required=False)
    return [{"role": "system", "content": system}, *turns] if system and turns[0]["role"] != "system" else turns


def _label(row: Row) -> str:
    value = next((row.fields[key] for key in ("label", "completion", "output") if row.fields.get(key)), "")
    return read_messages(value, row)[-1].content if isinstance(value, list) else str(value)
