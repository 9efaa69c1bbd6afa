"""Asks a base model and its new adapter the same held-out questions.

Usage: python scripts/quickstart.py CONFIG.yaml [KEY=VALUE ...], after python -m gymjax.train with the same ones
"""

import dataclasses
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from gymjax.checkpoint.load import LoadedModel
from gymjax.checkpoint.peft import load_adapter
from gymjax.config import Config, GenerateConfig, load
from gymjax.data.loader import Dataset
from gymjax.data.prepare import prepare
from gymjax.inference import generate
from gymjax.training.evaluate import evaluate
from gymjax.training.setup import load_model

HELD_OUT = Path("data/identity_heldout.jsonl")


@dataclasses.dataclass(frozen=True)
class Exam:
    """What a model says to the held-out questions, and its loss on the expected answers."""

    answers: list[str]
    right: list[bool]
    eval_loss: float


def examine(loaded: LoadedModel, config: Config, rows: list[dict], dataset: Dataset) -> Exam:
    """Answers every question greedily; an answer is right when it holds all the row's keywords."""
    questions = [[row["messages"][0]] for row in rows]
    greedy = GenerateConfig(do_sample=False, max_new_tokens=40)
    answers = [a.text for a in generate(loaded.model, loaded.tokenizer, questions, greedy, batch_size=len(questions))]
    right = [all(k in answer.lower() for k in row["keywords"]) for answer, row in zip(answers, rows, strict=True)]
    measured = evaluate(
        loaded.model, dataset, rows=config.train.per_device_eval_batch_size, cutoff_len=config.data.cutoff_len
    )
    return Exam(answers, right, measured["eval_loss"])


def show(rows: list[dict], before: Exam, after: Exam, folder: Path, config_path: str) -> None:
    table = Table("held-out question", "before", "after", show_lines=True)
    for number, row in enumerate(rows):
        cells = [f"{'right' if exam.right[number] else 'wrong'}: {exam.answers[number]}" for exam in (before, after)]
        table.add_row(row["messages"][0]["content"], *cells)
    # Where the output is no terminal its width is unknown: 120 columns.
    console = Console(markup=False, width=None if sys.stdout.isatty() else 120)
    console.print(table)
    console.print(f"right answers: {sum(before.right)} of {len(rows)} before, {sum(after.right)} of {len(rows)} after")
    console.print(f"held-out loss: {before.eval_loss:.3f} before, {after.eval_loss:.3f} after")
    console.print(f"loss curve:    {folder / 'training_loss.png'}")
    console.print(f"adapter:       {folder} (adapter_model.safetensors; PEFT loads it)")
    console.print(
        f"talk to it:    .venv/bin/python -m gymjax.chat {config_path} adapter_name_or_path={folder}", soft_wrap=True
    )


def main(arguments: list[str]) -> int:
    config = load(arguments[0], arguments[1:])
    folder = Path(config.train.output_dir)
    rows = [json.loads(line) for line in HELD_OUT.read_text().splitlines()]
    loaded = load_model(config)
    dataset = prepare(config.data, loaded.tokenizer, stage=config.train.stage, seed=config.train.seed).eval
    if dataset is None:
        raise SystemExit(f"{arguments[0]} sets no eval_dataset; the quickstart compares on it")
    before = examine(loaded, config, rows, dataset)
    load_adapter(loaded.model, folder)
    after = examine(loaded, config, rows, dataset)
    show(rows, before, after, folder, arguments[0])
    learned = after.eval_loss <= before.eval_loss / 2 and sum(after.right) > len(rows) // 2
    print("it learned" if learned else "it did not learn: the loss did not halve or most answers are still wrong")
    return int(not learned)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
