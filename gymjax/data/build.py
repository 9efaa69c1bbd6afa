"""Read, split, mix, tokenize and cut rows: what prepare does when the cache has nothing."""

import sys
from collections import Counter
from collections.abc import Iterator
from itertools import batched, islice
from typing import TYPE_CHECKING

import numpy as np

from gymjax.data.chat import Encoder, Example
from gymjax.data.conversation import Conversation, Dropped, RawText
from gymjax.data.errors import DataError
from gymjax.data.formats import convert, formatting_of
from gymjax.data.loader import Dataset, dataset_of
from gymjax.data.mix import mix, parse_probs, part, repeat, sample, split
from gymjax.data.read import Row, read_rows
from gymjax.data.report import DataReport, SplitReport
from gymjax.data.sources import Source

if TYPE_CHECKING:
    from gymjax.data.prepare import DataConfig

Item = Conversation | RawText | Dropped
# Enough rows for the tokenizer's threads, few enough to keep their texts and offsets small.
ENCODED_TOGETHER = 512


def build(
    config: "DataConfig", encoder: Encoder, stage: str, seed: int, sources: list[Source], held_out: list[Source]
) -> tuple[Dataset | None, Dataset | None, DataReport]:
    """Return the training and evaluation datasets, and what became of their rows.

    Args:
        config: the data section.
        encoder: tokenizer, template and what is trained.
        stage: "sft" or "pt".
        seed: of sampling, splitting and mixing.
        sources: of `dataset`; may be empty.
        held_out: of `eval_dataset`; empty = evaluation rows are split off by val_size.

    Raises:
        DataError: a row is wrong, or no row is left.
    """
    report = DataReport()
    read = [_items(source, config, stage, seed) for source in sources]
    groups, evaluation = split(read, config.val_size, seed)
    train = held = None
    if sources:
        for index, source in enumerate(sources):
            wanted = min(source.num_samples or 0, config.max_samples or sys.maxsize)
            if wanted > len(read[index]):
                groups[index] = repeat(groups[index], wanted)
        items = mix(groups, config.mix_strategy, parse_probs(config.interleave_probs), seed)
        train, report.train = _encode("dataset", items, encoder, stage, config.cutoff_len)
        report.notes += _notes(items, encoder)
    if held_out:
        evaluation = [item for source in held_out for item in _items(source, config, stage, seed)]
    if evaluation or held_out:
        name = "eval_dataset" if held_out else "val_size"
        held, report.eval = _encode(name, evaluation, encoder, stage, config.cutoff_len)
    return train, held, report


def _items(source: Source, config: "DataConfig", stage: str, seed: int) -> list[Item]:
    """Read one source: its rows within max_samples and num_samples, as conversations, texts or drops."""
    rows = _rows(source, stage)
    if source.part is not None:
        rows = iter(part(list(rows), *source.part))
    if source.num_samples is None:
        rows = islice(rows, config.max_samples)
    chosen = sample(list(rows), source.num_samples, config.max_samples, seed)
    if not chosen:
        of = "" if source.part is None else f" within [{':'.join(bound or '' for bound in source.part)}]"
        raise DataError(f"dataset {source.name}: its files ({', '.join(map(str, source.files))}) hold no rows{of}")
    items = [convert(row, source, formatting=formatting) for row, formatting in chosen]
    turns = next((item for item in items if isinstance(item, Conversation)), None)
    if stage == "pt" and turns is not None:
        raise DataError(
            f"{turns.source}: stage pt trains plain text, this row is a conversation; use stage: sft, or give rows a "
            'column text (or name the column in dataset_info.json: "columns": {"prompt": "..."})'
        )
    return items


def _rows(source: Source, stage: str) -> Iterator[tuple[Row, str]]:
    """Yield rows with their format, recognised anew in each file."""
    for file in source.files:
        formatting = None
        for row in read_rows(file):
            formatting = formatting or formatting_of(source, row, stage=stage)
            yield row, formatting


def _encode(name: str, items: list[Item], encoder: Encoder, stage: str, cutoff_len: int) -> tuple[Dataset, SplitReport]:
    report = SplitReport(read=len(items), dropped=[item for item in items if isinstance(item, Dropped)])
    examples: list[Example] = []
    for some in batched((item for item in items if not isinstance(item, Dropped)), ENCODED_TOGETHER):
        for example in encoder.encode(some):
            examples += _pieces(example, cutoff_len, report) if stage == "pt" else _cut(example, cutoff_len, report)
    if not examples:
        raise DataError(f"{name}: no row is left to use; {'; '.join(_reasons(report)) or 'it has none'}")
    data = dataset_of(examples)
    report.kept, report.tokens, report.supervised = len(data), len(data.ids), data.supervised
    return data, report


def _cut(example: Example, cutoff_len: int, report: SplitReport) -> list[Example]:
    """Cut a row's end to cutoff_len; a row without a trained token is dropped and reported."""
    if not np.any(example.weights[1:] > 0):
        report.dropped.append(
            Dropped(example.source, "no token is trained (train: false or weight: 0, or mask_history)")
        )
        return []
    if len(example.ids) <= cutoff_len:
        return [example]
    if not np.any(example.weights[1:cutoff_len] > 0):
        report.dropped.append(Dropped(example.source, f"its answer lies beyond cutoff_len {cutoff_len}"))
        return []
    report.truncated.append(example.source)
    return [Example(example.ids[:cutoff_len], example.weights[:cutoff_len], example.source)]


def _pieces(example: Example, cutoff_len: int, report: SplitReport) -> list[Example]:
    """Split a document into pieces that share one token, so that each token but the first is a target once.

    Pieces without a trained token are left out; a document of nothing else is reported.
    """
    starts = range(0, max(len(example.ids) - 1, 1), cutoff_len - 1)
    pieces = [
        Example(example.ids[start : start + cutoff_len], example.weights[start : start + cutoff_len], example.source)
        for start in starts
    ]
    trained = [piece for piece in pieces if np.any(piece.weights[1:] > 0)]
    if not trained:
        report.dropped.append(Dropped(example.source, "no token is trained (it has a single one, or weight 0 on each)"))
    return trained


def _reasons(report: SplitReport) -> list[str]:
    counts = Counter(drop.reason for drop in report.dropped)
    return [f"{count} dropped: {reason}" for reason, count in counts.most_common()]


def _notes(items: list[Item], encoder: Encoder) -> list[str]:
    pairs = any(isinstance(item, RawText) and len(item.pieces) > 1 for item in items)
    if not pairs or encoder.template is None:
        return []
    return [
        "prompt and completion texts are trained as they are, without the chat template; use lists of messages for it"
    ]
