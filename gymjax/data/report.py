"""What became of the data: rows read, kept and dropped, tokens, and notes to print before training."""

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from gymjax.data.conversation import Dropped

MOST_LISTED = 20


@dataclass
class SplitReport:
    """Counts of one split.

    Attributes:
        read: rows taken from the files (after max_samples, num_samples and mixing).
        kept: examples to train or evaluate on; in stage pt a long document makes several.
        tokens: all tokens of the kept examples.
        supervised: those that are trained.
        truncated: sources of rows cut to cutoff_len that keep some answer.
        dropped: rows left out, each with its reason.
    """

    read: int = 0
    kept: int = 0
    tokens: int = 0
    supervised: int = 0
    truncated: list[str] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)

    def lines(self, name: str) -> list[str]:
        """Return lines to print."""
        share = f" ({self.supervised / self.tokens:.0%})" if self.tokens else ""
        lines = [
            f"{name}: {self.read:,} rows read, {self.kept:,} examples, {self.tokens:,} tokens, "
            f"{self.supervised:,} trained{share}"
        ]
        if self.truncated:
            lines.append(f"{name}: {len(self.truncated):,} rows cut to cutoff_len, first {_some(self.truncated)}")
        for reason, count in Counter(drop.reason for drop in self.dropped).most_common():
            sources = [drop.source for drop in self.dropped if drop.reason == reason]
            lines.append(f"{name}: {count:,} rows dropped, {reason}: {_some(sources)}")
        return lines


@dataclass
class DataReport:
    """What prepare() did; print its lines() and store its to_dict().

    Attributes:
        train: counts of the training split, None without one.
        eval: counts of the evaluation split, None without one.
        notes: choices that the user should see.
    """

    train: SplitReport | None = None
    eval: SplitReport | None = None
    notes: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Return lines to print."""
        lines = [f"data: {note}" for note in self.notes]
        for name, split in (("train", self.train), ("eval", self.eval)):
            lines += split.lines(name) if split is not None else []
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "DataReport":
        """Read to_dict()'s result back."""
        return cls(_split(values["train"]), _split(values["eval"]), list(values["notes"]))


def _split(values: dict[str, Any] | None) -> SplitReport | None:
    if values is None:
        return None
    counts = {name: value for name, value in values.items() if name != "dropped"}
    return SplitReport(**counts, dropped=[Dropped(**drop) for drop in values["dropped"]])


def _some(sources: list[str]) -> str:
    more = len(sources) - MOST_LISTED
    return ", ".join(sources[:MOST_LISTED]) + (f" and {more:,} more" if more > 0 else "")
