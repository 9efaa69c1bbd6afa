"""Rotary frequencies equal those of transformers' own rotary modules, pair by pair."""

import numpy as np
import pytest

from gymjax.models import decoder_config
from gymjax.models.hf_rope import head_dim, read_rope
from gymjax.nn.rope import inverse_frequencies

pytestmark = pytest.mark.interop


def assert_equal(rope, width, length, theirs, name):
    ours = inverse_frequencies(rope, width, length)
    # Both sides round at the same places, but for the power of "dynamic" and the last bit of their power function.
    np.testing.assert_allclose(ours, theirs["frequencies"], rtol=3e-7, atol=0, err_msg=name)
    np.testing.assert_allclose(rope.attention_factor, theirs["attention_factor"], rtol=1e-12, err_msg=name)


def test_public_models(public_ropes, torch_side):
    for name, entry in public_ropes.items():
        for length in {row["length"] for row in entry["rope"]}:
            theirs = torch_side.rope_frequencies(config=entry["config"], length=length)
            if set(theirs) == {""}:
                assert_equal(
                    read_rope(entry["config"], partial=True), head_dim(entry["config"]), length, theirs[""], name
                )
                continue
            full, sliding = decoder_config(entry["config"]).ropes
            assert_equal(full, head_dim(entry["config"]), length, theirs["full_attention"], name)
            assert_equal(sliding, head_dim(entry["config"]), length, theirs["sliding_attention"], name)


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.4],
    "long_factor": [1.0, 2.0, 4.0, 8.0],
    "original_max_position_embeddings": 64,
}
SETTINGS = {
    "yarn-betas": YARN | {"beta_fast": 8, "beta_slow": 2},
    "yarn-one-mscale": YARN | {"mscale": 0.5},
    "yarn-mscales": YARN | {"mscale": 0.5, "mscale_all_dim": 0.9},
    "yarn-attention-factor": YARN | {"attention_factor": 1.5, "mscale": 0.5, "mscale_all_dim": 0.9},
    "yarn-real-ends": YARN | {"truncate": False},
    "yarn-no-factor": YARN | {"factor": None},
    "yarn-narrow": YARN | {"beta_fast": 1.5, "beta_slow": 1.5, "truncate": False},
    "longrope": LONG,
    "longrope-factor": LONG | {"factor": 6.0},
    "longrope-attention": LONG | {"attention_factor": 1.3},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings(name, torch_side):
    config = {
        "model_type": "llama",
        "hidden_size": 32,
        "num_attention_heads": 4,
        "max_position_embeddings": 320,
        "rope_parameters": SETTINGS[name],
    }
    for length in (64, 65, 400):
        theirs = torch_side.rope_frequencies(config=config, length=length)[""]
        assert_equal(read_rope(config), head_dim(config), length, theirs, name)
