"""Curves of a run: losses and, of a mixture of experts, how its routers spread tokens."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from gymjax.checkpoint.files import replacing
from gymjax.checkpoint.hf import read_json


@dataclasses.dataclass(frozen=True)
class Curve:
    """One file: the quantities it shows and their unit."""

    keys: tuple[str, ...]
    unit: str


CURVES = {
    "training_loss.png": Curve(("loss",), "nats per trained token"),
    "training_eval_loss.png": Curve(("eval_loss",), "nats per trained token"),
    "training_moe_aux_loss.png": Curve(("moe_aux_loss",), "1 is balanced"),
    "training_expert_load.png": Curve(("expert_load_max", "expert_load_min", "expert_entropy"), "1 is even"),
}
_COLOURS = (("#9db8d9", "#1f4e8c"), ("#e3b98f", "#a85c14"), ("#a9cfae", "#2f7a3b"))  # as logged, smoothed


def plot_losses(folder: Path | str, history: Sequence[Mapping[str, float]]) -> list[Path]:
    """Draws the raw and the smoothed curve of every quantity of CURVES that was logged.

    Args:
        folder: output folder; gets one file for each curve that has at least one finite point.
        history: log_history of trainer_state.json: entries with `step` and some of CURVES' keys.

    Returns:
        The files written.
    """
    folder = Path(folder)
    figures = {}
    for name, curve in CURVES.items():
        lines = {key: points(history, key) for key in curve.keys}
        lines = {key: line for key, line in lines.items() if line[0]}
        if lines:
            figures[name] = draw(lines, curve.unit)
    if not figures:
        return []
    with replacing(folder) as temporary:
        for name, figure in figures.items():
            FigureCanvasAgg(figure).print_png(str(temporary / name))
    return [folder / name for name in figures]


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


def draw(lines: Mapping[str, tuple[Sequence[int], Sequence[float]]], unit: str) -> Figure:
    """A figure of up to three quantities, each with its (steps, values)."""
    figure = Figure(figsize=(8, 5), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    for (label, (steps, values)), (raw, smoothed) in zip(lines.items(), _COLOURS):
        marker = "o" if len(values) < 20 else None
        axes.plot(steps, values, color=raw, marker=marker, markersize=3, label=f"{label}, as logged")
        axes.plot(steps, smooth(values), color=smoothed, label=f"{label}, smoothed")
    axes.set_xlabel("step")
    axes.set_ylabel(f"{', '.join(lines)} ({unit})")
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
    history = read_json(path).get("log_history")
    numbers = {"step", *(key for curve in CURVES.values() for key in curve.keys)}
    if not isinstance(history, list) or not all(
        isinstance(entry, dict) and all(isinstance(entry.get(key, 0), int | float) for key in numbers)
        for entry in history
    ):
        raise ValueError(f"{path} has no readable log_history, a list of numbers by step; give another folder")
    return history
