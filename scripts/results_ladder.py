"""Draws scripts/results/ladder.png from ladder.jsonl: tokens/s and peak memory, rung by rung, beside the torch stack's.

Usage: python scripts/results_ladder.py [FOLDER]     FOLDER by default scripts/results
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from results_table import ROOT, read_lines

RUNGS = {
    "dense": "dense\nattention",
    "flash": "+ flash\nattention",
    "fused": "+ fused\nkernels",
    "kernels": "+ LoRA, NF4\nkernels",
    "kept": "+ keeps\nwhat fits",
}
PEERS = {"hf-eager": "HF eager", "hf-sdpa": "HF SDPA", "hf-liger": "HF + Liger", "unsloth": "Unsloth"}
PANELS = {"tok_s": ("tokens/s", "{:,.0f}"), "peak_gib": ("peak memory, GiB", "{:.1f}")}
OURS, THEIRS = "#1f4e8c", "#d08a2e"


def ladders(rows: Sequence[dict]) -> dict[str, dict[str, dict[str, dict]]]:
    """Setting -> metric -> rung -> line, rungs in their order; only lines of this bench."""
    found: dict[str, dict[str, dict[str, dict]]] = {}
    for rung in RUNGS:
        for row in rows:
            setting, _, name = row["case"].rpartition("-")
            if row["bench"] == "ladder" and name == rung:
                metrics = found.setdefault(setting, {metric: {} for metric in PANELS})
                other = metrics[row["metric"]].get(rung)
                if other is None or _order(row) > _order(other):
                    metrics[row["metric"]][rung] = row
    return found


def _order(row: dict) -> tuple[bool, str]:
    """Lines with a peer before those without, newer ones before older."""
    return row["peer"] is not None, row["time"]


def draw(rows: Sequence[dict], path: Path) -> bool:
    """Draws a row of panels a setting; false where there is nothing to draw."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    settings = ladders(rows)
    if not settings:
        return False
    figure = Figure(figsize=(11, 3.6 * len(settings)), layout="constrained")
    grid = figure.subplots(len(settings), len(PANELS), squeeze=False)
    for (setting, metrics), row in zip(settings.items(), grid):
        for (metric, (unit, digits)), axes in zip(PANELS.items(), row):
            _panel(axes, metrics[metric], digits)
            axes.set_ylabel(unit)
            axes.set_title(setting if metric == "tok_s" else "", fontsize=10, loc="left")
    grid[0][0].legend(frameon=False, fontsize=8, loc="upper left")
    FigureCanvasAgg(figure).print_png(str(path))
    return True


def _panel(axes, lines: dict[str, dict], digits: str) -> None:
    """Bars of one metric: ours, and where the torch stack has a like rung, its beside it."""
    at = {rung: i for i, rung in enumerate(lines)}
    bars = axes.bar([i + 0.21 for i in at.values()], [row["value"] for row in lines.values()], 0.4, color=OURS)
    bars.set_label("gymjax")
    axes.bar_label(bars, fmt=digits, fontsize=7)
    shown: dict[str, str] = {}
    for rung, row in lines.items():
        if row["peer"] is not None:
            shown.setdefault(row["peer"], rung)  # a peer's bar stands beside the first rung that is compared with it
    if shown:
        values = [lines[rung]["peer_value"] for rung in shown.values()]
        peers = axes.bar([at[rung] - 0.21 for rung in shown.values()], values, 0.4, color=THEIRS)
        peers.set_label("torch: eager, + SDPA, + Liger, Unsloth")
        axes.bar_label(peers, fmt=digits, fontsize=7)
    named = {rung: peer for peer, rung in shown.items()}
    labels = [RUNGS[rung] + (f"\n({PEERS[named[rung]]})" if rung in named else "") for rung in at]
    axes.set_xticks(list(at.values()), labels, fontsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(y=0.15)


def main(arguments: list[str]) -> int:
    """Draws the picture."""
    folder = Path(arguments[0]) if arguments else ROOT / "scripts" / "results"
    if not draw(read_lines(folder), folder / "ladder.png"):
        print(f"{folder} holds no line of the ladder: run python scripts/bench_train.py ladder")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
