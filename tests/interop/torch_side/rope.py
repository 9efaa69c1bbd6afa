"""Rotary frequencies of transformers' own models."""

import copy
import importlib

import torch
from transformers import AutoConfig


def rope_frequencies(config, length):
    """What each type of layer of a config.json turns with in a sequence of `length` tokens.

    Returns {"": ...} for a model whose layers are alike, else one entry for each type of layer: inverse frequencies
    and the factor on cos and sin.
    """
    config = copy.deepcopy(config)
    family = config.pop("model_type")
    module = importlib.import_module(
        f"transformers.models.{family.removesuffix('_text')}.modeling_{family.removesuffix('_text')}"
    )
    kinds = [kind for name, kind in vars(module).items() if name.endswith("RotaryEmbedding")]
    config = AutoConfig.for_model(family, **config)
    rope = kinds[0](config)
    positions, states = torch.arange(length)[None], torch.zeros(1, 1, 1)
    if hasattr(rope, "inv_freq"):
        rope(states, positions)
        return {"": {"frequencies": rope.inv_freq.tolist(), "attention_factor": float(rope.attention_scaling)}}
    found = {}
    for kind in sorted(set(config.layer_types)):
        rope(states, positions, kind)
        frequencies = getattr(rope, f"{kind}_inv_freq").tolist()
        found[kind] = {
            "frequencies": frequencies,
            "attention_factor": float(getattr(rope, f"{kind}_attention_scaling")),
        }
    return found


CALLS = (rope_frequencies,)
