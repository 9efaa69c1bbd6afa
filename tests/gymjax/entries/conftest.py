import json

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from gymjax.adapters.lora import LoraB, LoraSpec, attach
from gymjax.checkpoint.hf import save_folder
from gymjax.checkpoint.peft import save_adapter
from gymjax.config import from_dict

ROWS = [
    ("Who are you?", "I am a tiny model."),
    ("What is 1 + 1?", "2."),
    ("Say hello.", "Hello!"),
]


@pytest.fixture(scope="session")
def base(tmp_path_factory, make_model, byte_tokenizer, hf_config):
    """Folder of a tiny random model."""
    folder = tmp_path_factory.mktemp("base") / "tiny"
    save_folder(folder, make_model(), hf_config, dtype=jnp.dtype("float32"), tokenizer=byte_tokenizer)
    return folder


@pytest.fixture(scope="session")
def adapter(base, tmp_path_factory, make_model, byte_tokenizer):
    """An adapter folder that changes the base a lot."""
    model, spec = make_model(), LoraSpec(rank=4, alpha=8.0)
    attach(model, spec, key=jax.random.key(1))
    nnx.update(
        model, jax.tree.map(lambda b: b + 0.3 * jax.random.normal(jax.random.key(2), b.shape), nnx.state(model, LoraB))
    )
    folder = tmp_path_factory.mktemp("adapter") / "run"
    save_adapter(folder, model, spec, base=str(base), tokenizer=byte_tokenizer)
    return folder


@pytest.fixture(scope="session")
def rows_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    turns = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in ROWS]
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in turns))
    return path


@pytest.fixture(scope="session")
def make_config(base):
    def make(**changes):
        keys = {"model_name_or_path": str(base), "do_sample": False, "max_new_tokens": 12, "flash_attn": "auto"}
        return from_dict(keys | changes)

    return make
