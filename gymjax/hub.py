"""Download from the Hugging Face hub: models and datasets come the same way, with the same messages."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import huggingface_hub
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
"""How a repository is named: owner/name."""


def download(
    where: str,
    name: str,
    allow: Sequence[str],
    *,
    ignore: Sequence[str] = (),
    kind: Literal["model", "dataset"] = "model",
    revision: str | None = None,
    cache_dir: str | None = None,
) -> Path:
    """The folder with files of a hub repository; what the cache holds already is not downloaded again.

    Args:
        where: the key that names the repository, for messages.
        name: owner/name.
        allow: patterns of the files; `*` matches `/` too.
        ignore: patterns of files to leave out.
        kind: of the repository.
        revision: branch, tag or commit; None for main.
        cache_dir: where downloads go; None for huggingface_hub's own place.

    Raises:
        FileNotFoundError: there is no such repository or revision, it is closed to this account, or it is out of reach
            and the cache does not hold it.
    """
    try:
        folder = huggingface_hub.snapshot_download(
            name,
            repo_type=kind,
            revision=revision,
            cache_dir=cache_dir,
            allow_patterns=list(allow),
            ignore_patterns=list(ignore),
        )
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, ConnectionError) as error:
        command = ["hf download", "--repo-type dataset" if kind == "dataset" else "", name]
        command += [f"--revision {revision}" if revision else "", f"--cache-dir {cache_dir}" if cache_dir else ""]
        raise FileNotFoundError(
            f"{where}: {name} is not here, no path and not whole in the hub cache, and the hub cannot be reached "
            f"({type(error).__name__}). Give a local path, or run once with network access: "
            f"`{' '.join(filter(None, command))}`"
        ) from error
    except (HfHubHTTPError, HFValidationError) as error:
        raise FileNotFoundError(f"{where}: {_refusal(name, kind, revision, error)}") from error
    return Path(folder)


def _refusal(name: str, kind: str, revision: str | None, error: Exception) -> str:
    if isinstance(error, GatedRepoError):
        page = f"https://huggingface.co/{'datasets/' if kind == 'dataset' else ''}{name}"
        return f"the {kind} {name} is gated; accept its terms at {page} and run `hf auth login`"
    if isinstance(error, RepositoryNotFoundError):
        return f"the hub has no {kind} {name}, or it is private; check the spelling, or run `hf auth login`"
    if isinstance(error, RevisionNotFoundError):
        return f"the {kind} {name} has no revision {revision or 'main'}; check the spelling"
    return f"the hub refuses {name} ({error}). Check the spelling"
