"""Rotary frequencies equal those of transformers' own rotary modules, pair by pair."""

import numpy as np
import pytest

from gymjax.models import decoder_config
from gymjax.models.hf_rope import extend_context, head_dim, read_rope
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


BASES = {
    "old-spelling": {"model_type": "llama", "rope_theta": 20000.0},
    "new-spelling": {"model_type": "qwen3", "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}},
    "by-layer": {"model_type": "gemma3_text", "num_hidden_layers": 6, "sliding_window": 8, "rope_theta": 20000.0},
}
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "llama3"])
def test_extended_context_reads_back_in_transformers(kind, base, torch_side):
    hf = SHAPE | BASES[base]
    extended = extend_context(hf, kind, 200)
    cfg = decoder_config(extended)
    assert cfg.max_positions == 256
    assert cfg.ropes[0] != decoder_config(hf).ropes[0]
    assert cfg.ropes[1:] == decoder_config(hf).ropes[1:]
    theirs = torch_side.rope_frequencies(config=extended, length=200)
    assert_equal(cfg.ropes[0], cfg.head_dim, 200, theirs.get("") or theirs["full_attention"], f"{kind} {base}")
