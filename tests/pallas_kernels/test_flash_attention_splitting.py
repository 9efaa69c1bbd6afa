"""Kernel calls split over devices without gathering, inside shard_map, and batched by vmap."""

import json
import os
import subprocess
import sys
from pathlib import Path


def test_work_is_split_by_rows_and_heads():
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "4", "JAX_PLATFORMS": "cpu"}
    script = Path(__file__).with_name("splitting_check.py")
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 9
    for name, result in found.items():
        assert result["difference"] < 1e-5, name  # f32 sums in another order
    shapes = {
        "('data',)": [[2, 6, 8, 5], [2, 6, 4, 5]],
        "(('data', 'heads'),)": [[1, 6, 8, 5], [1, 6, 4, 5]],
        "('data', None, 'heads')": [[2, 6, 4, 5], [2, 6, 2, 5]],
        "(None, None, ('data', 'heads'))": [[4, 6, 2, 5], [4, 6, 1, 5]],
    }
    for name, shape in shapes.items():
        assert found[name]["one_device"] == shape
        assert found[name]["gathers"] == 0
