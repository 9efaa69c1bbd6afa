"""Loss curves of a run: training_loss.png and training_eval_loss.png."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from gymjax.checkpoint.files import replacing

CURVES = {"training_loss.png": "loss", "training_eval_loss.png": "eval_loss"}
_RAW, _SMOOTH = "#9db8d9", "#1f4e8c"


def plot_losses(folder: Path | str, history: Sequence[Mapping[str, float]]) -> list[Path]:
    """Draws the raw and the smoothed curve of training loss and evaluation loss.

    Args:
        folder: output folder; gets one file for each curve that has at least one finite point.
        history: log_history of trainer_state.json: entries with `step` and `loss` or `eval_loss`.

    Returns:
        The files written.
    """
    folder = Path(folder)
    curves = {name: points(history, key) for name, key in CURVES.items()}
    curves = {name: curve for name, curve in curves.items() if curve[0]}
    if not curves:
        return []
    with replacing(folder) as temporary:
        for name, (steps, values) in curves.items():
            figure = draw(steps, values, CURVES[name])
            FigureCanvasAgg(figure).print_png(str(temporary / name))
    return [folder / name for name in curves]


def points(history: Sequence[Mapping[str, float]], key: str) -> tuple[list[int], list[float]]:
    """Steps and finite values of one quantity."""
    found = [(int(entry["step"]), float(entry[key])) for entry in history if "step" in entry and key in entry]
    found = [(step, value) for step, value in found if math.isfinite(value)]
    return [step for step, _ in found], [value for _, value in found]


def smooth(values: Sequence[float]) -> list[float]:
    """Exponential moving average whose weight on the past grows with the number of points.

    `s[i] = w * s[i-1] + (1 - w) * x[i]`, `s[0] = x[0]`, `w = 1.8 * (1 / (1 + exp(-0.05 * n)) - 0.5)`: 0 for a single
    point, 0.9 for hundreds, as LLaMA-Factory smooths its curves.
    """
    weight = 1.8 * (1 / (1 + math.exp(-0.05 * len(values))) - 0.5)
    smoothed: list[float] = []
    for value in values:
        smoothed.append(weight * smoothed[-1] + (1 - weight) * value if smoothed else value)
    return smoothed


def draw(steps: Sequence[int], values: Sequence[float], label: str) -> Figure:
    """A figure of one curve."""
    figure = Figure(figsize=(8, 5), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    marker = "o" if len(values) < 20 else None
    axes.plot(steps, values, color=_RAW, marker=marker, markersize=3, label=f"{label}, as logged")
    axes.plot(steps, smooth(values), color=_SMOOTH, label=f"{label}, smoothed")
    axes.set_xlabel("step")
    axes.set_ylabel(f"{label} (nats per trained token)")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def read_history(folder: Path | str) -> list[dict[str, float]]:
    """log_history of an output folder, or of its newest checkpoint where the run has not ended.

    Raises:
        FileNotFoundError: neither is there.
        ValueError: trainer_state.json is damaged.
    """
    folder = Path(folder)
    checkpoints = sorted(folder.glob("checkpoint-*/trainer_state.json"), key=lambda path: path.stat().st_mtime)
    candidates = [folder / "trainer_state.json", *reversed(checkpoints)]
    path = next((path for path in candidates if path.is_file()), None)
    if path is None:
        raise FileNotFoundError(
            f"{folder} holds no trainer_state.json, nor does a checkpoint in it; give a run's output_dir"
        )
    try:
        return list(json.loads(path.read_text(encoding="utf-8"))["log_history"])
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} has no readable log_history ({error!r}); give another folder") from None
