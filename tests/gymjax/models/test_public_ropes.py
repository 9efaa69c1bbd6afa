"""Rotary frequencies of public models' config.json files, against a table that transformers computed."""

import numpy as np

from gymjax.models import FAMILIES, decoder_config
from gymjax.models.hf_rope import head_dim, read_rope
from gymjax.nn.rope import inverse_frequencies


def ropes_of(hf):
    """Settings of full and of sliding layers, and the width of a head."""
    if hf["model_type"] in FAMILIES:
        cfg = decoder_config(hf)
        return {"full_attention": cfg.ropes[0], "sliding_attention": cfg.ropes[-1]}, cfg.head_dim
    return {"full_attention": read_rope(hf)}, head_dim(hf)


def test_frequencies_equal_the_table(public_ropes):
    named = {entry["config"]["model_type"] for entry in public_ropes.values()}
    assert named >= set(FAMILIES)
    for name, entry in public_ropes.items():
        ropes, width = ropes_of(entry["config"])
        for row in entry["rope"]:
            rope = ropes[row["layers"]]
            ours = inverse_frequencies(rope, width, row["length"])
            at = [int(pair) for pair in row["frequencies"]]
            assert ours.shape == (row["pairs"],), name
            # One bit of an f32 next to 1 is 6e-8; both sides round at the same places.
            np.testing.assert_allclose(ours[at], list(row["frequencies"].values()), rtol=0, atol=1e-7, err_msg=name)
            np.testing.assert_allclose(ours[at], list(row["frequencies"].values()), rtol=3e-7, err_msg=name)
            np.testing.assert_allclose(ours.sum(dtype=np.float64), row["sum"], rtol=1e-7, err_msg=name)
            np.testing.assert_allclose(rope.attention_factor, row["attention_factor"], rtol=1e-12, err_msg=name)
