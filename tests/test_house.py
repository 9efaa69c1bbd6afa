"""Rules of the repository that no linter checks."""

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = sorted(path for tree in ("gymjax", "pallas_kernels") for path in (ROOT / tree).rglob("*.py"))
PYTHON = LIBRARY + sorted(path for tree in ("tests", "scripts") for path in (ROOT / tree).rglob("*.py"))
TEXTS = sorted(
    path
    for pattern in ("*.md", "*.txt", "*.toml", "*.yaml", ".ci/run", "scripts/**/*", "configs/*", "data/*")
    for path in ROOT.glob(pattern)
    if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".png"
)
RESULT_KEYS = {
    "bench", "case", "implementation", "metric", "value", "peer", "peer_value", "ratio", "device", "jax", "commit",
    "time",
}  # fmt: skip


def names(paths):
    return [str(path.relative_to(ROOT)) for path in paths]


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("check", ["ruff check", "ruff format --check", "pyrefly check", "lint-imports"])
def test_lint(check):
    tool, *arguments = check.split()
    command = [Path(sys.executable).parent / tool, *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, f"{check}\n{result.stdout[-4000:]}{result.stderr[-2000:]}"


def test_no_python_file_is_over_400_lines():
    lengths = {name: len((ROOT / name).read_text().splitlines()) for name in names(PYTHON)}
    assert {name: n for name, n in lengths.items() if n > 400} == {}


def forbidden_calls(tree):
    """Yields what loads or runs foreign code, and handlers that catch everything."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            yield from (
                f"line {node.lineno}: imports {m}" for m in modules if m in {"pickle", "dill", "torch", "joblib"}
            )
            yield from (f"line {node.lineno}: {m} is deprecated" for m in modules if m.endswith("pallas.triton"))
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in {"eval", "exec", "torch.load"} or any(k.arg == "allow_pickle" for k in node.keywords):
                yield f"line {node.lineno}: {name}"
        elif isinstance(node, ast.ExceptHandler):
            caught = ast.unparse(node.type) if node.type else "everything"
            reraises = any(isinstance(n, ast.Raise) and n.exc is None for n in ast.walk(node))
            if caught in {"everything", "Exception", "BaseException"} and not reraises:
                yield f"line {node.lineno}: catches {caught}"


@pytest.mark.parametrize("name", names(LIBRARY))
def test_library_is_safe(name):
    assert list(forbidden_calls(ast.parse((ROOT / name).read_text()))) == []


def test_no_machine_path_or_registry_host():
    # A letter of each stands in brackets, so that this file does not match itself.
    pattern = re.compile(r"/w[o]rk/|/r[o]ot/|/h[o]me/[a-z]|py[p]i\.org|pythonh[o]sted|extra-index-u[r]l")
    found = {name: pattern.findall((ROOT / name).read_text()) for name in names([*TEXTS, *PYTHON])}
    assert {name: hits for name, hits in found.items() if hits} == {}


@pytest.mark.parametrize("name", [".ci/run", *names(sorted((ROOT / "scripts").glob("*.sh")))])
def test_shell_scripts_parse(name):
    subprocess.run(["bash", "-n", str(ROOT / name)], check=True)
    assert os.access(ROOT / name, os.X_OK) or name == "scripts/environment.sh"  # environment.sh is sourced


def test_find_python_finds_one_that_is_new_enough():
    found = subprocess.run(["bash", "scripts/find_python.sh"], cwd=ROOT, check=True, capture_output=True, text=True)
    version = subprocess.run([found.stdout.strip(), "--version"], check=True, capture_output=True, text=True).stdout
    assert tuple(int(part) for part in version.split()[1].split(".")[:2]) >= (3, 12)


def test_find_python_says_what_to_install(tmp_path):
    for tool in ("bash", "cat", "seq"):
        (tmp_path / tool).symlink_to(shutil.which(tool))
    nothing = {"PATH": str(tmp_path), "PYENV_ROOT": str(tmp_path), "HOME": str(tmp_path)}
    script = ROOT / "scripts" / "find_python.sh"
    # 3.99 does not exist: the newest one tried is below it, python3 is not on this PATH
    result = subprocess.run(["bash", str(script), "99"], env=nothing, capture_output=True, text=True)
    assert result.returncode == 1
    assert "No Python >= 3.99" in result.stderr


def test_readme_names_what_exists():
    readme = (ROOT / "README.md").read_text()
    modules = set(re.findall(r"python -m ([a-z_.]+)", readme))
    assert "gymjax.train" in modules
    assert [m for m in sorted(modules) if importlib.util.find_spec(m) is None] == []
    files = set(re.findall(r"\b(?:scripts|configs|data|tests)/[\w./-]+\.\w+", readme))
    assert {"scripts/quickstart.sh", "scripts/test.sh"} <= files
    assert [f for f in sorted(files) if not (ROOT / f).is_file()] == []


def test_readme_table_is_that_of_the_recorded_lines():
    command = [sys.executable, "scripts/results_table.py", "--check"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_results_table_shows_the_newest_line_of_each_measurement(tmp_path):
    spec = importlib.util.spec_from_file_location("results_table", ROOT / "scripts" / "results_table.py")
    results_table = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(results_table)
    row = dict.fromkeys(RESULT_KEYS) | {"bench": "train", "metric": "tok_s", "peer": "hf"}
    lines = [row | {"value": 12345.6, "time": "2"}, row | {"value": 1.0, "time": "1"}]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (newest,) = results_table.read_lines(tmp_path)
    assert newest["time"] == "2"
    assert "| train |  |  | tok_s | 12,346 | hf |" in results_table.table([newest])
    assert "No measurement" in results_table.table([])
    assert "No measurement" in results_table.wins([])
    shared = row | {
        "bench": "rope",
        "case": "c",
        "implementation": "xla",
        "metric": "gbps",
        "value": 3000.0,
        "time": "1",
    }
    peers = {"naive": 1.2, "liger": 1.1, "copy": 0.9}
    text = results_table.wins([shared | {"peer": name, "peer_value": 1.0, "ratio": r} for name, r in peers.items()])
    assert text.splitlines()[2] == "| rope | forward, GB/s |"
    assert text.splitlines()[4] == "| c | 3,000, 1 liger: **1.1** (90%) |"


def test_recorded_lines_are_whole():
    for path in (ROOT / "scripts" / "results").glob("*.jsonl"):
        for number, row in enumerate(rows(path), 1):
            assert set(row) >= RESULT_KEYS, f"{path.name}:{number}"


def test_notebooks_hold_no_outputs():
    for path in (ROOT / "scripts" / "notebooks").glob("*.ipynb"):
        cells = json.loads(path.read_text())["cells"]
        assert [c for c in cells if c.get("outputs") or c.get("execution_count")] == [], path.name


def test_held_out_questions_are_not_trained():
    asked = {
        message["content"]
        for row in rows(ROOT / "data" / "identity_train.jsonl")
        for message in row["messages"]
        if message["role"] == "user"
    }
    held_out = rows(ROOT / "data" / "identity_heldout.jsonl")
    assert len(held_out) >= 20
    for row in held_out:
        question, answer = (message["content"] for message in row["messages"])
        assert question not in asked
        assert all(keyword in answer.lower() for keyword in row["keywords"])


def test_package_versions_of_both_environments_agree():
    def pins(name):
        lines = (ROOT / name).read_text().splitlines()
        return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))

    main, torch = pins("constraints.txt"), pins("constraints-torch.txt")
    assert {name: (main[name], torch[name]) for name in main.keys() & torch.keys() if main[name] != torch[name]} == {}
