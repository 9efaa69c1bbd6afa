"""Which of a dataset's files make a split: by patterns, or by the names of folders and files as on the hub."""

import re
from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath
from typing import Any

from gymjax.data.errors import DataError, did_you_mean
from gymjax.data.read import READERS

DEFAULT_SPLIT = "train"
TYPES = {"json": (".json", ".jsonl"), "parquet": (".parquet",), "csv": (".csv",), "arrow": (".arrow",),
         "text": (".txt",)}  # fmt: skip
# Data that is not read. It counts among the files of a split, so that a split is never read without it.
UNREAD = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip", ".7z", ".tar", ".tgz", ".tsv", ".ndjson", ".xlsx", ".orc",
          ".feather", ".pkl", ".tfrecord")  # fmt: skip
DESCRIPTIONS = ("README.md", "config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json",
                "state.json")  # fmt: skip
# Source of the names and their order: hub docs, "File names and splits". A keyword stands between these characters.
SHARD = re.compile(r"data/(\w+(?:\.\w+)*)-\d{5}-of-\d{5}[^/]*\.[^/]+")
KEYWORDS = {
    split: re.compile(rf"(^|[-._ 0-9])({words})($|[-._ 0-9])")
    for split, words in {
        "train": "train|training",
        "validation": "validation|valid|val|dev",
        "test": "test|testing|eval|evaluation",
    }.items()
}


def match(what: str, patterns: Iterable[str], names: Sequence[str]) -> list[str]:
    """Return the names that patterns match, pattern by pattern: `*` within a folder, `**` over folders.

    Raises:
        DataError: a pattern matches none of them; begins with `what`.
    """
    found: dict[str, None] = {}
    there = set(names)
    for pattern in (pattern.removeprefix("./") for pattern in patterns):
        matched = [pattern] if pattern in there else list(filter(_regex(pattern).fullmatch, names))
        if not matched:
            raise DataError(
                f"{what} {pattern} matches no data file;{did_you_mean(pattern, names)} there is {some(names)}"
            )
        found |= dict.fromkeys(matched)
    return list(found)


def one_type(what: str, files: Sequence[str], ds_type: str | None) -> list[str]:
    """Return the files of one type: ds_type, or the only one that there is.

    Raises:
        DataError: there are none, or several types, or a file that is not read; begins with `what`.
    """
    if ds_type is not None and ds_type not in TYPES:
        raise DataError(f"{what}: ds_type must be one of {', '.join(TYPES)}, is {ds_type}")
    wanted = [file for file in files if ds_type is None or file.lower().endswith((*TYPES[ds_type], *UNREAD))]
    unread = [file for file in wanted if file.lower().endswith(UNREAD)]
    if unread or not wanted:
        reason = f"{some(unread)} cannot be read" if unread else f"holds no file of ds_type {ds_type}"
        raise DataError(f"{what} {reason}; choose others by data_files, or convert to {', '.join(READERS)}")
    types = {kind for kind in TYPES for file in wanted if file.lower().endswith(TYPES[kind])}
    if len(types) > 1:
        raise DataError(
            f"{what} holds files of several types ({some(wanted)}); set ds_type to one of {', '.join(sorted(types))}, "
            "or name files in data_files"
        )
    return wanted


def patterns_of(what: str, given: Any) -> dict[str, list[str]]:
    """Patterns of each split from `data_files`: a text, a list of texts, or a list of {split, path}."""
    entries: list[Any] = [given] if isinstance(given, str | dict) else list(given)
    if all(isinstance(entry, str) for entry in entries):
        return {DEFAULT_SPLIT: entries}
    splits: dict[str, list[str]] = {}
    for entry in entries:
        paths = entry.get("path") if isinstance(entry, dict) else None
        paths = [paths] if isinstance(paths, str) else paths
        if not (isinstance(paths, list) and all(isinstance(path, str) for path in paths) and entry.get("split")):
            raise DataError(
                f"{what}: README.md's data_files must be patterns, or objects of split and path, are {given!r}"
            )
        splits.setdefault(str(entry["split"]), []).extend(paths)
    return splits


def by_name(names: Sequence[str]) -> dict[str, list[str]]:
    """Files of each split: data/SPLIT-00000-of-00001, else keywords in folders, else in file names, else all train."""
    splits: dict[str, list[str]] = {}
    for name in names:
        if shard := SHARD.fullmatch(name):
            splits.setdefault(shard[1], []).append(name)
    for part in (lambda path: path.parts[:-1], lambda path: (path.name,)):
        if not splits:
            found = {
                s: [n for n in names if any(map(word.search, part(PurePosixPath(n))))] for s, word in KEYWORDS.items()
            }
            splits = {split: files for split, files in found.items() if files}
    return splits or {DEFAULT_SPLIT: list(names)}


def is_data(name: str) -> bool:
    """Whether a path holds rows, read or not."""
    path = PurePosixPath(name)
    hidden = any(part.startswith((".", "__")) for part in path.parts)
    return name.lower().endswith((*READERS, *UNREAD)) and path.name not in DESCRIPTIONS and not hidden


def some(names: Sequence[str]) -> str:
    """Name the first few."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _regex(pattern: str) -> re.Pattern[str]:
    meaning = {"**/": "(?:[^/]+/)*", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    pieces = re.split(r"(\*\*/|\*\*|\*|\?|\[[^]/]+\])", pattern)
    return re.compile("".join(meaning.get(piece) or _literal(piece) for piece in pieces))


def _literal(piece: str) -> str:
    if not re.fullmatch(r"\[[^]/]+\]", piece):
        return re.escape(piece)
    inside = piece[1:-1].replace("\\", r"\\").replace("[", r"\[")
    return "[^" + inside[1:] + "]" if inside[0] == "!" else "[" + inside.replace("^", r"\^") + "]"
