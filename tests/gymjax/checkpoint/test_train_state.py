import collections
import os
import shutil
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from gymjax.checkpoint.train_state import Checkpoints

Usage = collections.namedtuple("Usage", "total used free")


def make_state(value=0.0):
    params = nnx.state(nnx.Linear(3, 5, rngs=nnx.Rngs(0)))
    params = jax.tree.map(lambda leaf: leaf + value, params)
    optimizer = optax.adamw(1e-3).init(params)
    return {
        "params": params,
        "optimizer": optimizer,
        "key": jax.random.key(7),
        "step": jnp.int32(3),
        "half": jnp.float16(2),
    }


def bits(state):
    leaves = [
        leaf if leaf.dtype != jax.random.key(0).dtype else jax.random.key_data(leaf) for leaf in jax.tree.leaves(state)
    ]
    return [np.asarray(leaf).tobytes() for leaf in leaves]


@pytest.fixture
def run(tmp_path):
    checkpoints = Checkpoints(tmp_path / "run")
    yield checkpoints
    checkpoints.close()


def test_round_trip_keeps_every_bit(run):
    state = make_state(float(np.float32(1) / 3))
    run.save(10, state, {"global_step": 10, "log_history": [{"loss": 1.5}]})
    run.wait()
    assert run.latest() == 10
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)
    for form in (state, like):
        restored, meta = run.restore(10, form)
        assert bits(restored) == bits(state)
        assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert meta == {"global_step": 10, "log_history": [{"loss": 1.5}]}
    assert {path.name for path in run.folder(10).iterdir()} == {"state", "state.json", "trainer_state.json"}


def test_arrays_may_be_donated_at_once(run):
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jnp.arange(1_000_000.0)
    run.save(1, {"x": x}, {})
    for _ in range(3):
        x = step(x)
    run.wait()
    restored, _ = run.restore(1, {"x": x})
    np.testing.assert_array_equal(restored["x"], np.arange(1_000_000.0, dtype=np.float32))


def test_old_checkpoints_go_and_the_best_stays(tmp_path):
    run = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3, 4):
        run.save(step, make_state(), {}, protect=1)
    run.wait()
    assert run.steps() == [1, 3, 4]
    run.save(4, make_state(5.0), {"again": True})
    run.close()
    assert run.steps() == [3, 4]
    restored, meta = run.restore(4, make_state())
    assert bits(restored) == bits(make_state(5.0))
    assert meta == {"again": True}
    assert sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith(".")) == [
        "checkpoint-3",
        "checkpoint-4",
    ]


def test_extra_files_belong_to_the_checkpoint(run):
    run.save(1, make_state(), {}, extra=lambda folder: (folder / "adapter.txt").write_text("x"))
    run.wait()
    assert (run.folder(1) / "adapter.txt").read_text() == "x"


def test_no_checkpoint_yet(run):
    assert run.latest() is None
    with pytest.raises(FileNotFoundError, match=r"checkpoint-3 is no whole checkpoint; there are: none"):
        run.restore(3, make_state())


def test_folder_without_its_parts_is_no_checkpoint(run):
    run.save(1, make_state(), {})
    run.wait()
    (run.folder(2) / "state").mkdir(parents=True)
    (run.output_dir / "checkpoint-best").mkdir()
    assert run.latest() == 1


KILLED = """
import sys, jax.numpy as jnp
from gymjax.checkpoint.train_state import Checkpoints
run = Checkpoints(sys.argv[1])
step = int(sys.argv[2])
state = {f"w{i}": jnp.full(500_000, step + i, jnp.float32) for i in range(40)}
run.save(step, state, {"step": step})
run.wait()
print("saved", flush=True)
for step in range(step + 1, 1000):
    print("saving", flush=True)
    run.save(step, {name: w + 1 for name, w in state.items()}, {"step": step})
    run.wait()
"""


def test_kill_during_a_save_leaves_the_previous_checkpoint(tmp_path):
    like = {f"w{i}": jnp.zeros(500_000) for i in range(40)}
    start = 1
    for delay in (0.0, 0.05, 0.2):
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(tmp_path), str(start)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout.readline() == "saved\n"
        assert process.stdout.readline() == "saving\n"
        time.sleep(delay)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        run = Checkpoints(tmp_path)
        newest = run.latest()
        assert newest >= start
        for step in run.steps():
            restored, meta = run.restore(step, like)
            assert meta == {"step": step}
            assert len({float(w[0]) - int(name[1:]) for name, w in restored.items()}) == 1
            assert all((w == w[0]).all() for w in restored.values())
        start = newest + 1
    run.save(start, like, {})
    run.close()
    assert not list(tmp_path.glob(".*partial*"))  # what the killed processes left is gone


def damage(run, step, change):
    files = sorted(
        (run.folder(step) / "state").rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0
    )
    change(files[-1])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("change", [flip, lambda path: path.unlink(), lambda path: path.write_bytes(b"")])
def test_bad_checkpoint_is_named_with_the_one_before(run, change):
    for step in (1, 2):
        run.save(step, make_state(), {})
    run.wait()
    damage(run, 2, change)
    with pytest.raises(
        ValueError, match=r"checkpoint-2 is damaged: state/.*Delete that folder to resume from checkpoint-1"
    ):
        run.restore(2, make_state())
    damage(run, 1, change)
    with pytest.raises(ValueError, match=r"Delete that folder to start the run again"):
        run.restore(1, make_state())


def test_bad_checkpoint_json(run):
    run.save(1, make_state(), {})
    run.wait()
    (run.folder(1) / "trainer_state.json").write_text("{")
    with pytest.raises(ValueError, match=r"checkpoint-1 is damaged: its JSON files cannot be read"):
        run.restore(1, make_state())


def test_bad_checkpoint_of_another_run(run):
    run.save(1, {"w": jnp.zeros((3, 4)), "only": jnp.zeros(1)}, {})
    run.wait()
    with pytest.raises(
        ValueError, match=r"only: saved float32\[1\], now absent; w: saved float32\[3, 4\], now float32\[3, 5\]"
    ):
        run.restore(1, {"w": jnp.zeros((3, 5))})


def test_bad_limit(tmp_path):
    with pytest.raises(ValueError, match=r"save_total_limit must be at least 1 or absent, is 0"):
        Checkpoints(tmp_path, keep=0)


def test_bad_disk_too_small(run, monkeypatch):
    run.save(1, make_state(), {})
    run.wait()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 10**9, 10))
    with pytest.raises(OSError, match=r"disk full while writing .*run: .* GiB are needed.*intact"):
        run.save(2, make_state(), {})
    assert run.steps() == [1]


def test_bad_disk_full_in_the_background(run, monkeypatch, no_space):
    run.save(1, make_state(), {})
    run.wait()

    def fail(_):
        raise ValueError(f"UNKNOWN: Error writing: {no_space.strerror} [tensorstore]")

    monkeypatch.setattr("orbax.checkpoint.StandardCheckpointer.wait_until_finished", fail)

    def save():
        run.save(2, make_state(), {})
        run.wait()

    with pytest.raises(OSError, match=r"disk full while writing .*the write stopped half-way.*intact; free space"):
        save()
    monkeypatch.undo()
    assert run.steps() == [1]
    assert bits(run.restore(1, make_state())[0]) == bits(make_state())
    run.save(3, make_state(), {})
    run.wait()
    assert run.steps() == [1, 3]


def test_error_of_the_extra_files_leaves_nothing(run, no_space):
    def fail(folder):
        (folder / "half").write_text("x")
        raise no_space

    with pytest.raises(OSError, match=r"disk full"):
        run.save(1, make_state(), {}, extra=fail)
    assert run.latest() is None
    assert not list(run.output_dir.iterdir())
