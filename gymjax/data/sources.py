"""Resolve the `dataset` key: files, folders and names described in dataset_info.json."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gymjax.data.errors import DataError, did_you_mean
from gymjax.data.read import READERS

INFO_FILE = "dataset_info.json"
HUB_KEYS = ("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")
ENTRY_KEYS = (
    *HUB_KEYS, "file_name", "formatting", "ranking", "subset", "split", "folder", "num_samples", "columns", "tags",
)  # fmt: skip
FORMATTINGS = ("alpaca", "sharegpt", "openai")
COLUMNS = (
    "prompt", "query", "response", "history", "messages", "system", "tools", "images", "videos", "audios",
    "chosen", "rejected", "kto_tag",
)  # fmt: skip
HELD_OUT = ("test", "valid", "eval", "dev")
TAGS = ("role_tag", "content_tag", "user_tag", "assistant_tag", "observation_tag", "function_tag", "system_tag")


@dataclass(frozen=True)
class Source:
    """One dataset: its files, and what dataset_info.json says about its rows.

    Attributes:
        name: as the `dataset` key names it.
        files: data files, in reading order.
        formatting: "alpaca", "sharegpt" or "openai"; None = recognised from the columns.
        columns: dataset_info.json's columns: our name -> the file's name.
        tags: dataset_info.json's tags: role_tag, content_tag, ...
        num_samples: rows to take, drawn by seed; above the number of rows, training rows repeat. None = all.
    """

    name: str
    files: tuple[Path, ...]
    formatting: str | None = None
    columns: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    num_samples: int | None = None


def resolve(dataset: str | Sequence[str], dataset_dir: str | Path = "data") -> list[Source]:
    """Return the sources that a `dataset` or `eval_dataset` key names.

    Each part of the comma list is, in this order: a name in dataset_dir's dataset_info.json, a path, or a path inside
    dataset_dir. A folder stands for its data files, sorted by name.

    Args:
        dataset: "a,b" or ["a", "b"].
        dataset_dir: folder of dataset_info.json; the folder and the file may be missing.

    Raises:
        DataError: a name is unknown, an entry is wrong, or a file is missing; says which and what to do.
    """
    names = dataset.split(",") if isinstance(dataset, str) else list(dataset)
    names = [name.strip() for name in names if name.strip()]
    if not names:
        raise DataError("dataset: names no data; give a path, a folder or a name of dataset_info.json")
    folder = Path(dataset_dir)
    info = _read_info(folder / INFO_FILE)
    return [_resolve_one(name, folder, info) for name in names]


def _read_info(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        info = json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise DataError(f"{path}: not JSON ({error}); it holds one object: name -> description") from error
    if not isinstance(info, dict):
        raise DataError(f"{path}: must hold one object (name -> description), found {type(info).__name__}")
    return info


def _resolve_one(name: str, folder: Path, info: dict[str, Any]) -> Source:
    if name in info:
        return _from_entry(name, folder, info[name])
    for path in (Path(name).expanduser(), folder / name):
        if path.exists():
            return Source(name, _split_files(name, _data_files(path), path, None))
    where = folder / INFO_FILE
    missing = "" if where.is_file() else " (which does not exist)"
    raise DataError(
        f'dataset "{name}" is neither a file or folder nor a name in {where}{missing}.'
        f"{did_you_mean(name, [*info, *_readable_names(folder)])} Give a path, or describe it there, or set dataset_dir"
    )


def _readable_names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.suffix in READERS] if folder.is_dir() else []


def _from_entry(name: str, folder: Path, entry: Any) -> Source:
    where = f"{folder / INFO_FILE}: {name}"
    if not isinstance(entry, dict):
        raise DataError(f'{where}: must be an object such as {{"file_name": "{name}.jsonl"}}, found {entry!r}')
    _check_keys(where, entry, ENTRY_KEYS)
    if entry.get("ranking"):
        raise DataError(f"{where}: ranking (preference) data belongs to stage dpo, which is not supported yet")
    file_name = entry.get("file_name")
    if file_name is None:
        raise DataError(_hub_message(where, entry))
    if entry.get("subset") is not None:
        raise DataError(f"{where}: subset applies to hub datasets only; name the file in file_name")
    path = folder / (entry.get("folder") or "") / _typed(where, "file_name", file_name, str)
    if not path.exists():
        guess = did_you_mean(path.name, _readable_names(path.parent))
        raise DataError(f"{where}: file_name {path} does not exist;{guess} correct file_name or put the file there")
    formatting = entry.get("formatting")
    if formatting is not None and formatting not in FORMATTINGS:
        raise DataError(f"{where}: formatting must be one of {', '.join(FORMATTINGS)}, found {formatting!r}")
    num_samples = entry.get("num_samples")
    if num_samples is not None and (_typed(where, "num_samples", num_samples, int) < 1 or num_samples is True):
        raise DataError(f"{where}: num_samples must be at least 1, found {num_samples}")
    return Source(
        name,
        _split_files(where, _data_files(path), path, entry.get("split")),
        formatting,
        _names(f"{where}: columns", entry.get("columns") or {}, COLUMNS),
        _names(f"{where}: tags", entry.get("tags") or {}, TAGS),
        num_samples,
    )


def _hub_message(where: str, entry: dict[str, Any]) -> str:
    hub = next((key for key in HUB_KEYS if key in entry), None)
    if hub is None:
        return f"{where}: needs file_name (a file or folder in dataset_dir)"
    if hub != "hf_hub_url":
        return f"{where}: {hub} is not read, local files only for now; download the data and set file_name instead"
    repo = entry[hub]
    return (
        f"{where}: hf_hub_url is not read, local files only for now; run `hf download --repo-type dataset {repo} "
        f"--local-dir data/{str(repo).rsplit('/', 1)[-1]}` and set file_name to that folder"
    )


def _typed(where: str, key: str, value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise DataError(f"{where}: {key} must be {kind.__name__}, found {value!r}")
    return value


def _names(where: str, given: Any, known: Sequence[str]) -> dict[str, str]:
    """Check a columns or tags object: known keys, and a string (or null, meaning unset) for each."""
    _typed(where, "it", given, dict)
    _check_keys(where, given, known)
    return {key: _typed(where, key, value, str) for key, value in given.items() if value is not None}


def _check_keys(where: str, given: dict[str, Any], known: Sequence[str]) -> None:
    for key in given:
        if key not in known:
            raise DataError(f'{where}: unknown key "{key}".{did_you_mean(key, known)} Known: {", ".join(known)}')


def _data_files(path: Path) -> tuple[Path, ...]:
    if path.is_file():
        if path.suffix.lower() not in READERS:
            raise DataError(f"{path}: data files end in {', '.join(READERS)}; convert it to one of them")
        return (path,)
    files = sorted(file for file in path.iterdir() if _is_data(file))
    if not files:
        inside = [folder.name for folder in sorted(path.iterdir()) if folder.is_dir()]
        hint = f"; its subfolders are {', '.join(inside)}: name one of them" if inside else ""
        raise DataError(f"{path}: the folder holds no data file ({', '.join(READERS)}){hint}")
    return tuple(files)


def _is_data(file: Path) -> bool:
    return file.is_file() and file.suffix.lower() in READERS and file.name != INFO_FILE and file.name[0] not in "._"


def _split_files(where: str, files: tuple[Path, ...], path: Path, split: str | None) -> tuple[Path, ...]:
    """Keep the files of a split: those whose names start with it. Unnamed files are the split `train`."""
    if split is None:
        held_out = [file.name for file in files if file.name.startswith(HELD_OUT)]
        if held_out and len(held_out) < len(files):
            raise DataError(
                f"{where}: {path} holds held-out files ({', '.join(held_out)}) beside others; name one file, "
                f"or describe the folder in {INFO_FILE} with a split"
            )
        return files
    chosen = tuple(file for file in files if file.name.startswith(split))
    if not chosen and split != "train":
        raise DataError(
            f'{where}: split "{split}" matches no file of {path} by the start of its name; name the file in file_name'
        )
    return chosen or files
