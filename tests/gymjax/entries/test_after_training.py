"""What a run leaves behind is what the other entries read."""

import json

import numpy as np
import pytest

from gymjax import evaluate, export, plot, train
from gymjax.generate import answer_prompts, load_adapted


@pytest.fixture(scope="module")
def run(base, rows_file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "run"
    keys = {
        "model_name_or_path": base,
        "dataset": rows_file,
        "eval_dataset": rows_file,
        "cutoff_len": 64,
        "output_dir": folder,
        "max_steps": 4,
        "save_steps": 2,
        "logging_steps": 1,
        "learning_rate": 0.05,
        "per_device_train_batch_size": 3,
        "disable_tqdm": "true",
    }
    assert not train.main([f"{key}={value}" for key, value in keys.items()])
    return folder


def test_evaluate_repeats_the_run_s_own_evaluation(run, make_config, rows_file):
    logged = json.loads((run / "all_results.json").read_text())["eval_loss"]
    config = make_config(adapter_name_or_path=str(run), eval_dataset=str(rows_file), cutoff_len=64)
    metrics, _ = evaluate.evaluate_config(config)
    assert metrics["eval_loss"] == pytest.approx(logged, rel=1e-5)  # same f32 program, other batch rows
    history = json.loads((run / "trainer_state.json").read_text())["log_history"]
    middle = next(entry["eval_loss"] for entry in history if entry["step"] == 2 and "eval_loss" in entry)
    config = make_config(adapter_name_or_path=str(run / "checkpoint-2"), eval_dataset=str(rows_file), cutoff_len=64)
    assert evaluate.evaluate_config(config)[0]["eval_loss"] == pytest.approx(middle, rel=1e-5)
    assert middle != pytest.approx(logged, rel=1e-3)


def test_export_finds_the_run_and_answers_alike(run, make_config, tmp_path):
    prompt = [[{"role": "user", "content": "Who are you?"}]]
    config = make_config(adapter_name_or_path=str(run))
    wanted = answer_prompts(load_adapted(config), prompt, config)[0]
    export.export_model(make_config(output_dir=str(run)), tmp_path / "merged")
    merged = make_config(model_name_or_path=str(tmp_path / "merged"))
    assert answer_prompts(load_adapted(merged), prompt, merged)[0] == wanted


def test_curves_of_the_run_are_drawn(run):
    plot.main([str(run)])
    assert all((run / name).stat().st_size > 5000 for name in ("training_loss.png", "training_eval_loss.png"))
    losses = [line.get("loss") for line in map(json.loads, (run / "trainer_log.jsonl").read_text().splitlines())]
    assert np.isfinite([loss for loss in losses if loss is not None]).all()
