"""Shapes of batches: documents packed into rows without contamination, or rows padded to few lengths."""

import bisect
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

SHORTEST_BUCKET = 64
MOST_BUCKETS = 8


def buckets(cutoff_len: int) -> tuple[int, ...]:
    """Return the row lengths used without packing, ascending: each one compiles the step once.

    The lengths are cutoff_len and, below it, powers of two and 1.5 times powers of two of at least 64; the longest 8.

    Args:
        cutoff_len: longest row, in tokens.
    """
    lengths = {cutoff_len}
    power = SHORTEST_BUCKET
    while power < cutoff_len:
        lengths |= {length for length in (power, power * 3 // 2) if length < cutoff_len}
        power *= 2
    return tuple(sorted(lengths)[-MOST_BUCKETS:])


def buckets_for(longest: int, cutoff_len: int) -> tuple[int, ...]:
    """Return the buckets of data whose longest row is shorter than cutoff_len: no bucket stays empty at the top."""
    ladder = buckets(max(SHORTEST_BUCKET, 1 << (max(longest, 1) - 1).bit_length()))
    top = min((length for length in ladder if length >= longest), default=cutoff_len)
    return buckets(min(top, cutoff_len))


def bins(lengths: Sequence[int] | Int[np.ndarray, " n"], cutoff_len: int, seed: int) -> list[list[int]]:
    """Pack documents into rows: best fit, longest first; equal lengths in an order drawn from seed.

    Args:
        lengths: tokens of each document, 1 to cutoff_len.
        cutoff_len: tokens of a row.
        seed: of the order among documents of the same length.

    Returns:
        Rows of document indices; every document is in exactly one row.
    """
    lengths = np.asarray(lengths, np.int64)
    order = np.random.default_rng([seed, 0]).permutation(len(lengths))
    order = order[np.argsort(-lengths[order], kind="stable")]
    rows: list[list[int]] = []
    open_rows: dict[int, list[int]] = {}  # free tokens -> rows that have exactly so many
    free: list[int] = []  # the keys of open_rows, ascending
    for index in order.tolist():
        length = int(lengths[index])
        at = bisect.bisect_left(free, length)
        if at == len(free):
            row, space = len(rows), cutoff_len
            rows.append([])
        else:
            space = free[at]
            row = open_rows[space].pop()
            if not open_rows[space]:
                del open_rows[space], free[at]
        rows[row].append(index)
        left = space - length
        if left > 0:
            if left not in open_rows:
                open_rows[left] = []
                bisect.insort(free, left)
            open_rows[left].append(row)
    return rows
