"""A tiny model folder and a tiny conversation file to train on."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gymjax.checkpoint.hf import save_folder
from gymjax.config import from_dict


@pytest.fixture(scope="session")
def model_folder(make_model, byte_tokenizer, hf_config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    save_folder(folder, make_model(), hf_config, dtype=jnp.float32, tokenizer=byte_tokenizer)
    return folder


@pytest.fixture(scope="session")
def data_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": f"{a} + {b}?"}, {"role": "assistant", "content": str(a + b)}]}
        for a in range(4)
        for b in range(4)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def configure_in(model_folder, data_file):
    """A config of a short run in a folder; keyword arguments override its keys."""

    def make(folder, **changes):
        values = {
            "model_name_or_path": str(model_folder),
            "dataset": str(data_file),
            "output_dir": str(folder / "out"),
            "tokenized_path": str(folder / "cache"),
            "per_device_train_batch_size": 4,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "constant",
            "lora_rank": 4,
            "max_steps": 4,
            "logging_steps": 1,
            "save_strategy": "no",
            "cutoff_len": 128,
            "disable_tqdm": True,
        }
        return from_dict({key: value for key, value in (values | changes).items() if value is not None})

    return make


@pytest.fixture
def configure(configure_in, tmp_path):
    """As `configure_in`, in the test's own folder."""
    return functools.partial(configure_in, tmp_path)


@pytest.fixture(scope="session")
def random_batch():
    """An unpacked batch of ragged rows, (A, B, T) cut as asked from the same rows; row i has i + 5 tokens."""

    def make(accumulation, rows, width=16, seed=0):
        rng = np.random.default_rng(seed)
        count = accumulation * rows
        length = 5 + np.arange(count)[:, None]
        real = np.arange(width)[None] < length
        tokens = np.where(real, rng.integers(0, 272, (count, width)), 0).astype(np.int32)
        batch = {
            "tokens": tokens,
            "targets": np.roll(tokens, -1, axis=1),
            "loss_weights": (real & (np.arange(width) >= 2) & (np.arange(width)[None] < length - 1)).astype(np.float32),
            "segment_ids": real.astype(np.int32),
            "positions": np.where(real, np.arange(width), 0).astype(np.int32),
        }
        return {name: jnp.asarray(a.reshape(accumulation, rows, width)) for name, a in batch.items()}

    return make


@pytest.fixture(scope="session")
def leaves_equal():
    """Whether two pytrees have the same bits."""

    def compare(a, b):
        pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
        return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)

    return compare
