"""Sample, split and mix rows of several sources, all by seed."""

from collections.abc import Iterator, Sequence

import numpy as np

from gymjax.data.errors import DataError

STRATEGIES = ("concat", "interleave_under", "interleave_over")
# Streams of random numbers that must not be the same ones.
_SAMPLE, _SPLIT, _MIX = 1, 2, 3


def sample[T](rows: list[T], num_samples: int | None, max_samples: int | None, seed: int) -> list[T]:
    """Return at most num_samples rows drawn by seed (in file order), of these at most the first max_samples."""
    if num_samples is not None and num_samples < len(rows):
        chosen = np.random.default_rng([seed, _SAMPLE]).permutation(len(rows))[:num_samples]
        rows = [rows[index] for index in sorted(chosen.tolist())]
    return rows[:max_samples] if max_samples is not None else rows


def part[T](rows: list[T], begin: str | None, end: str | None) -> list[T]:
    """Return rows[begin:end]; a bound that ends in % is that share of the rows, rounded to whole rows.

    Bounds below 0 count from the end, and those beyond the rows stop there, as slices of Python do.
    """
    return rows[_bound(begin, len(rows), 0) : _bound(end, len(rows), len(rows))]


def _bound(written: str | None, total: int, default: int) -> int:
    if not written:
        return default
    size = written.lstrip("-").replace("_", "")
    count = round(int(size[:-1]) * total / 100) if size.endswith("%") else int(size)
    return max(total - count, 0) if written.startswith("-") else count


def repeat[T](rows: list[T], count: int) -> list[T]:
    """Return count rows, the given ones over and over; count below their number returns them all."""
    return (rows * -(-count // len(rows)))[:count] if rows and count > len(rows) else rows


def split[T](groups: Sequence[list[T]], val_size: float, seed: int) -> tuple[list[list[T]], list[T]]:
    """Take validation rows out of the sources, before rows are mixed or repeated: none is in both parts.

    Args:
        groups: rows of each source.
        val_size: share of all rows if below 1, else a number of rows; 0 takes none.
        seed: of the choice.

    Raises:
        DataError: fewer than one row would be left for one of the parts.
    """
    total = sum(len(group) for group in groups)
    count = round(val_size * total) if val_size < 1 else int(val_size)
    if val_size and not 0 < count < total:
        raise DataError(
            f"val_size {val_size:g} takes {count} of {total} rows for evaluation; "
            "at least one must be left for each part"
        )
    held = set(np.random.default_rng([seed, _SPLIT]).permutation(total)[:count].tolist())
    kept, taken, index = [], [], 0
    for group in groups:
        kept.append([])
        for row in group:
            (taken if index in held else kept[-1]).append(row)
            index += 1
    return kept, taken


def mix[T](groups: Sequence[list[T]], strategy: str, probs: Sequence[float] | None, seed: int) -> list[T]:
    """Join the rows of several sources.

    Args:
        groups: rows of each source.
        strategy: "concat" one after the other; "interleave_under" draws a source at each step and ends when one is used
            up; "interleave_over" ends when each has been used up once, restarting those that are.
        probs: chance of each source; None takes the sources in turn.
        seed: of the draws.

    Raises:
        DataError: the strategy is unknown, or probs do not fit.
    """
    if strategy not in STRATEGIES:
        raise DataError(f"mix_strategy must be one of {', '.join(STRATEGIES)}, found {strategy!r}")
    if strategy == "concat":
        if probs is not None:
            raise DataError("interleave_probs needs mix_strategy: interleave_under or interleave_over, it is concat")
        return [row for group in groups for row in group]
    if any(not group for group in groups):
        raise DataError(f"mix_strategy: {strategy} needs rows in every dataset, number {_first_empty(groups)} has none")
    draw = _draws(len(groups), probs, seed)
    rows: list[T] = []
    used = [0] * len(groups)
    finished: set[int] = set()
    while True:
        source = next(draw)
        group = groups[source]
        rows.append(group[used[source] % len(group)])
        used[source] += 1
        if used[source] == len(group):
            finished.add(source)
            if strategy == "interleave_under" or len(finished) == len(groups):
                return rows


def parse_probs(probs: str | Sequence[float] | None) -> list[float] | None:
    """Read interleave_probs: "0.7,0.3" or [0.7, 0.3]; None or empty is None."""
    if probs is None or probs == "" or (not isinstance(probs, str) and len(probs) == 0):
        return None
    parts = probs.split(",") if isinstance(probs, str) else probs
    try:
        return [float(part) for part in parts]
    except (TypeError, ValueError) as error:
        raise DataError(f'interleave_probs must be numbers such as "0.7,0.3", found {probs!r}') from error


def _first_empty(groups: Sequence[list]) -> int:
    return next(number for number, group in enumerate(groups, start=1) if not group)


def _draws(count: int, probs: Sequence[float] | None, seed: int) -> Iterator[int]:
    if probs is None:
        while True:
            yield from range(count)
    if len(probs) != count or min(probs) <= 0 or not np.isclose(sum(probs), 1.0, atol=1e-3):
        raise DataError(
            f"interleave_probs must give each of the {count} datasets a share above 0, together 1; found {list(probs)}"
        )
    generator = np.random.default_rng([seed, _MIX])
    while True:
        yield from generator.choice(count, size=1024, p=np.asarray(probs) / sum(probs)).tolist()
