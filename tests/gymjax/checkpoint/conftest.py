import errno
import os

import numpy as np
import pytest

from gymjax.checkpoint.hf import open_folder, save_folder
from gymjax.checkpoint.weights import load_decoder
from gymjax.models import decoder_config

# config.json of the tiny model of make_model()
CONFIG = {
    "model_type": "llama",
    "vocab_size": 272,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="session")
def config():
    return CONFIG


@pytest.fixture
def tiny(make_model):
    return make_model()


@pytest.fixture
def folder(tiny, byte_tokenizer, tmp_path):
    """A model folder: two shards, tokenizer, generation_config.json."""
    path = tmp_path / "base"
    save_folder(
        path,
        tiny,
        CONFIG,
        dtype="float32",
        export_size=7e-5,
        tokenizer=byte_tokenizer,
        generation_config={"eos_token_id": [1, 2]},
    )
    return path


@pytest.fixture(scope="session")
def load():
    def load(path, dtype="float32", **options):
        source = open_folder(path)
        return load_decoder(decoder_config(source.config), source, dtype=dtype, **options)

    return load


@pytest.fixture(scope="session")
def logits():
    tokens = np.random.default_rng(0).integers(0, CONFIG["vocab_size"], (2, 9))
    return lambda model: np.asarray(model.logits(model(tokens)))


@pytest.fixture(scope="session")
def no_space():
    """What a write on a full disk raises."""
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
