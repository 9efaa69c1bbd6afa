"""The proof of scripts/proof_qlora.py: its numbers, its rows, and both sides on a tiny model."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "proof_qlora.py"
SETTINGS = {"rows": 2, "length": 32, "steps": 40, "precision": "bf16", "kernels": True}


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


report, data = script("proof_report"), script("proof_data")


def run(losses, after=2.0):
    return {"losses": losses, "seconds": [0.5] * 40, "eval_before": 4.0, "eval_after": after, "device": "cpu"}


def test_gap_is_the_largest_of_the_smoothed_curves():
    ours = np.linspace(4.0, 2.0, 40)
    peer = ours.copy()
    peer[5] += 1.0  # a single step: one part in WINDOW of the mean, at most where the curve is lowest
    windows = [ours[i : i + report.WINDOW].mean() for i in range(6)]
    expected = 1 - windows[-1] / (windows[-1] + 1 / report.WINDOW)
    assert report.gap(ours, peer) == pytest.approx(expected, rel=1e-12)  # f64 on both sides
    assert report.gap(ours, ours) == 0


def test_bars_and_lines():
    curve = [3.0] * 40
    runs = {report.OURS: run(curve), report.PEER: run(curve, after=2.009)}
    text, holds = report.verdict(runs)
    assert holds
    assert "bf16 base: did not run" in "\n".join(text)
    assert not report.verdict({report.OURS: run(curve), report.PEER: run(curve, after=2.02)})[1]
    assert not report.verdict({report.OURS: run(curve), report.PEER: run([3.1] * 40)})[1]
    assert not report.verdict({report.OURS: run(curve)})[1]
    lines = report.result_lines(runs, SETTINGS, {"jax": "0", "commit": "c"})
    assert {line["metric"] for line in lines} == {"eval_loss_before", "eval_loss", "smoothed_loss_gap", "tok_s"}
    (speed,) = [line for line in lines if line["metric"] == "tok_s"]
    assert (speed["value"], speed["ratio"]) == (128.0, 1.0)
    assert report.result_lines({report.PEER: run(curve)}, SETTINGS, {}) == []


def test_curves_come_back_and_are_drawn(tmp_path):
    runs = {report.OURS: run([3.25, 3.0]), report.UNPACKED: run([3.125, 2.5]), report.PEER: run([3.5, 2.0])}
    report.write_curves(tmp_path / "curves.csv", runs)
    curves = report.read_curves(tmp_path / "curves.csv")
    assert curves == {name: each["losses"] for name, each in runs.items()}
    report.draw(curves, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"


def test_documents_are_cut_into_rows_with_an_end_between_them():
    rows = data.cut([[5, 6, 7], [8], [9, 9]], end=0, width=4)
    np.testing.assert_array_equal(rows, [[5, 6, 7, 0], [8, 0, 9, 9]])


def test_rows_are_the_same_again_and_held_out_text_is_not_trained(monkeypatch):
    texts = [chr(97 + i % 26) * 9 + str(i) for i in range(64)]
    monkeypatch.setattr(data, "documents", lambda: texts)
    made = [
        data.make_rows(lambda text: list(text.encode()), 0, train_rows=150, eval_rows=2, length=10) for _ in range(2)
    ]
    np.testing.assert_array_equal(made[0][0], made[1][0])
    train, evaluation, distinct = made[0]
    assert train.shape == (150, 11)
    assert evaluation.shape == (2, 11)
    assert distinct < 75  # it goes round twice
    assert len(np.unique(train[:distinct], axis=0)) == distinct
    assert not {bytes(row.astype(np.uint8)) for row in train} & {bytes(row.astype(np.uint8)) for row in evaluation}
    with pytest.raises(ValueError, match="500 rows of 10 tokens to evaluate on"):
        data.make_rows(lambda text: list(text.encode()), 0, train_rows=1, eval_rows=500, length=10)


@pytest.mark.interop
def test_both_sides_lose_the_same_on_a_tiny_model(torch_python, tiny_wide, tmp_path):
    command = [sys.executable, SCRIPT, "--model", tiny_wide, "--steps", "4", "--batch", "2x32", "--eval-rows", "4"]
    command += ["--precision", "fp32", "--folder", tmp_path / "work", "--out", tmp_path / "out"]
    environment = os.environ | {"GYMJAX_TORCH_PYTHON": str(torch_python), "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment)
    assert done.returncode == 0, f"{done.stdout[-2000:]}{done.stderr[-2000:]}"
    ours, theirs = (json.loads((tmp_path / "work" / f"{name}.json").read_text()) for name in (report.OURS, report.PEER))
    # f32 on both sides, from equal NF4 weights: sums in another order
    np.testing.assert_allclose(ours["losses"], theirs["losses"], rtol=1e-5)
    np.testing.assert_allclose(ours["norms"], theirs["norms"], rtol=1e-3)
    assert ours["eval_before"] == pytest.approx(theirs["eval_before"], rel=1e-5)
    assert ours["eval_after"] == pytest.approx(theirs["eval_after"], rel=1e-5)
    assert ours["eval_after"] < ours["eval_before"]
    lines = [json.loads(line) for line in (tmp_path / "out" / "proof.jsonl").read_text().splitlines()]
    assert {line["peer"] for line in lines} == {report.PEER, report.UNPACKED}
    assert (tmp_path / "out" / "proof.png").exists()
