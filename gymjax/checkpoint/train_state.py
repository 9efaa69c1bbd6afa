"""Checkpoints of a training run: `checkpoint-<step>/` with an orbax tree in `state/`, and trainer_state.json.

A folder of that name is always whole: it is written under another name and renamed once everything is on the disk.
"""

import contextlib
import json
import re
import shutil
import zlib
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jaxtyping import PyTree

from gymjax.checkpoint.files import disk_full, is_disk_full, require_space, sync

STATE = "state"
META = "trainer_state.json"
MANIFEST = "state.json"  # what was saved: shapes, sizes and checksums
_CHUNK = 1 << 24


class Checkpoints:
    """The checkpoints of one output folder. Saving runs in the background; one save at a time."""

    def __init__(self, output_dir: Path | str, keep: int | None = None):
        """Touches nothing yet.

        Args:
            output_dir: folder of the run.
            keep: how many checkpoints stay, the newest ones; None for all.

        Raises:
            ValueError: keep is below 1.
        """
        if keep is not None and keep < 1:
            raise ValueError(f"save_total_limit must be at least 1 or absent, is {keep}")
        self.output_dir = Path(output_dir).absolute()
        self._keep = keep
        self._writer: ocp.StandardCheckpointer | None = None
        self._background = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._running: Future | None = None

    def steps(self) -> list[int]:
        """Steps of the whole checkpoints, oldest first."""
        found = [(re.fullmatch(r"checkpoint-(\d+)", path.name), path) for path in self.output_dir.glob("checkpoint-*")]
        return sorted(
            int(m[1]) for m, path in found if m and all((path / part).exists() for part in (STATE, META, MANIFEST))
        )

    def latest(self) -> int | None:
        """Step of the newest whole checkpoint, or None."""
        return max(self.steps(), default=None)

    def folder(self, step: int) -> Path:
        """Where the checkpoint of a step lies."""
        return self.output_dir / f"checkpoint-{step}"

    def save(
        self,
        step: int,
        state: PyTree[jax.Array],
        meta: Mapping[str, Any],
        *,
        extra: Callable[[Path], None] | None = None,
        protect: int | None = None,
    ) -> None:
        """Begin a checkpoint; the arrays are copied before this returns, so the caller may donate them.

        Args:
            step: number in the folder's name.
            state: arrays, and PRNG keys, in any pytree.
            meta: JSON object written as trainer_state.json.
            extra: writes further files (an adapter, say) into the folder it is given; runs at once.
            protect: step of a checkpoint that stays whatever `keep` says: the best one.

        Raises:
            OSError: not enough disk, for this or for the previous save; older checkpoints are intact.
        """
        self.wait()
        leaves = _named(state)
        text = json.dumps(meta, indent=2)
        partial = self.output_dir / f".checkpoint-{step}.partial"
        self.output_dir.mkdir(parents=True, exist_ok=True)
        require_space(self.output_dir, sum(leaf.nbytes for leaf in leaves.values()))
        if jax.process_index() == 0:
            for old in self.output_dir.glob(".*checkpoint-*.partial*"):
                shutil.rmtree(old)
            partial.mkdir()
        writer = self._writer = self._writer or ocp.StandardCheckpointer()
        with _full_disk_named(partial):
            if extra is not None:
                extra(partial)
            writer.save(partial / STATE, leaves)
        shapes = {name: _describe(leaf) for name, leaf in leaves.items()}

        def finish() -> None:
            with _full_disk_named(partial):
                writer.wait_until_finished()
                if jax.process_index() == 0:
                    _seal(partial, text, shapes)
            if jax.process_index() == 0:
                self._publish(step, partial, protect)

        self._running = self._background.submit(finish)

    def _publish(self, step: int, partial: Path, protect: int | None) -> None:
        """Give a sealed folder its name and remove old ones."""
        target = self.folder(step)
        if target.exists():  # saved again after going back: set it aside, so that no moment has neither
            target.rename(self.output_dir / f".checkpoint-{step}-replaced.partial")
        partial.rename(target)
        sync(self.output_dir)
        self.prune(protect)

    def prune(self, protect: int | None = None) -> None:
        """Remove the oldest checkpoints beyond `keep`, with or without a train state, but never `protect`."""
        if jax.process_index() != 0:
            return
        names = [re.fullmatch(r"checkpoint-(\d+)", path.name) for path in self.output_dir.glob("checkpoint-*")]
        steps = sorted(int(name[1]) for name in names if name)
        for old in steps[: -self._keep] if self._keep else []:
            if old != protect:
                shutil.rmtree(self.folder(old))

    def wait(self) -> None:
        """Block until the save that runs, if any, is on the disk.

        Raises:
            OSError: it failed; older checkpoints are intact.
        """
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def restore(self, step: int, like: PyTree) -> tuple[PyTree[jax.Array], dict[str, Any]]:
        """Read a checkpoint back, every bit as saved.

        Args:
            step: of a whole checkpoint.
            like: the same pytree with arrays, or jax.ShapeDtypeStruct with shardings, in the place of its arrays.

        Returns:
            The state, placed as `like` says, and the meta data.

        Raises:
            FileNotFoundError: no such checkpoint.
            ValueError: it is damaged, or was saved by a run with other weights or another optimizer.
        """
        folder = self.folder(step)
        if step not in self.steps():
            raise FileNotFoundError(f"{folder} is no whole checkpoint; there are: {self.steps() or 'none'}")
        try:
            meta = json.loads((folder / META).read_text(encoding="utf-8"))
            manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
            damaged = _damaged_files(folder / STATE, manifest["files"])
            shapes = manifest["leaves"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(self._remedy(step, f"its JSON files cannot be read ({error})")) from None
        if damaged:
            raise ValueError(self._remedy(step, f"{', '.join(damaged)} differ from what was saved"))
        names = _named(like)
        _check_structure(folder, shapes, {name: _describe(leaf) for name, leaf in names.items()})
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, names)
        with ocp.StandardCheckpointer() as reader:
            restored = reader.restore(folder / STATE, target)
        return jax.tree.unflatten(jax.tree.structure(like), [restored[name] for name in names]), meta

    def _remedy(self, step: int, what: str) -> str:
        older = [s for s in self.steps() if s < step]
        then = f"resume from checkpoint-{older[-1]}" if older else "start the run again"
        return f"{self.folder(step)} is damaged: {what}. Delete that folder to {then}"

    def close(self) -> None:
        """Wait for the save that runs and release orbax's threads; raises as `wait` does."""
        try:
            self.wait()
        finally:
            self._background.shutdown()
            if self._writer is not None:
                self._writer.close()
                self._writer = None


def _seal(partial: Path, text: str, shapes: Mapping[str, str]) -> None:
    """Write what was saved beside the arrays, and wait until all of it is on the disk."""
    (partial / META).write_text(text + "\n", encoding="utf-8")
    manifest = {"leaves": shapes, "files": _checksums(partial / STATE)}
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    for path in (*partial.rglob("*"), partial):
        sync(path)


def _named(state: PyTree) -> dict[str, Any]:
    """Leaves by their path in the tree, so that any pytree becomes a flat dict."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _describe(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"


def _check_structure(folder: Path, saved: Mapping[str, str], wanted: Mapping[str, str]) -> None:
    differing = [
        f"{name}: saved {saved.get(name, 'not')}, now {wanted.get(name, 'absent')}"
        for name in sorted(saved.keys() | wanted.keys())
        if saved.get(name) != wanted.get(name)
    ]
    if differing:
        first = "; ".join(differing[:3])
        raise ValueError(
            f"{folder} was saved by a different configuration ({len(differing)} arrays differ: {first}). "
            "Resume with the model, adapter and optimizer settings it was saved with, or choose another output_dir"
        )


def _checksums(folder: Path) -> dict[str, list[int]]:
    """Size and CRC-32 of every file, by its path inside the folder."""
    return {
        path.relative_to(folder).as_posix(): [path.stat().st_size, _crc32(path)]
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _crc32(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            value = zlib.crc32(chunk, value)
    return value


def _damaged_files(folder: Path, written: Mapping[str, list[int]]) -> list[str]:
    def differs(name: str, size: int, checksum: int) -> bool:
        path = folder / name
        return not path.is_file() or path.stat().st_size != size or _crc32(path) != checksum

    return [f"{folder.name}/{name}" for name, (size, checksum) in written.items() if differs(name, size, checksum)]


@contextlib.contextmanager
def _full_disk_named(partial: Path) -> Generator[None]:
    """Removes the partial folder on any error; turns what orbax raises on a full disk into an OSError with a remedy."""
    try:
        yield
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if is_disk_full(error):
            raise disk_full(partial.parent, "the write stopped half-way") from error
        raise
