import errno
import os

import numpy as np
import pytest

from gymjax.checkpoint.hf import open_folder, save_folder
from gymjax.checkpoint.weights import load_decoder
from gymjax.models import decoder_config


@pytest.fixture(scope="session")
def config(hf_config):
    return {key: value for key, value in hf_config.items() if key != "dtype"}


@pytest.fixture
def tiny(make_model):
    return make_model()


@pytest.fixture
def folder(tiny, byte_tokenizer, config, tmp_path):
    """A model folder: two shards, tokenizer, generation_config.json."""
    path = tmp_path / "base"
    save_folder(
        path,
        tiny,
        config,
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
def logits(config):
    tokens = np.random.default_rng(0).integers(0, config["vocab_size"], (2, 9))
    return lambda model: np.asarray(model.logits(model(tokens)))


@pytest.fixture(scope="session")
def no_space():
    """What a write on a full disk raises."""
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
