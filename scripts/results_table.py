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
CASE = ("bench", "case", "metric")
KEYS = ("bench", "case", "implementation", "metric", "peer", "device")
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
    """Return what a reader compares: ours against the strongest peers, plain XLA only where no other was timed."""
    ours = {row["bench"] for row in rows if row["implementation"] in OURS}
    rows = [row for row in rows if row["implementation"] in OURS or row["bench"] not in ours]
    strong = {tuple(row[name] for name in CASE) for row in rows if row["peer"] not in PLAIN}
    return [row for row in rows if row["peer"] not in PLAIN or tuple(row[name] for name in CASE) not in strong]


def table(rows: list[dict]) -> str:
    """Return the rows as a Markdown table, or a sentence where there are none."""
    if not rows:
        return "No measurement has been recorded yet."
    lines = ["| " + " | ".join(COLUMNS.values()) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(cell(row[name]) for name in COLUMNS) + " |" for row in rows]
    return "\n".join([*lines, "", "A ratio above 1 is better than the peer, timed in the same run."])


def wins(rows: list[dict]) -> str:
    """Return a table of each case beside the best of the peers timed with it; "xla" is ours where no other is.

    `copy`, the rate at which the run read and wrote memory, is no peer but a roof; another run of ours is none either.
    """
    ours = {row["bench"] for row in rows if row["implementation"] in OURS}
    groups: dict[tuple[str, ...], list[dict]] = {}
    for row in rows:
        mine = row["implementation"] in OURS or (row["bench"] not in ours and row["implementation"] == "xla")
        if mine and row["ratio"] is not None and row["metric"] not in BY_ITSELF:
            groups.setdefault(tuple(str(row[name]) for name in (*CASE, "implementation")), []).append(row)
    lines = ["| bench | case | metric | ours | best other | | ratio | of copy |", "|" + "---|" * 8]
    for (bench, case, metric, name), found in sorted(groups.items()):
        newest = max(str(row["time"]) for row in found)
        copies = [row for row in found if row["peer"] == "copy"]
        peers = [row for row in found if row["peer"] != "copy" and not row["peer"].startswith("gymjax")]
        if not peers:
            continue
        best = min(peers, key=lambda row: row["ratio"])
        share = f"{copies[0]['ratio']:.0%}" if copies and str(copies[0]["time"])[:10] == newest[:10] else ""
        texts = (bench, case, metric, f"{cell(best['value'])} ({name})", cell(best["peer_value"]), best["peer"])
        lines.append("| " + " | ".join((*texts, f"{best['ratio']:.3g}", share)) + " |")
    if len(lines) == 2:
        return "No measurement has been recorded yet."
    return "\n".join([*lines, "", "A ratio above 1 is better than the best other, timed in the same run."])


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
