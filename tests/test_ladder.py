"""The ladder of scripts/bench_ladder.py: its rungs compute the same, its lines are whole, and they are drawn."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))  # the scripts import each other by name, as they do when one is run

import bench_ladder  # noqa: E402
import results_ladder  # noqa: E402
import results_table  # noqa: E402

TINY = ["--shape", "tiny", "--batch", "2x32", "--steps", "1"]


def result(name, tok_s, peak_gib):
    return {"name": name, "tok_s": tok_s, "peak_gib": peak_gib, "jax": "0", "device": "some GPU"}


def test_rungs_take_the_same_steps():
    options = bench_ladder.parse(TINY)
    losses = {name: bench_ladder.time_rung(name, options)["loss"] for name in ("dense", "kernels")}
    # four updates at 1e-4 from equal weights; bf16 rounds 2^-9 of a logit, in another order in each, and the mean of 64
    # tokens' losses averages that
    assert losses["dense"] == pytest.approx(losses["kernels"], rel=1e-3)


def test_lines_put_each_rung_beside_its_peer():
    options = bench_ladder.parse([*TINY, "--peers", "torch"])
    ours = {"dense": result("dense", 50.0, 8.0), "kept": result("kept", 90.0, None)}
    found = bench_ladder.lines(options, ours, {"hf-eager": {"tok_s": 25.0, "peak_gib": 4.0}})
    assert [(row["case"], row["metric"], row["peer"], row["ratio"]) for row in found] == [
        ("tiny-nf4-2x32-dense", "tok_s", "hf-eager", 2.0),
        ("tiny-nf4-2x32-dense", "peak_gib", "hf-eager", 0.5),
        ("tiny-nf4-2x32-kept", "tok_s", None, None),  # Unsloth did not run; the CPU has no peak
    ]


def test_what_fails_is_reported_and_what_it_printed_before_counts(capfd):
    script = "print('RESULT {\"name\": \"hf-eager\"}'); raise MemoryError('CUDA out of memory')"
    assert bench_ladder.measure([sys.executable, "-c", script], 60) == [{"name": "hf-eager"}]
    assert "failed: out of memory" in capfd.readouterr().out
    assert bench_ladder.measure([sys.executable, "-c", "print('RESULT {}')"], 5) == []
    assert "no time left" in capfd.readouterr().out


def test_lines_are_drawn_and_shown(tmp_path):
    assert subprocess.run([sys.executable, SCRIPTS / "results_ladder.py", tmp_path], check=False).returncode == 1
    options = bench_ladder.parse(TINY)
    ours = {name: result(name, 50.0 + i, 8.0) for i, name in enumerate(bench_ladder.RUNGS)}
    peers = {"unsloth": {"tok_s": 25.0, "peak_gib": 4.0}}
    rows = bench_ladder.lines(options, ours, peers)
    (tmp_path / "ladder.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert results_ladder.main([str(tmp_path)]) == 0
    assert (tmp_path / "ladder.png").read_bytes()[:4] == b"\x89PNG"
    assert results_table.pictures(tmp_path, "x").startswith("![ladder](x/ladder.png)\n\nA QLoRA step")
    ladder = results_ladder.ladders(results_table.read_lines(tmp_path))["tiny-nf4-2x32"]["tok_s"]
    assert list(ladder) == list(results_ladder.RUNGS) == list(bench_ladder.RUNGS)
    assert ladder["kept"]["peer_value"] == 25.0
