"""Writes the tables of measured numbers from scripts/results/, the newest line of each measurement.

Usage: python scripts/results_table.py [--check]     (--check: only say whether they are up to date)

README gets the pictures and who wins where: each case beside the best of its peers. scripts/results/RESULTS.md gets
every line that tells something.
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- results: written by scripts/results_table.py -->", "<!-- end of results -->"
PAGE = "scripts/results/RESULTS.md"
BY_ITSELF = ("compile_s", "mfu", "plan_gib")
OURS, PLAIN = ("gymjax", "mosaic_gpu", "jax_triton"), ("naive", "xla")
STEPS = ("train", "proof")  # whole ones come first, kernels then
CASE = ("bench", "case", "metric")
KEYS = ("bench", "case", "implementation", "metric", "peer", "device")
METRICS = {  # in the order of the columns
    "tok_s": "tokens/s",
    "tflops_fwd": "forward, TFLOP/s",
    "tflops_fwd_bwd": "with gradients, TFLOP/s",
    "tflops_dx": "of x, TFLOP/s",
    "tflops_dw": "of weights, TFLOP/s",
    "gbps": "forward, GB/s",
    "gbps_bwd": "gradients, GB/s",
    "peak_gib": "peak, GiB",
}
PICTURES = {
    "ladder.png": "A QLoRA step, one kind of kernel after the other, beside the torch stack's in the same run "
    "(scripts/bench_train.py ladder)",
    "proof.png": "SmolLM2-135M by QLoRA here and in transformers + PEFT + bitsandbytes (scripts/proof_qlora.py)",
}
COLUMNS = {
    "bench": "bench",
    "case": "case",
    "implementation": "implementation",
    "metric": "metric",
    "value": "value",
    "peer": "peer",
    "peer_value": "peer's value",
    "ratio": "ratio",
    "device": "device",
}


def read_lines(folder: Path) -> list[dict]:
    """Return the newest line of each (bench, case, implementation, metric, peer, device), sorted by them."""
    newest: dict[tuple[str, ...], dict] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in filter(str.strip, path.read_text().splitlines()):
            row = json.loads(line)
            key = tuple(str(row[name]) for name in KEYS)
            if key not in newest or str(row["time"]) >= str(newest[key]["time"]):
                newest[key] = row
    return [newest[key] for key in sorted(newest)]


def cell(value: object) -> str:
    """Return a value as a reader likes it: four digits, thousands separated, nothing for None."""
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def telling(rows: list[dict]) -> list[dict]:
    """Return what a reader compares: ours against the strongest peers, plain XLA only where no other was timed.

    Other forms of ours, which come and go, count where the newest run of a case has them.
    """
    ours = {row["bench"] for row in rows if row["implementation"] in OURS}
    rows = [row for row in rows if row["implementation"] in OURS or row["bench"] not in ours]
    newest: dict[tuple[str, ...], str] = {}
    for row in rows:
        newest[_case(row)] = max(newest.get(_case(row), ""), str(row["time"]))
    rows = [row for row in rows if not str(row["peer"]).startswith(OURS) or str(row["time"]) == newest[_case(row)]]
    strong = {_case(row) for row in rows if row["peer"] not in PLAIN}
    return [row for row in rows if row["peer"] not in PLAIN or _case(row) not in strong]


def _case(row: dict) -> tuple[str, ...]:
    return tuple(row[name] for name in CASE)


def table(rows: list[dict]) -> str:
    """Return the rows as a Markdown table, or a sentence where there are none."""
    if not rows:
        return "No measurement has been recorded yet."
    lines = ["| " + " | ".join(COLUMNS.values()) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(cell(row[name]) for name in COLUMNS) + " |" for row in rows]
    return "\n".join([*lines, "", "A ratio above 1 is better than the peer, timed in the same run."])


def wins(rows: list[dict]) -> str:
    """Return a table for each bench: cases beside the best of the peers timed with them; "xla" is ours where it runs.

    `copy`, the rate at which the run read and wrote memory, is no peer but a roof; other forms of ours are none either.
    """
    ours = {row["bench"] for row in rows if row["implementation"] in OURS}
    groups: dict[str, dict[str, dict[str, list[dict]]]] = {}
    for row in rows:
        mine = row["implementation"] in OURS or (row["bench"] not in ours and row["implementation"] == "xla")
        if mine and row["ratio"] is not None and row["metric"] not in BY_ITSELF:
            cases = groups.setdefault(row["bench"], {})
            cases.setdefault(row["case"], {}).setdefault(row["metric"], []).append(row)
    parts = []
    for bench, cases in sorted(groups.items(), key=lambda item: (item[0] not in STEPS, item[0])):
        told = {case: {name: text for name, found in of.items() if (text := best(found))} for case, of in cases.items()}
        metrics = [name for name in METRICS if any(name in of for of in told.values())]
        metrics += sorted({name for of in told.values() for name in of} - {*metrics})
        if metrics:
            lines = [f"| {bench} | " + " | ".join(METRICS.get(name, name) for name in metrics) + " |"]
            lines.append("|" + "---|" * (len(metrics) + 1))
            lines += [
                f"| {case} | " + " | ".join(of.get(name, "") for name in metrics) + " |" for case, of in told.items()
            ]
            parts.append("\n".join(lines))
    if not parts:
        return "No measurement has been recorded yet."
    legend = "Each cell: ours, the best other timed in the same run, and **how many times better ours is**; (of copy)."
    return "\n\n".join([legend, *parts])


def best(found: list[dict]) -> str:
    """Return what a cell says of one metric of one case; nothing where no peer was timed."""
    peers = [row for row in found if not row["peer"].startswith(("copy", *OURS))]
    if not peers:
        return ""
    row = min(peers, key=lambda row: row["ratio"])
    copies = [each for each in found if each["peer"] == "copy" and str(each["time"])[:10] == str(row["time"])[:10]]
    share = f" ({copies[0]['ratio']:.0%})" if copies else ""
    return f"{cell(row['value'])}, {cell(row['peer_value'])} {row['peer']}: **{row['ratio']:.3g}**{share}"


def pictures(folder: Path, where: str) -> str:
    """Return the pictures that there are as Markdown, each with what it shows below it."""
    there = {name: text for name, text in PICTURES.items() if (folder / name).exists()}
    return "".join(f"![{name.removesuffix('.png')}]({where}/{name})\n\n{text}.\n\n" for name, text in there.items())


def main() -> int:
    readme = ROOT / "README.md"
    old = readme.read_text()
    before, _, rest = old.partition(BEGIN)
    _, _, after = rest.partition(END)
    folder = ROOT / "scripts" / "results"
    lines = read_lines(folder)
    new = f"{before}{BEGIN}\n{pictures(folder, 'scripts/results')}{wins(lines)}\n{END}{after}"
    page = f"# Every measurement\n\nWritten by scripts/results_table.py.\n\n{table(telling(lines))}\n"
    files = {readme: new, ROOT / PAGE: page}
    if "--check" in sys.argv[1:]:
        stale = [path.name for path, text in files.items() if not path.exists() or path.read_text() != text]
        print(f"{' and '.join(stale)} not up to date: run python scripts/results_table.py" if stale else "up to date")
        return int(bool(stale))
    for path, text in files.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
