"""Two processes of two devices each train as one process does, and one of them writes the files."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gymjax.config import to_yaml
from gymjax.training.train import train


def test_two_processes_train_as_one(configure, tmp_path):
    # PiSSA and DoRA read the base, which is spread over both processes, before the first step.
    changes = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2, "pissa_init": True, "use_dora": True}
    config = configure(**changes, output_dir=str(tmp_path / "two"), per_device_train_batch_size=1, fsdp_size=2)
    file = tmp_path / "run.yaml"
    file.write_text(to_yaml(config))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "2",
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_NUM_PROCESSES": "2",
    }
    command = [sys.executable, "-m", "gymjax.train", str(file)]
    processes = [
        subprocess.Popen(
            command,
            env=environment | {"JAX_PROCESS_ID": str(i)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(2)
    ]
    for process in processes:
        out, _ = process.communicate(timeout=300)
        assert process.returncode == 0, out
    alone = train(configure(**changes, output_dir=str(tmp_path / "one"), per_device_train_batch_size=4))
    log = (Path(config.train.output_dir) / "trainer_log.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in log]
    # The same rows, summed in another order over devices: f32 rounding, once more after an update.
    assert losses == pytest.approx([entry["loss"] for entry in alone.history], rel=1e-5)
    names = {path.name for path in Path(config.train.output_dir).iterdir()}
    assert {"adapter_model.safetensors", "checkpoint-2", "README.md", "residual_base"} <= names
