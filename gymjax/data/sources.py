"""Resolve the `dataset` key: names described in dataset_info.json, files, folders and ids of the Hugging Face hub."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gymjax.data.errors import DataError, did_you_mean
from gymjax.data.hub import Choice, hub_files
from gymjax.data.read import READERS
from gymjax.data.splits import is_data, match, one_type
from gymjax.hub import HUB_ID

INFO_FILE = "dataset_info.json"
HUB_KEYS = ("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")
ENTRY_KEYS = (
    *HUB_KEYS, "file_name", "formatting", "ranking", "subset", "split", "folder", "num_samples", "columns", "tags",
    "data_files", "ds_type", "revision",
)  # fmt: skip
FORMATTINGS = ("alpaca", "sharegpt", "openai")
COLUMNS = (
    "prompt", "query", "response", "history", "messages", "system", "tools", "images", "videos", "audios",
    "chosen", "rejected", "kto_tag",
)  # fmt: skip
HELD_OUT = ("test", "valid", "eval", "dev")
TEXT_OPTIONS = ("subset", "split", "folder", "ds_type", "revision")
OPTIONS = (*TEXT_OPTIONS, "data_files")  # what follows a path or hub id and "?"
SPLIT = re.compile(r"([\w.]+)(?:\[(-?\d[\d_]*%?)?:(-?\d[\d_]*%?)?\])?")
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
        part: bounds of the rows to take first, such as (None, "20%"), see mix.part. None = all.
    """

    name: str
    files: tuple[Path, ...]
    formatting: str | None = None
    columns: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    num_samples: int | None = None
    part: tuple[str | None, str | None] | None = None


def resolve(
    dataset: str | Sequence[str],
    dataset_dir: str | Path = "data",
    *,
    key: str = "dataset",
    hub_cache: str | None = None,
) -> list[Source]:
    """Return the sources that a `dataset` or `eval_dataset` key names.

    Each part of the comma list is, in this order: a name in dataset_dir's dataset_info.json, a path, a path inside
    dataset_dir, or an id of the Hugging Face hub. A folder stands for its data files, sorted by name. What is read of a
    path or id may follow it: `owner/name?subset=main&split=train[:20%]`, see OPTIONS; a `data_files` may be repeated.

    Args:
        dataset: "a,b" or ["a", "b"].
        dataset_dir: folder of dataset_info.json; the folder and the file may be missing.
        key: whose value it is, for messages.
        hub_cache: where downloads go; None for huggingface_hub's own place.

    Raises:
        DataError: a name is unknown, an entry is wrong, or a file is missing; says which and what to do.
    """
    names = dataset.split(",") if isinstance(dataset, str) else list(dataset)
    names = [name.strip() for name in names if name.strip()]
    if not names:
        raise DataError(f"{key}: names no data; give a path, a folder, a name of dataset_info.json or a hub id")
    folder = Path(dataset_dir)
    info = _read_info(folder / INFO_FILE)
    return [_resolve_one(key, name, folder, info, hub_cache) for name in names]


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


def _resolve_one(key: str, name: str, folder: Path, info: dict[str, Any], hub_cache: str | None) -> Source:
    if name in info:
        return _from_entry(name, folder, info[name], hub_cache)
    whole = any(path.exists() for path in (Path(name).expanduser(), folder / name))
    path_or_id, _, options = (name, "", "") if whole else name.partition("?")
    choice, part = _options(f"{key} {name}", options)
    if path_or_id in info:
        raise DataError(f"{key} {name}: what is read of {path_or_id} is said in {folder / INFO_FILE}; write it there")
    for path in (Path(path_or_id).expanduser(), folder / path_or_id):
        if path.exists():
            return Source(name, _local_files(path_or_id, path, choice), part=part)
    guess = did_you_mean(path_or_id, [*info, *_readable_names(folder)])
    if HUB_ID.fullmatch(path_or_id) and Path(path_or_id).suffix.lower() not in READERS:
        try:
            return Source(name, hub_files(key, path_or_id, choice, hub_cache), part=part)
        except DataError as error:
            raise DataError(f"{error}{'.' if guess else ''}{guess}") from error
    where = folder / INFO_FILE
    missing = "" if where.is_file() else " (which does not exist)"
    raise DataError(
        f'{key} "{path_or_id}" is neither a file or folder nor a name in {where}{missing}, nor a hub id (owner/name).'
        f"{guess} Give a path, or describe it there, or set dataset_dir"
    )


def _options(where: str, written: str) -> tuple[Choice, tuple[str | None, str | None] | None]:
    """Read `subset=main&split=train[:20%]`."""
    given: dict[str, Any] = {}
    for name, _, value in (option.partition("=") for option in written.split("&") if option):
        if name not in OPTIONS or not value:
            raise DataError(
                f"{where}: {name} is no option;{did_you_mean(name, OPTIONS)} write {'=..., '.join(OPTIONS)}="
            )
        if name in given and name != "data_files":
            raise DataError(f"{where}: {name} is given twice, as {given[name]} and {value}; keep one")
        given[name] = (*given.get(name, ()), value) if name == "data_files" else value
    given["split"], part = _split_and_part(where, given.get("split"))
    return Choice(**given), part


def _split_and_part(where: str, split: str | None) -> tuple[str | None, tuple[str | None, str | None] | None]:
    """Take `train[:20%]` apart into the split and the bounds of its rows."""
    if split is None:
        return None, None
    parsed = SPLIT.fullmatch(split)
    if parsed is None:
        raise DataError(f"{where}: split must be a name, or one with a part of its rows (train[:20%]), is {split}")
    return parsed[1], None if "[" not in split else (parsed[2], parsed[3])


def _local_files(name: str, path: Path, choice: Choice) -> tuple[Path, ...]:
    for key in ("subset", "folder", "revision"):
        if getattr(choice, key):
            raise DataError(f"{name}: {key} {getattr(choice, key)} applies to hub datasets only; {path} is here")
    if choice.data_files and path.is_dir():
        below = sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
        chosen = match(f"{name}: data_files", choice.data_files, [file for file in below if is_data(file)])
        return tuple(path / file for file in one_type(f"{name}: data_files", chosen, choice.ds_type))
    if choice.data_files:
        raise DataError(f"{name}: data_files choose from a folder, {path} is a file")
    files = {file.name: file for file in _split_files(name, _data_files(path), path, choice.split)}
    wanted = one_type(name, list(files), choice.ds_type) if choice.ds_type else files
    return tuple(files[file] for file in wanted)


def _readable_names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.suffix in READERS] if folder.is_dir() else []


def _from_entry(name: str, folder: Path, entry: Any, hub_cache: str | None) -> Source:
    where = f"{folder / INFO_FILE}: {name}"
    if not isinstance(entry, dict):
        raise DataError(f'{where}: must be an object such as {{"file_name": "{name}.jsonl"}}, found {entry!r}')
    _check_keys(where, entry, ENTRY_KEYS)
    if entry.get("ranking"):
        raise DataError(f"{where}: ranking (preference) data belongs to stage dpo, which is not supported yet")
    formatting = entry.get("formatting")
    if formatting is not None and formatting not in FORMATTINGS:
        raise DataError(f"{where}: formatting must be one of {', '.join(FORMATTINGS)}, found {formatting!r}")
    num_samples = entry.get("num_samples")
    if num_samples is not None and (_typed(where, "num_samples", num_samples, int) < 1 or num_samples is True):
        raise DataError(f"{where}: num_samples must be at least 1, found {num_samples}")
    given: dict[str, Any] = {key: _typed(where, key, entry[key], str) for key in TEXT_OPTIONS if entry.get(key)}
    given["split"], part = _split_and_part(where, given.get("split"))
    choice = Choice(**given, data_files=_texts(where, "data_files", entry.get("data_files")))
    return Source(
        name,
        _entry_files(where, folder, entry, choice, hub_cache),
        formatting,
        _names(f"{where}: columns", entry.get("columns") or {}, COLUMNS),
        _names(f"{where}: tags", entry.get("tags") or {}, TAGS),
        num_samples,
        part,
    )


def _entry_files(
    where: str, folder: Path, entry: dict[str, Any], choice: Choice, hub_cache: str | None
) -> tuple[Path, ...]:
    """Files of an entry; where it names both, the hub comes before file_name, as in LLaMA-Factory."""
    if entry.get("hf_hub_url") is not None:
        return hub_files(
            f"{where}: hf_hub_url", _typed(where, "hf_hub_url", entry["hf_hub_url"], str), choice, hub_cache
        )
    file_name = entry.get("file_name")
    if file_name is None:
        other = next((key for key in HUB_KEYS if entry.get(key) is not None), None)
        if other is None:
            raise DataError(f"{where}: needs file_name (a file or folder in dataset_dir) or hf_hub_url (a hub id)")
        raise DataError(f"{where}: {other} is not read; set hf_hub_url, or download the data and set file_name")
    for key in ("subset", "data_files", "ds_type", "revision"):
        if entry.get(key) is not None:
            raise DataError(f"{where}: {key} applies to hub datasets only; name the file in file_name")
    path = folder / (choice.folder or "") / _typed(where, "file_name", file_name, str)
    if not path.exists():
        guess = did_you_mean(path.name, _readable_names(path.parent))
        raise DataError(f"{where}: file_name {path} does not exist;{guess} correct file_name or put the file there")
    return _split_files(where, _data_files(path), path, choice.split)


def _texts(where: str, key: str, value: Any) -> tuple[str, ...]:
    """Check a text or a list of texts; null is none."""
    texts = value if isinstance(value, list) else [] if value is None else [value]
    return tuple(_typed(where, key, text, str) for text in texts)


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
