"""Every notebook runs from top to bottom, what trains with a tiny model; errors are asserted in the notebooks."""

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted(path.name for path in (ROOT / "scripts" / "notebooks").glob("*.ipynb"))
WRITES = {"first_finetune.ipynb": {".safetensors"}}  # kinds of files that a notebook must leave


# jupyter_client and its kernel leave sockets and event loops to the garbage collector.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_runs(name, tiny_model, tmp_path, monkeypatch):
    monkeypatch.setenv("GYMJAX_NOTEBOOK_MODEL", str(tiny_model))
    monkeypatch.setenv("GYMJAX_NOTEBOOK_STEPS", "2")
    monkeypatch.setenv("JAX_PLATFORMS", os.environ.get("JAX_PLATFORMS", "cpu"))
    notebook = nbformat.read(ROOT / "scripts" / "notebooks" / name, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "strip the outputs: nbstripout"
    (tmp_path / "data").symlink_to(ROOT / "data")
    client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    left = {path.suffix for path in tmp_path.rglob("*") if path.is_file()}
    assert left >= WRITES.get(name, set()), f"the notebook left only {sorted(left)}"
