"""Datasets of the Hugging Face hub: the files of a split are found and downloaded. No script is run."""

import glob
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import yaml
from huggingface_hub.errors import CachedRepoTreeNotFoundError

from gymjax.data.errors import DataError, did_you_mean
from gymjax.data.read import READERS
from gymjax.data.splits import DEFAULT_SPLIT, by_name, is_data, match, one_type, patterns_of, some
from gymjax.hub import download

CARD_KEYS = ("config_name", "data_files", "data_dir", "default", "description", "version", "features")


@dataclass(frozen=True)
class Choice:
    """What is read of a dataset: a split of a subset or of a folder, or data_files (patterns), of a revision."""

    subset: str | None = None
    split: str | None = None
    folder: str | None = None
    data_files: tuple[str, ...] = ()
    ds_type: str | None = None
    revision: str | None = None


def hub_files(where: str, name: str, choice: Choice, cache_dir: str | None = None) -> tuple[Path, ...]:
    """Download the files of a split, and nothing else, and return them in reading order.

    README.md's `configs` decide which files those are; without them, the names of folders and files do. The paths hold
    the commit.

    Raises:
        DataError: the repository, the subset, the split or a file is not there, or is not read; begins with `where`.
    """
    try:
        root = download(where, name, ["README.md"], kind="dataset", revision=choice.revision, cache_dir=cache_dir)
        files = _chosen(f"{where}: {name}", sorted(_listing(name, root, cache_dir)), root / "README.md", choice)
        exact = [glob.escape(file) for file in files]
        root = download(where, name, exact, kind="dataset", revision=root.name, cache_dir=cache_dir)
    except FileNotFoundError as error:
        raise DataError(str(error)) from error
    return tuple(root / file for file in files)


def _listing(name: str, root: Path, cache_dir: str | None) -> list[str]:
    """All files of the commit, downloaded or not."""
    try:
        tree = huggingface_hub.get_cached_repo_tree(name, repo_type="dataset", revision=root.name, cache_dir=cache_dir)
    except CachedRepoTreeNotFoundError:  # the copy was made by an older huggingface_hub, and there is no network
        return [path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()]
    return [file.path for file in tree]


def _chosen(what: str, names: list[str], card: Path, choice: Choice) -> list[str]:
    data = [name for name in names if is_data(name)]
    if not data:
        scripts = [name for name in names if name.endswith(".py")]
        reason = f"is a loading script ({some(scripts)}), which is never run" if scripts else "holds no data file"
        raise DataError(f"{what} {reason}; download it and convert it to {', '.join(READERS)}")
    if choice.subset and (choice.folder or choice.data_files):
        raise DataError(f"{what}: subset {choice.subset} and folder or data_files both choose files; keep one")
    config = {} if choice.folder or choice.data_files else _subset(what, _card(what, card), choice.subset)
    base = str(choice.folder or config.get("data_dir") or "").strip("/")
    inside = [name.removeprefix(f"{base}/") for name in data if not base or name.startswith(f"{base}/")]
    if not inside:
        raise DataError(f"{what}: folder {base} holds no data file; there is {some(data)}")
    given = choice.data_files or config.get("data_files")
    splits = patterns_of(what, given) if given else by_name(inside)
    split = choice.split or DEFAULT_SPLIT
    if split not in splits:
        default = "" if choice.split else " (the default)"
        raise DataError(f"{what}: there is no split {split}{default}; set split to one of {', '.join(splits)}")
    source = "data_files" if choice.data_files else f"split {split}:"
    files = match(f"{what}: {source}", splits[split], inside)
    return [f"{base}/{file}" if base else file for file in one_type(f"{what}: {source}", files, choice.ds_type)]


def _card(what: str, card: Path) -> list[dict[str, Any]]:
    """README.md's `configs`: one object for each subset."""
    try:
        configs = ((huggingface_hub.metadata_load(card) if card.is_file() else None) or {}).get("configs") or []
        if all(isinstance(config, dict) and isinstance(config.get("config_name"), str) for config in configs):
            return list(configs)
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise DataError(f"{what}: README.md's metadata cannot be read ({error}); name files in data_files") from error
    raise DataError(f"{what}: README.md's configs must be objects with a config_name; name files in data_files")


def _subset(what: str, configs: list[dict[str, Any]], subset: str | None) -> dict[str, Any]:
    """The subset that is asked for, else the only one, else the one that the card makes the default."""
    known = {config["config_name"]: config for config in configs}
    if subset is None:
        default = [name for name in known if name == "default" or known[name].get("default") is True]
        chosen = default if default else list(known)
        if len(chosen) > 1:
            raise DataError(f"{what} has several subsets, and none is chosen; set subset to one of {', '.join(known)}")
        subset = chosen[0] if chosen else None
    elif subset not in known:
        raise DataError(
            f"{what}: there is no subset {subset};{did_you_mean(subset, known)} "
            + (f"set subset to one of {', '.join(known)}" if known else "its README.md describes none: remove subset")
        )
    config = known[subset] if subset else {}
    lost = [f"{key}: {value!r}" for key, value in config.items() if key not in CARD_KEYS]
    if lost:
        raise DataError(
            f"{what}: README.md sets {', '.join(lost)} for {subset}, which is not followed; convert the files, or name "
            "them in data_files if they can be read without"
        )
    return config
