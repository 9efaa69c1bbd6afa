"""Numbers, result lines and picture of proof_qlora.py.

Usage: python scripts/proof_report.py CURVES.csv PICTURE.png     draws the picture again from stored curves
"""

from __future__ import annotations

import csv
import datetime
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np

WINDOW = 20  # steps of the running mean: the noise of single batches is the same on both sides, rounding's is not
CURVE_BAR, EVAL_BAR = 0.01, 0.005  # relative
OURS, PEER, UNPACKED = "gymjax_nf4", "hf_nf4", "gymjax_bf16"
NAMES = {OURS: "gymjax, NF4", UNPACKED: "gymjax, bf16 base", PEER: "transformers + PEFT + bitsandbytes, NF4"}
COLOURS = {OURS: "#1f4e8c", UNPACKED: "#2f7a3b", PEER: "#d08a2e"}


def smooth(losses) -> np.ndarray:
    """Running mean over WINDOW steps, whole windows only; over all steps where a run is shorter."""
    width = min(WINDOW, len(losses))
    return np.convolve(np.asarray(losses, np.float64), np.full(width, 1 / width), "valid")


def gap(losses, peer_losses) -> float:
    """Largest relative difference between two smoothed curves."""
    a, b = smooth(losses), smooth(peer_losses)
    return float(np.max(np.abs(a / b - 1)))


def tokens_per_second(run: Mapping, tokens: int) -> float:
    """By the median step; the first ones compile."""
    return tokens / float(np.median(run["seconds"][len(run["seconds"]) // 4 :]))


def result_lines(runs: Mapping[str, dict], settings: Mapping, about: Mapping) -> list[dict]:
    """Result lines of our packed run beside each other run that there is."""
    if OURS not in runs:
        return []
    ours, rows, length, steps = runs[OURS], settings["rows"], settings["length"], settings["steps"]
    stamp = {"time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "device": ours["device"]}
    case = f"smollm2-135m-nf4-{settings['precision']}-{rows}x{length}-{steps}-steps"
    case += "" if settings["kernels"] else "-xla"
    shared = {"bench": "proof", "case": case, "implementation": "gymjax"}
    found = []
    for name in (PEER, UNPACKED):
        if name not in runs:
            continue
        peer = runs[name]
        speeds = [tokens_per_second(run, rows * length) for run in (ours, peer)]
        values = {
            "eval_loss_before": (ours["eval_before"], peer["eval_before"], peer["eval_before"] / ours["eval_before"]),
            "eval_loss": (ours["eval_after"], peer["eval_after"], peer["eval_after"] / ours["eval_after"]),
            "smoothed_loss_gap": (gap(ours["losses"], peer["losses"]), None, None),
            "tok_s": (*speeds, speeds[0] / speeds[1]),
        }
        for metric, (value, peer_value, ratio) in values.items():
            numbers = {"metric": metric, "value": value, "peer": name, "peer_value": peer_value, "ratio": ratio}
            found.append(shared | numbers | dict(about) | stamp)
    return found


def verdict(runs: Mapping[str, dict]) -> tuple[list[str], bool]:
    """What a person reads, and whether the bars against the peer hold; they do not where a run is missing."""
    text, holds = [], OURS in runs and PEER in runs
    for name in NAMES:
        if name not in runs:
            text.append(f"{NAMES[name]}: did not run")
            continue
        run = runs[name]
        text.append(
            f"{NAMES[name]}: held-out loss {run['eval_before']:.4f} -> {run['eval_after']:.4f}, "
            f"last smoothed training loss {smooth(run['losses'])[-1]:.4f}"
        )
    for name in (PEER, UNPACKED):
        if OURS not in runs or name not in runs:
            continue
        ours, peer = runs[OURS], runs[name]
        curve, final = gap(ours["losses"], peer["losses"]), abs(ours["eval_after"] / peer["eval_after"] - 1)
        text.append(f"against {NAMES[name]}: smoothed curves at most {curve:.2%} apart, held-out loss {final:.2%}")
        if name == PEER:
            holds &= curve <= CURVE_BAR and final <= EVAL_BAR
    text.append(f"bars ({CURVE_BAR:.1%} and {EVAL_BAR:.1%} of the peer): {'hold' if holds else 'DO NOT HOLD'}")
    return text, holds


def write_curves(path: Path, runs: Mapping[str, dict]) -> None:
    """Loss of every step, a column a run."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["step", *runs])
        for step, losses in enumerate(zip(*(run["losses"] for run in runs.values())), 1):
            writer.writerow([step, *(f"{loss:.5f}" for loss in losses)])


def read_curves(path: Path) -> dict[str, list[float]]:
    """What `write_curves` wrote."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {name: [float(row[name]) for row in rows] for name in rows[0] if name != "step"}


def draw(curves: Mapping[str, list[float]], path: Path) -> None:
    """Smoothed curves over each other, and below them how far each is from the peer's."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    first = min(WINDOW, *(len(losses) for losses in curves.values()))
    for name, losses in curves.items():
        values = smooth(losses)
        style = {"linewidth": 4.0, "alpha": 0.55} if name == PEER else {"linewidth": 1.4}
        above.plot(range(first, first + len(values)), values, color=COLOURS[name], label=NAMES[name], **style)
        if PEER in curves and name != PEER:
            difference = 100 * (values / smooth(curves[PEER]) - 1)
            below.plot(range(first, first + len(values)), difference, color=COLOURS[name], linewidth=1.4)
    below.axhspan(-100 * CURVE_BAR, 100 * CURVE_BAR, color="#000000", alpha=0.06)
    below.axhline(0, color=COLOURS[PEER], linewidth=1)
    above.set_ylabel(f"loss, mean of {first} steps")
    below.set_ylabel("off the peer's, %")
    below.set_xlabel("step")
    above.set_title("SmolLM2-135M, QLoRA r=16: same rows, same first adapter", fontsize=11)
    above.legend(frameon=False)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    FigureCanvasAgg(figure).print_png(str(path))


if __name__ == "__main__":
    draw(read_curves(Path(sys.argv[1])), Path(sys.argv[2]))
