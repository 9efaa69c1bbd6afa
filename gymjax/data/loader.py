"""Tokenized examples in memory, and batches of them by step number."""

import functools
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypedDict

import numpy as np
from jaxtyping import Float, Int

from gymjax.data.chat import Example
from gymjax.data.errors import DataError
from gymjax.data.pack import bins, buckets_for


class Batch(TypedDict):
    """Arrays of one step: A microbatches of B rows of T tokens.

    Attributes:
        tokens: ids.
        targets: the next token inside the same document, 0 where there is none.
        loss_weights: weight of predicting targets; 0 = not trained.
        segment_ids: 1.. for the documents of a row, 0 = padding.
        positions: 0.. inside each document.
    """

    tokens: Int[np.ndarray, "A B T"]
    targets: Int[np.ndarray, "A B T"]
    loss_weights: Float[np.ndarray, "A B T"]
    segment_ids: Int[np.ndarray, "A B T"]
    positions: Int[np.ndarray, "A B T"]


@dataclass(frozen=True)
class Dataset:
    """Tokenized examples, end to end.

    Attributes:
        ids: token ids of all examples.
        weights: f32, loss weight of each token as a target.
        offsets: example i is [offsets[i], offsets[i + 1]).
        sources: `file:line` of each example.
    """

    ids: Int[np.ndarray, " tokens"]
    weights: Float[np.ndarray, " tokens"]
    offsets: Int[np.ndarray, " examples_plus_1"]
    sources: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, index: int) -> Example:
        """Return one example."""
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        start, end = self.offsets[index : index + 2]
        return Example(self.ids[start:end], self.weights[start:end], self.sources[index])

    @property
    def lengths(self) -> Int[np.ndarray, " examples"]:
        """Tokens of each example."""
        return np.diff(self.offsets)

    @property
    def supervised(self) -> int:
        """Number of tokens that are trained: targets of weight above 0."""
        trained = self.weights > 0
        trained[self.offsets[:-1][self.lengths > 0]] = False  # nothing predicts a document's first token
        return int(trained.sum())

    def fingerprint(self) -> str:
        """Return a hash of the ids and weights, to check on resume that the data is the same."""
        digest = hashlib.sha256()
        for array in (self.ids, self.weights, self.offsets):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()


def dataset_of(examples: Iterable[Example]) -> Dataset:
    """Lay examples end to end."""
    examples = list(examples)
    lengths = [len(example.ids) for example in examples]
    return Dataset(
        np.concatenate([np.zeros(0, np.int32), *(example.ids for example in examples)]),
        np.concatenate([np.zeros(0, np.float32), *(example.weights for example in examples)]),
        np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64),
        tuple(example.source for example in examples),
    )


class Loader:
    """Batches by step number: batch(step) depends on nothing but the dataset, the settings, the seed and the step.

    Epoch e = step // steps_per_epoch visits the rows in a permutation drawn from (seed, e). A row is one example, or
    with packing one bin of examples; bins are formed once from the seed, so that every epoch has as many steps. The
    last step of an epoch is filled up with empty rows (segment 0, weight 0): shapes are constant, no example is left
    out. Without packing a step is as wide as the shortest of `buckets` that holds its longest example.
    """

    def __init__(
        self,
        dataset: Dataset,
        rows: int,
        *,
        accumulation: int = 1,
        cutoff_len: int,
        packing: bool = False,
        seed: int = 0,
        shuffle: bool = True,
    ):
        """Plan the epochs.

        Args:
            dataset: at least one example, none longer than cutoff_len.
            rows: B, rows of one microbatch over all devices.
            accumulation: A, microbatches of one step.
            cutoff_len: longest row, in tokens; with packing the length of every row.
            packing: several documents a row.
            seed: of the permutations and bins.
            shuffle: False visits rows in order, for evaluation.

        Raises:
            DataError: the dataset is empty, or an example is longer than cutoff_len.
        """
        if not len(dataset):
            raise DataError(
                "the dataset has no example to train or evaluate on; see the rows dropped in the data report"
            )
        if rows < 1 or accumulation < 1:
            raise DataError(f"rows ({rows}) and accumulation ({accumulation}) must be at least 1")
        longest = int(dataset.lengths.max())
        if longest > cutoff_len:
            worst = dataset.sources[int(dataset.lengths.argmax())]
            raise DataError(
                f"{worst}: {longest} tokens, more than cutoff_len {cutoff_len}; prepare with this cutoff_len"
            )
        self.dataset, self.rows, self.accumulation = dataset, rows, accumulation
        self.seed, self.shuffle, self.packing = seed, shuffle, packing
        self.buckets = (cutoff_len,) if packing else buckets_for(longest, cutoff_len)
        self.bins = bins(dataset.lengths, cutoff_len, seed) if packing else [[index] for index in range(len(dataset))]

        lengths = dataset.lengths
        self._lengths = [int(lengths[documents].sum()) for documents in self.bins]

    @property
    def rows_per_step(self) -> int:
        """Rows of an update, of all its accumulated batches."""
        return self.rows * self.accumulation

    @property
    def steps_per_epoch(self) -> int:
        """Steps that visit every row once."""
        return -(-len(self.bins) // self.rows_per_step)

    def __iter__(self) -> Iterator[tuple[Batch, list[str]]]:
        """Yield the batches of epoch 0, for evaluation."""
        return (self.batch(step) for step in range(self.steps_per_epoch))

    def batch(self, step: int) -> tuple[Batch, list[str]]:
        """Return a step's arrays, and the sources of each of its A * B rows ("" for an empty row).

        Args:
            step: 0-based, over all epochs.
        """
        epoch, within = divmod(step, self.steps_per_epoch)
        order = _epoch_order(self.seed, epoch, len(self.bins), self.shuffle)
        rows = order[within * self.rows_per_step : (within + 1) * self.rows_per_step]
        chosen = [self.bins[row] for row in rows]
        longest = max(self._lengths[row] for row in rows)
        width = min(bucket for bucket in self.buckets if bucket >= longest)
        shape = (self.accumulation, self.rows, width)
        batch = _empty(shape)
        for row, documents in enumerate(chosen):
            self._fill(batch, divmod(row, self.rows), documents)
        sources = ["; ".join(self.dataset.sources[index] for index in documents) for documents in chosen]
        return batch, sources + [""] * (self.rows_per_step - len(chosen))

    def _fill(self, batch: Batch, row: tuple[int, int], documents: list[int]) -> None:
        start = 0
        for segment, index in enumerate(documents, start=1):
            example = self.dataset[index]
            end = start + len(example.ids)
            batch["tokens"][*row, start:end] = example.ids
            batch["targets"][*row, start : end - 1] = example.ids[1:]
            batch["loss_weights"][*row, start : end - 1] = example.weights[1:]
            batch["segment_ids"][*row, start:end] = segment
            batch["positions"][*row, start:end] = np.arange(end - start)
            start = end


@functools.lru_cache(maxsize=4)
def _epoch_order(seed: int, epoch: int, count: int, shuffle: bool) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(count) if shuffle else np.arange(count)


def _empty(shape: tuple[int, int, int]) -> Batch:
    return {
        "tokens": np.zeros(shape, np.int32),
        "targets": np.zeros(shape, np.int32),
        "loss_weights": np.zeros(shape, np.float32),
        "segment_ids": np.zeros(shape, np.int32),
        "positions": np.zeros(shape, np.int32),
    }
