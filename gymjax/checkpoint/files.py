"""Writing a set of files so that a crash, a kill or a full disk leaves the old set whole."""

import contextlib
import errno
import os
import shutil
from collections.abc import Generator
from pathlib import Path


def require_space(folder: Path, needed: int) -> None:
    """Refuse to begin a write that cannot end.

    Args:
        folder: where the files go; it or a parent exists.
        needed: bytes.

    Raises:
        OSError: fewer bytes are free than needed.
    """
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise disk_full(folder, f"{_gib(needed)} are needed there and {_gib(free)} are free")


@contextlib.contextmanager
def replacing(folder: Path) -> Generator[Path]:
    """A temporary folder whose files take their places in `folder` when the block ends without an error.

    A folder that does not exist yet appears whole, by one rename of its sibling; in one that does, each file is
    replaced at once and files of other names stay. The temporary folder then lies inside it: its parent may be on
    another file system (a mounted volume, a link) or not writable. On any error nothing of `folder` is touched and the
    temporary folder is removed.

    Raises:
        OSError: the disk is full; the message says that the old files are intact.
    """
    folder = folder.absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder / ".writing.tmp" if folder.exists() else folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # left by a process that was killed
    temporary.mkdir()
    try:
        yield temporary
        for path in _files(temporary):
            sync(path)
        if folder.exists():
            for path in sorted(_files(temporary), key=_indexes_last):
                target = folder / path.relative_to(temporary)
                target.parent.mkdir(parents=True, exist_ok=True)
                path.replace(target)
        else:
            temporary.rename(folder)
        sync(folder.parent)
    except Exception as error:  # tokenizers raises nothing narrower
        if is_disk_full(error):
            raise disk_full(folder, "the write stopped half-way") from error
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def sync(path: Path) -> None:
    """Wait until a file or a folder's entries are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _files(folder: Path) -> list[Path]:
    """Files, those in folders too: transformers has one for a tokenizer's further chat templates."""
    return [path for path in folder.rglob("*") if path.is_file()]


def _indexes_last(path: Path) -> tuple[bool, str]:
    """Files that name other files are replaced after them."""
    return path.suffix == ".json", path.name


def is_disk_full(error: BaseException) -> bool:
    """Whether an error, of the system or of a library that only passes its text on, says that the disk is full."""
    return getattr(error, "errno", None) == errno.ENOSPC or os.strerror(errno.ENOSPC) in str(error)


def disk_full(folder: Path, what: str) -> OSError:
    """The error to raise for a full disk."""
    return OSError(
        errno.ENOSPC,
        f"disk full while writing {folder}: {what}. What was saved before is intact; free space or write elsewhere",
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
