"""Whole runs of a tiny model: files, resuming, stopping, evaluation, and what goes wrong."""

import dataclasses
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gymjax.checkpoint.hf import read_config, save_folder
from gymjax.checkpoint.train_state import Checkpoints
from gymjax.config import to_yaml
from gymjax.optim import adam8bit
from gymjax.train import stopped
from gymjax.training import loop
from gymjax.training.train import train


def read_json(path: Path):
    return json.loads(path.read_text())


def test_output_folder_has_what_scripts_expect(configure, data_file):
    config = configure(
        eval_dataset=str(data_file), eval_strategy="steps", eval_steps=2, plot_loss=True, report_to="tensorboard",
        save_strategy="steps", save_steps=2, save_total_limit=1, max_steps=4,
    )  # fmt: skip
    result = train(config)
    folder = Path(config.train.output_dir)
    names = {path.name for path in folder.iterdir()}
    assert names >= {
        "adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md",
        "trainer_state.json",
        "trainer_log.jsonl", "all_results.json", "train_results.json", "eval_results.json", "training_loss.png",
        "training_eval_loss.png", "training_args.yaml", "checkpoint-4", "runs",
    }  # fmt: skip
    assert "checkpoint-2" not in names
    assert {"adapter_model.safetensors", "trainer_state.json", "state"} <= {
        p.name for p in (folder / "checkpoint-4").iterdir()
    }
    log = [json.loads(line) for line in (folder / "trainer_log.jsonl").read_text().splitlines()]
    training = [line for line in log if "loss" in line]
    assert [line["current_steps"] for line in training] == [1, 2, 3, 4]
    assert set(training[0]) == {
        "current_steps", "total_steps", "loss", "lr", "epoch", "percentage", "elapsed_time", "remaining_time",
        "throughput", "total_tokens",
    }  # fmt: skip
    assert [line["current_steps"] for line in log if "eval_loss" in line] == [2, 4]
    results = read_json(folder / "all_results.json")
    assert results == result.metrics
    assert results["perplexity"] == pytest.approx(math.exp(results["eval_loss"]))
    assert training[-1]["loss"] < training[0]["loss"]
    assert read_json(folder / "trainer_state.json")["log_history"] == result.history


@pytest.mark.parametrize("kind", ["full", "freeze"])
def test_base_weights_can_be_trained(configure, kind):
    changes = {"lora_rank": None, "finetuning_type": kind, "learning_rate": 1e-3}
    config = configure(**changes | ({"freeze_trainable_layers": 1} if kind == "freeze" else {}))
    result = train(config)
    assert result.history[-1]["loss"] < result.history[0]["loss"]
    folder = Path(config.train.output_dir)
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("optim", ["adamw", "adamw_8bit"])
def test_resuming_gives_the_same_bits(optim, configure, tmp_path, leaves_equal, monkeypatch):
    monkeypatch.setattr(adam8bit, "SMALLEST", 64)  # else none of the tiny model's tensors is kept in 8 bits
    changes = {"lora_dropout": 0.1, "lr_scheduler_type": "cosine", "warmup_steps": 2, "optim": optim, "max_steps": 10}
    whole = train(configure(**changes, output_dir=str(tmp_path / "whole")))
    halves = configure(**changes, output_dir=str(tmp_path / "halves"), save_strategy="steps", save_steps=5)
    original, loop.save_checkpoint = loop.save_checkpoint, _save_then_stop(loop.save_checkpoint)
    try:
        first = train(halves)
    finally:
        loop.save_checkpoint = original
    assert first.interrupted
    assert int(first.state.step) == 5
    second = train(halves)
    assert leaves_equal(whole.state, second.state)
    kept_in_8_bits = [leaf for leaf in jax.tree.leaves(second.state) if leaf.dtype == jnp.uint8]
    assert bool(kept_in_8_bits) == (optim == "adamw_8bit")
    losses = [[entry["loss"] for entry in result.history] for result in (whole, second)]
    assert losses[0] == losses[1]
    lines = (Path(halves.train.output_dir) / "trainer_log.jsonl").read_text().splitlines()
    assert [json.loads(line)["current_steps"] for line in lines] == list(range(1, 11))


def test_a_finished_run_compiles_nothing(configure, leaves_equal, monkeypatch):
    config = configure(max_steps=2, save_strategy="steps", save_steps=2)
    first = train(config)

    def no(*_):
        pytest.fail("a step was compiled")

    monkeypatch.setattr("gymjax.training.train.compile_planned", no)
    monkeypatch.setattr(loop, "compile_program", no)
    again = train(config)
    assert leaves_equal(first.state, again.state)
    assert again.history == first.history
    with pytest.raises(pytest.fail.Exception, match="a step was compiled"):
        train(dataclasses.replace(config, train=dataclasses.replace(config.train, max_steps=3)))  # goes on


def _save_then_stop(save):
    """Sends this process SIGTERM when the first checkpoint is written."""

    def save_and_stop(*arguments):
        save(*arguments)
        os.kill(os.getpid(), signal.SIGTERM)

    return save_and_stop


def test_sigterm_saves_and_the_same_command_goes_on(configure, tmp_path):
    config = configure(max_steps=300, save_strategy="steps", save_steps=200)
    file = tmp_path / "run.yaml"
    file.write_text(to_yaml(config))
    process = _start(file)
    log = Path(config.train.output_dir) / "trainer_log.jsonl"
    _wait(lambda: log.exists() and log.stat().st_size > 0, process)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 130, out
    step = Checkpoints(config.train.output_dir).latest()
    assert 0 < step < 300
    assert f"stopped after step {step}" in out


def test_a_stopped_run_says_how_to_go_on(configure):
    """Only where it can: weights alone are no train state."""
    assert stopped(configure().train, 7).startswith("stopped after step 7; the same command goes on from ")
    assert "; adding resume_from_checkpoint=true goes" in stopped(configure(overwrite_output_dir=True).train, 7)
    assert "save_only_model: true kept nothing to go on from" in stopped(configure(save_only_model=True).train, 7)


def test_kill_during_a_save_leaves_the_previous_checkpoint(configure, tmp_path, leaves_equal):
    changes = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2}
    config = configure(**changes)
    file = tmp_path / "run.yaml"
    file.write_text(to_yaml(config))
    # The second save stops half-way: the process kills itself where the folder would get its name.
    code = (
        "import os, signal, sys, pathlib\n"
        "rename = pathlib.Path.rename\n"
        "def kill(self, target):\n"
        "    if str(target).endswith('checkpoint-4'): os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return rename(self, target)\n"
        "pathlib.Path.rename = kill\n"
        "from gymjax import train\n"
        "train.main(sys.argv[1:])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(file)], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert Checkpoints(config.train.output_dir).steps() == [2]
    resumed = train(config)
    whole = train(configure(**changes, output_dir=str(tmp_path / "whole")))
    assert leaves_equal(resumed.state, whole.state)


def _start(file):
    command = [sys.executable, "-m", "gymjax.train", str(file)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _wait(condition, process, seconds=180):
    deadline = time.time() + seconds
    while not condition():
        assert process.poll() is None, process.stdout.read()
        assert time.time() < deadline
        time.sleep(0.05)


def test_early_stop_and_best_weights(configure, data_file, leaves_equal):
    # A learning rate that destroys the model: an early evaluation stays the best.
    config = configure(
        eval_dataset=str(data_file), eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1,
        max_steps=9, learning_rate=1.0, early_stopping_steps=2, load_best_model_at_end=True, save_total_limit=1,
    )  # fmt: skip
    result = train(config)
    losses = [entry["eval_loss"] for entry in result.history if "eval_loss" in entry]
    best = int(np.argmin(losses)) + 1
    assert len(losses) == best + 2 < 9
    checkpoints = Checkpoints(config.train.output_dir)
    assert checkpoints.steps() == sorted({best, best + 2})
    kept, _ = checkpoints.restore(best, result.state)
    assert leaves_equal(kept.params, result.state.params)
    again = train(config)
    assert checkpoints.steps() == sorted({best, best + 2})
    assert leaves_equal(kept.params, again.state.params)


def test_bad_weights_stop_with_step_rows_and_remedy(
    configure, data_file, make_model, byte_tokenizer, model_folder, tmp_path
):
    model = make_model()
    model.norm.scale.set_value(jnp.full(32, jnp.inf))
    save_folder(tmp_path / "broken", model, read_config(model_folder), dtype=jnp.float32, tokenizer=byte_tokenizer)
    broken = {"model_name_or_path": str(tmp_path / "broken"), "logging_steps": 8}
    config = configure(**broken, max_steps=8, save_strategy="steps", save_steps=8)
    with pytest.raises(FloatingPointError, match=r"step 1: the loss or its gradient is not finite") as raised:
        train(config)
    assert f"{data_file}:" in str(raised.value)
    assert "lower learning_rate" in str(raised.value)
    folder = Path(config.train.output_dir)
    assert not list(folder.glob("checkpoint-*"))
    assert not (folder / "adapter_model.safetensors").exists()


def test_bad_row_beyond_the_model_s_positions(configure, data_file, model_folder, tmp_path):
    """Generating refuses it as well; no position beyond was ever trained."""
    short = tmp_path / "short"
    shutil.copytree(model_folder, short)
    (short / "config.json").write_text(json.dumps(read_config(model_folder) | {"max_position_embeddings": 16}))
    message = r"rows\.jsonl:\d+: \d\d tokens, but the model has 16 positions; set cutoff_len: 16, or rope_scaling: yarn"
    with pytest.raises(ValueError, match=message):
        train(configure(model_name_or_path=str(short)))


def test_bad_resume_with_other_data(configure, tmp_path):
    config = configure(save_strategy="steps", save_steps=2, max_steps=2)
    train(config)
    other = tmp_path / "other.jsonl"
    turns = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "2"}]
    other.write_text(json.dumps({"messages": turns}) + "\n")
    with pytest.raises(ValueError, match="was trained on other data"):
        train(configure(dataset=str(other), save_strategy="steps", save_steps=2, max_steps=4))


def test_bad_resume_with_another_rank(configure):
    train(configure(save_strategy="steps", save_steps=2, max_steps=2))
    with pytest.raises(ValueError, match="was saved by a different configuration"):
        train(configure(save_strategy="steps", save_steps=2, max_steps=4, lora_rank=8))


@pytest.fixture(scope="module")
def stopped_at_2(configure_in, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stopped")
    train(configure_in(folder, save_strategy="steps", save_steps=2, max_steps=2))
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 7}, "data_seed: 42, not 7"),
        ({"packing": True}, "packing: false, not true"),
        ({"per_device_train_batch_size": 2}, r"4 rows a step, not 2 \(per_device_train_batch_size x devices"),
        ({"lora_alpha": 32}, "lora_alpha: 8, not 32"),
        ({"use_rslora": True}, "use_rslora: false, not true"),
    ],
)
def test_bad_resume_with_other_settings(stopped_at_2, configure_in, change, message):
    """Rows would be skipped or seen twice, or the adapter's factor would jump: no array's shape tells."""
    with pytest.raises(ValueError, match=f"checkpoint-2 was trained with .*{message}.*; resume with those settings"):
        train(configure_in(stopped_at_2, save_strategy="steps", save_steps=2, max_steps=3, **change))


def test_resuming_names_the_settings_that_changed(configure, capsys):
    train(configure(save_strategy="steps", save_steps=2, max_steps=2))
    changes = {"learning_rate": 5e-3, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    train(configure(save_strategy="steps", save_steps=2, max_steps=3, **changes))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("resumed with")]
    assert lines == [
        "resumed with learning_rate: 0.005, until then 0.01",
        "resumed with max_steps: 3, until then 2",
        "resumed with per_device_train_batch_size: 2, until then 4",
        "resumed with gradient_accumulation_steps: 2, until then 1",
    ]


def test_save_only_model_writes_weights_and_prunes(configure):
    config = configure(save_only_model=True, save_strategy="steps", save_steps=1, save_total_limit=2, max_steps=4)
    train(config)
    folder = Path(config.train.output_dir)
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-4"]
    assert (folder / "checkpoint-4" / "adapter_model.safetensors").exists()
    assert not (folder / "checkpoint-4" / "state").exists()
    assert Checkpoints(folder).latest() is None  # nothing to resume from
    with pytest.raises(ValueError, match="no train state of gymjax is in checkpoint-3, checkpoint-4"):
        train(config)
    assert (folder / "checkpoint-4" / "adapter_model.safetensors").exists()


def test_profile_covers_the_named_steps(configure):
    config = configure(profile_steps="2-3", max_steps=4)
    train(config)
    assert list((Path(config.train.output_dir) / "profile").rglob("*.xplane.pb"))


def test_devices_named_in_errors(configure):
    with pytest.raises(ValueError, match=rf"must be the number of devices, {jax.device_count()}; got 2 \* 2"):
        train(configure(dp_size=2, fsdp_size=2))


def test_a_share_of_the_run_is_due_as_often_as_the_trainer_has_it():
    def steps(every, total, when="steps"):
        return [step for step in range(1, total + 1) if loop.due(when, every, step, 6, total)]

    assert steps(0.25, 12) == [3, 6, 9, 12]
    assert steps(0.3, 10) == [3, 6, 9, 10]
    assert steps(0.001, 4) == [1, 2, 3, 4]  # at least a step
    assert steps(1 - 1e-9, 10) == [10]
    assert steps(5, 12) == [5, 10, 12]
    assert steps(0.25, 12, "epoch") == [6, 12]
    assert steps(0.25, 12, "no") == []
