"""One device and four simulated ones (data, fsdp, both) make the same update."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("kind", ["lora", "nf4", "full", "experts", "adamw_8bit"])
def test_four_devices_make_the_update_of_one(kind):
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "4", "JAX_PLATFORMS": "cpu"}
    script = Path(__file__).with_name("devices_check.py")
    done = subprocess.run(
        [sys.executable, str(script), kind], env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 3
    for name, difference in found.items():
        assert difference["loss"] < 1e-6, name  # f32 sums in another order
        assert difference["grads"] < 1e-5, name
        assert difference["shards"] == int(name[-1]), name  # fsdp really splits the weights
