"""What a run writes and shows while it trains: trainer_log.jsonl, TensorBoard, a progress bar."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import jax
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from tensorboardX import SummaryWriter


@dataclasses.dataclass(frozen=True)
class Throughput:
    """How fast a run trains, and the highest device memory so far; None where the device does not tell."""

    tokens_per_second: float
    total_tokens: int
    mfu: float | None
    peak_memory_gib: float | None


LOG_FILE = "trainer_log.jsonl"
ROUTER_KEYS = (
    "moe_aux_loss",
    "router_z_loss",
    "expert_load_max",
    "expert_load_min",
    "expert_entropy",
    "expert_dropped",
)


class RunLog:
    """Collects a run's history and mirrors every entry to its readers.

    Attributes:
        history: entries of trainer_state.json's log_history so far.
    """

    def __init__(
        self, folder: Path, *, total_steps: int, start_step: int, history: list[dict], tensorboard: bool, quiet: bool
    ):
        self.history = list(history)
        self._total, self._first = total_steps, start_step
        self._started = time.perf_counter()
        alone = jax.process_index() == 0  # other processes of a run keep the history and show nothing
        self._file, self._board = None, None
        if alone:
            folder.mkdir(parents=True, exist_ok=True)
            kept = _lines_until(folder / LOG_FILE, start_step)
            self._file = (folder / LOG_FILE).open("w", encoding="utf-8")
            self._file.writelines(kept)
            self._file.flush()
            self._board = SummaryWriter(str(folder / "runs")) if tensorboard else None
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            disable=quiet or not alone,
        )
        self._task = self._progress.add_task("training", total=total_steps, completed=start_step, numbers="")
        self._progress.start()

    def advance(self, step: int) -> None:
        """Moves the progress bar to `step` updates done."""
        self._progress.update(self._task, completed=step)

    def say(self, text: str) -> None:
        """Prints a line above the progress bar."""
        if self._file is not None:
            self._progress.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def train(self, step: int, entry: dict[str, float], throughput: Throughput) -> None:
        """Records training metrics.

        Args:
            step: updates done.
            entry: loss, grad_norm, learning_rate, epoch; with fp16 loss_scale and skipped_steps; with experts
                ROUTER_KEYS.
            throughput: of the steps since the last entry.
        """
        self._record(step, entry)
        elapsed = time.perf_counter() - self._started
        remaining = elapsed / max(1, step - self._first) * (self._total - step)
        line = {
            "current_steps": step,
            "total_steps": self._total,
            "loss": entry["loss"],
            "lr": entry["learning_rate"],
            "epoch": entry["epoch"],
            "percentage": round(100 * step / self._total, 2),
            "elapsed_time": _clock(elapsed),
            "remaining_time": _clock(remaining),
            "throughput": round(throughput.tokens_per_second, 2),
            "total_tokens": throughput.total_tokens,
            **{key: entry[key] for key in ROUTER_KEYS if key in entry},
        }
        self._write(line)
        self._progress.update(self._task, completed=step, numbers=_numbers(entry, throughput))

    def evaluation(self, step: int, entry: dict[str, float]) -> None:
        """Records evaluation metrics: eval_loss, perplexity, epoch."""
        self._record(step, entry)
        self._write({"current_steps": step, "total_steps": self._total, **entry})
        self.say(f"step {step}: eval_loss {entry['eval_loss']:.4f}, perplexity {entry['perplexity']:.3f}")

    def close(self) -> None:
        """Flushes and closes everything."""
        self._progress.stop()
        for writer in (self._file, self._board):
            if writer is not None:
                writer.close()

    def _record(self, step: int, entry: dict[str, float]) -> None:
        self.history.append({**entry, "step": step})
        if self._board is not None:
            for name, value in entry.items():
                group = "eval" if name in ("eval_loss", "perplexity") else "train"
                self._board.add_scalar(f"{group}/{name}", value, step)

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()


def _lines_until(path: Path, step: int) -> list[str]:
    """Lines of an earlier attempt that the resumed run does not repeat."""
    if not step or not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [line for line in lines if line.endswith("\n") and json.loads(line)["current_steps"] <= step]


def _clock(seconds: float) -> str:
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}"


def _numbers(entry: dict[str, float], throughput: Throughput) -> str:
    parts = [f"loss {entry['loss']:.4f}", f"{throughput.tokens_per_second:,.0f} tok/s"]
    if throughput.mfu is not None:
        parts.append(f"MFU {100 * throughput.mfu:.1f} %")
    if throughput.peak_memory_gib is not None:
        parts.append(f"{throughput.peak_memory_gib:.1f} GiB")
    if entry.get("skipped_steps"):
        parts.append(f"{entry['skipped_steps']:.0f} skipped")
    return "  ".join(parts)
