"""The words of `gradient_checkpointing`, which the decoder knows as remat."""

from __future__ import annotations

from collections.abc import Collection

from gymjax.config.sections import UNROLLED


def split_words(remat: str) -> tuple[frozenset[str], bool]:
    """(words but "unrolled", whether it is among them)."""
    words = frozenset(remat.split(","))
    return words - {UNROLLED}, UNROLLED in words


def is_list(remat: str, names: Collection[str]) -> bool:
    """Whether some of `names`, "unrolled" among them or not, are joined by commas, each once, or it and one other word.

    The other is "full" or "selective".
    """
    words, unrolled = split_words(remat)
    once = len(words) + unrolled == len(remat.split(","))
    return once and (words <= set(names) or (unrolled and words in ({"full"}, {"selective"})))
