"""`python -m gymjax.preview CONFIG.yaml row=0`: each token of an example, and whether it is trained."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gymjax.checkpoint.load import load_tokenizer, locate
from gymjax.config import Config, ConfigError, load
from gymjax.data import Loader, prepare
from gymjax.data.errors import DataError
from gymjax.data.loader import Dataset
from gymjax.training.command import keys_text, run_process, split_arguments, take

OWN = {
    "row": "which row, from 0 (default 0); with packing a row holds several documents",
    "split": "train (default) or eval",
}
_TRAINED, _MASKED = "bold green", "dim"


def preview_config(config: Config, split: str = "train") -> tuple[Loader, object, list[str]]:
    """Rows as training would see them, in the order of the files; no weights are read.

    Args:
        config: the model's name (for its tokenizer) and the data section are read.
        split: "train" or "eval".

    Returns:
        (loader of one row a step, unshuffled; tokenizer; the lines of the data report).

    Raises:
        ConfigError: no such split.
    """
    tokenizer = load_tokenizer(locate(config.model))
    train, hub_cache = config.train, config.model.cache_dir
    prepared = prepare(config.data, tokenizer, stage=train.stage, seed=train.seed, hub_cache=hub_cache)
    splits: dict[str, Dataset | None] = {"train": prepared.train, "eval": prepared.eval}
    dataset = splits.get(split)
    if dataset is None:
        there = ", ".join(name for name, rows in splits.items() if rows is not None)
        raise ConfigError(f"split: {split} has no data; there is {there or 'none'} (dataset, eval_dataset, val_size)")
    loader = Loader(
        dataset,
        rows=1,
        cutoff_len=config.data.cutoff_len,
        packing=prepared.packing and split == "train",
        seed=config.train.seed if config.train.data_seed is None else config.train.data_seed,
        shuffle=False,
    )
    return loader, tokenizer, prepared.report.lines()


def show_row(loader: Loader, index: int, tokenizer, console: Console) -> None:
    """Prints one row: its text with the trained part marked, a line for each token, and counts.

    Raises:
        DataError: there is no such row.
    """
    if not 0 <= index < loader.steps_per_epoch:
        raise DataError(f"row {index} does not exist; there are rows 0 to {loader.steps_per_epoch - 1}")
    batch, sources = loader.batch(index)
    segment_ids = batch["segment_ids"][0, 0]
    tokens, positions = (batch[name][0, 0] for name in ("tokens", "positions"))
    weights = weights_of_tokens(batch["loss_weights"][0, 0])
    console.print(Text(f"row {index}: {sources[0]}"))
    text, table = Text(), Table("place", "segment", "position", "id", "loss", "token", box=None, pad_edge=False)
    for place in np.flatnonzero(segment_ids):
        piece, style = tokenizer.decode([int(tokens[place])]), _TRAINED if weights[place] else _MASKED
        text.append(piece, style)
        loss = "-" if not weights[place] else "on" if weights[place] == 1 else f"{weights[place]:g}"
        numbers = (place, segment_ids[place], positions[place], tokens[place])
        table.add_row(*map(str, numbers), Text(loss, style), Text(repr(piece), style))
    console.print(text)
    console.print(table)
    real, trained = int((segment_ids > 0).sum()), int((weights > 0).sum())
    console.print(
        f"{real} tokens in {int(segment_ids.max())} documents, {trained} trained ({trained / real:.0%}), "
        f"{len(tokens) - real} places of padding"
    )


def weights_of_tokens(loss_weights: np.ndarray) -> np.ndarray:
    """Loss weight of each token as a target: the weight of predicting token t + 1 stands at t in a batch."""
    return np.concatenate([[0], loss_weights[:-1]])


def usage() -> str:
    """Text of --help."""
    return f"""
usage: python -m gymjax.preview [CONFIG.yaml] [key=value ...] [row=N]

Shows what one row trains: every token decoded, green where it counts in the loss. Keys:
{keys_text(("data",), OWN)}
 model: model_name_or_path (its tokenizer)   train: stage, seed
"""


def main(arguments: Sequence[str]) -> None:
    """Prints the data report and one row."""
    path, overrides = split_arguments(arguments)
    own, overrides = take(overrides, OWN)
    row = own.get("row", "0")
    if not row.isdecimal():
        raise ConfigError(f"command line: row must be a number from 0, is {row}")
    loader, tokenizer, lines = preview_config(load(path, overrides), own.get("split", "train"))
    console = Console()
    for line in lines:
        console.print(Text(line))
    show_row(loader, int(row), tokenizer, console)


if __name__ == "__main__":
    run_process(main, usage)
