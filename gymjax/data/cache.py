"""Tokenized datasets on disk, found by a hash of everything that decides them."""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from gymjax.data.loader import Dataset
from gymjax.data.report import DataReport

# Raise by one whenever the code would make other tokens or weights out of the same data.
CODE_VERSION = 2


class CacheMiss(Exception):  # noqa: N818 - a miss is no error
    """There is no usable entry; `corrupt` tells a damaged one from none."""

    def __init__(self, reason: str, *, corrupt: bool):
        super().__init__(reason)
        self.corrupt = corrupt


def cache_key(files: Iterable[Path], tokenizer: Any, settings: Mapping[str, Any]) -> str:
    """Return the hash of data bytes, tokenizer, settings (template text among them) and CODE_VERSION.

    Args:
        files: data files in reading order; their names count too, for they are in error messages.
        tokenizer: a Hugging Face fast tokenizer; its serialised form counts.
        settings: JSON values.
    """
    digest = hashlib.sha256(f"version {CODE_VERSION}".encode())
    for file in files:
        with file.open("rb") as opened:
            content = hashlib.file_digest(opened, "sha256").hexdigest()
        digest.update(json.dumps([str(file), content]).encode())
    digest.update(hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).digest())
    digest.update(json.dumps([tokenizer.special_tokens_map, settings], sort_keys=True, default=str).encode())
    return digest.hexdigest()


def load(path: Path) -> tuple[Dataset | None, Dataset | None, DataReport]:
    """Read an entry.

    Raises:
        CacheMiss: there is none, or its content does not match its checksum.
    """
    if not path.is_file():
        raise CacheMiss(f"{path} does not exist", corrupt=False)
    try:
        with safe_open(path, framework="numpy") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - safe_open is no dict
            checksum = (file.metadata() or {}).get("sha256")
        if checksum != _checksum(arrays):
            raise CacheMiss(f"{path} does not match its checksum", corrupt=True)
        head = json.loads(arrays["head"].tobytes())
        report = DataReport.from_dict(head["report"])
        return _dataset(arrays, head, "train"), _dataset(arrays, head, "eval"), report
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise CacheMiss(f"{path} is damaged ({error})", corrupt=True) from error


def save(path: Path, train: Dataset | None, evaluation: Dataset | None, report: DataReport) -> None:
    """Write an entry: under another name first, then renamed, so that a reader never meets half of one."""
    splits = {"train": train, "eval": evaluation}
    head = {"report": report.to_dict(), "sources": {name: data.sources for name, data in splits.items() if data}}
    arrays = {"head": np.frombuffer(json.dumps(head).encode(), np.uint8)}
    for name, data in splits.items():
        if data is not None:
            arrays |= {f"{name}.ids": data.ids, f"{name}.weights": data.weights, f"{name}.offsets": data.offsets}
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    os.close(handle)
    try:
        save_file(arrays, temporary, metadata={"sha256": _checksum(arrays)})
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _dataset(arrays: Mapping[str, np.ndarray], head: Mapping[str, Any], name: str) -> Dataset | None:
    if name not in head["sources"]:
        return None
    return Dataset(
        ids=arrays[f"{name}.ids"],
        weights=arrays[f"{name}.weights"],
        offsets=arrays[f"{name}.offsets"],
        sources=tuple(head["sources"][name]),
    )


def _checksum(arrays: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].dtype} {arrays[name].shape} ".encode())
        digest.update(np.ascontiguousarray(arrays[name]).tobytes())
    return digest.hexdigest()
