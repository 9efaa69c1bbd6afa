"""Text for proof_qlora.py that every Python has: the language's reference pages and the docstrings of its library.

The reference pages are those of `help("topics")`, the docstrings those of the standard library and of NumPy: about 5 MB
of English about programming, the same for the same versions. Documents are shuffled by a fixed seed, every 16th is held
out, the rest is joined with the tokenizer's end token between documents and cut into rows.
"""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

SKIPPED = {
    "test",
    "tests",
    "idlelib",
    "site-packages",
    "dist-packages",
    "lib2to3",
    "turtledemo",
    "encodings",
    "pydoc_data",
}
HELD_OUT = 16  # one document of so many is never trained on
SHORTEST = 200  # characters; shorter docstrings say little


def documents() -> list[str]:
    """Every document, sorted by where it stands."""
    import pydoc_data.topics

    pages = [text.strip() for _, text in sorted(pydoc_data.topics.topics.items())]
    roots = (Path(sysconfig.get_path("stdlib")), Path(np.__file__).parent)
    return pages + [text for root in roots for path in sources(root) for text in docstrings(path)]


def sources(root: Path) -> list[Path]:
    """Python files below a folder, without tests, sorted."""
    return sorted(path for path in root.rglob("*.py") if not SKIPPED & set(path.relative_to(root).parts))


def docstrings(path: Path) -> Iterator[str]:
    """Docstrings of a file, in its order; none where this Python cannot parse it."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text and len(text) >= SHORTEST:
                yield text


def cut(ids: Sequence[Sequence[int]], end: int, width: int) -> np.ndarray:
    """Documents joined, each followed by the end token, and cut into rows (R, width); what is left over is dropped."""
    joined = np.fromiter((token for document in ids for token in [*document, end]), np.int32)
    return joined[: len(joined) // width * width].reshape(-1, width)


def make_rows(
    encode: Callable[[str], Sequence[int]], end: int, *, train_rows: int, eval_rows: int, length: int, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, int]:
    """Token rows to train and evaluate on, `length` + 1 wide: inputs are all but the last, targets all but the first.

    Args:
        encode: text to token ids.
        end: token between documents.
        train_rows: rows of the whole run, in the order in which both sides see them.
        eval_rows: of held-out documents.
        length: tokens a row.
        seed: of both shuffles.

    Returns:
        (train, evaluation, distinct training rows there are); where a run is longer, rows come again in another order.

    Raises:
        ValueError: too few held-out rows.
    """
    rng = np.random.default_rng(seed)
    texts = documents()
    order = rng.permutation(len(texts))
    held, kept = order[::HELD_OUT], np.delete(order, np.s_[::HELD_OUT])
    evaluation = cut([encode(texts[i]) for i in held], end, length + 1)
    if len(evaluation) < eval_rows:
        raise ValueError(f"{eval_rows} rows of {length} tokens to evaluate on, the held-out text has {len(evaluation)}")
    rows = cut([encode(texts[i]) for i in kept], end, length + 1)
    passes = -(-train_rows // len(rows))
    picked = np.concatenate([rng.permutation(len(rows)) for _ in range(passes)])[:train_rows]
    return rows[picked], evaluation[:eval_rows], len(rows)
