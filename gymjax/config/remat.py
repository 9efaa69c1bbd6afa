"""Lists of names as `gradient_checkpointing`, which the decoder knows as remat."""

from __future__ import annotations

from collections.abc import Collection


def is_list(remat: str, names: Collection[str]) -> bool:
    """Whether some of `names` are joined by commas, each once."""
    words = remat.split(",")
    return len({*words}) == len(words) and {*words} <= {*names}
