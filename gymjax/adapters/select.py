"""Which base weights are trained: all of them, some layers (freeze), or modules beside an adapter."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from gymjax.models.decoder import Decoder
from gymjax.models.decoder_config import stack_layers
from gymjax.models.names import HFWeight, hf_weights, node_at
from gymjax.optim.labels import Trained
from pallas_kernels.nf4_linear import NF4Weight


def train_all(model: Decoder) -> None:
    """Makes every weight trained (f32), in place: full fine-tuning."""
    for path in dict.fromkeys(weight.path for weight in hf_weights(model.cfg)):
        train_variable(model, path)


def train_modules(model: Decoder, modules: Sequence[str], *, key: str) -> None:
    """Makes named modules trained (f32) beside an adapter, in place: PEFT's modules_to_save.

    Args:
        model: decoder.
        modules: names at the end of Hugging Face module paths: "embed_tokens", "lm_head", "norm", "q_proj".
        key: config key to name in errors.

    Raises:
        ValueError: a name that matches nothing, an expert or Mixtral's router, a head that is tied, a quantized weight.
    """
    weights = hf_weights(model.cfg)
    for module in modules:
        if module == "lm_head" and model.cfg.tie_embeddings:
            raise ValueError(f"{key}: lm_head is tied to embed_tokens in this model; name embed_tokens to train both")
        paths = {weight.path for weight in weights if _belongs(weight, module)}
        if not paths:
            known = sorted({weight.name.split(".")[-2] for weight in weights})
            raise ValueError(f"{key}: {module!r} names no module of this model; known: {', '.join(known)}")
        if any(len(weight.at) == 2 for weight in weights if _belongs(weight, module)):
            raise ValueError(
                f"{key}: {module!r} reaches experts, which no adapter's file holds whole; give them adapters "
                "(lora_target), or use finetuning_type: full or freeze"
            )
        moe = model.cfg.experts
        if moe is not None and moe.layout == "block_sparse_moe" and any("router" in path for path in paths):
            raise ValueError(
                f"{key}: {module!r} reaches Mixtral's router, which transformers names otherwise than its files, so "
                "that PEFT could not load the adapter; use finetuning_type: full or freeze, or leave it out"
            )
        for path in sorted(paths, key=str):
            train_variable(model, path)


def _belongs(weight: HFWeight, module: str) -> bool:
    return f".{module}." in "." + weight.name


def train_layers(model: Decoder, layers: int, modules: Sequence[str], extra: Sequence[str]) -> Decoder:
    """Freeze tuning: trains the last `layers` layers (the first -layers when negative), and `extra` modules outside.

    Layers are re-stacked so that frozen and trained ones never share an array.

    Args:
        model: decoder; its arrays are moved into the result.
        layers: how many layers, counted from the top, or from the bottom when negative.
        modules: ("all",) or names of modules inside those layers ("mlp", "self_attn", "q_proj").
        extra: names of modules outside the layers ("embed_tokens", "norm", "lm_head").

    Returns:
        A decoder over the same weights.

    Raises:
        ValueError: more layers than there are, none, or a name that matches nothing.
    """
    total = model.cfg.layers
    if not 0 < abs(layers) <= total:
        raise ValueError(f"freeze_trainable_layers must lie in 1..{total} or -{total}..-1 for this model, not {layers}")
    cut = total - layers if layers > 0 else -layers
    chosen = range(cut, total) if layers > 0 else range(cut)
    model = restack(model, cut)
    prefixes = tuple(f"model.layers.{i}." for i in chosen)
    inside = [weight for weight in hf_weights(model.cfg) if weight.name.startswith(prefixes)]
    for module in modules:
        paths = {weight.path for weight in inside if module == "all" or _belongs(weight, module)}
        if not paths:
            parts = {part for weight in inside for part in weight.name.split(".")[3:-1]}
            known = sorted(part for part in parts if not part.isdigit())
            raise ValueError(f"freeze_trainable_modules: {module!r} names nothing; known: all, {', '.join(known)}")
        for path in sorted(paths, key=str):
            train_variable(model, path)
    train_modules(model, extra, key="freeze_extra_modules")
    return model


def train_variable(model: Decoder, path: tuple[str | int, ...]) -> None:
    """Turns one frozen weight into a trained one in f32, in place; a trained one stays."""
    variable = node_at(model, path)
    value = variable.get_value()
    if isinstance(value, NF4Weight):
        raise ValueError(f"{'.'.join(map(str, path))} is quantized and cannot be trained; leave it out or load 16 bits")
    if not isinstance(variable, Trained):
        setattr(node_at(model, path[:-1]), str(path[-1]), Trained(value.astype(jnp.float32)))


def restack(model: Decoder, cut: int) -> Decoder:
    """The same weights with a boundary between stacks before layer `cut`."""
    old = model.cfg
    new_cfg = dataclasses.replace(old, stacks=stack_layers(old.kinds, cut))
    if new_cfg == old:
        return model
    new = nnx.eval_shape(lambda: Decoder(new_cfg, dtype=jnp.float32, compute_dtype=model.compute_dtype))
    rows: dict[tuple, list] = {}
    for before, after in zip(hf_weights(old), hf_weights(new_cfg), strict=True):
        if any(before.at[1:]):  # a layer's experts move together, with the first of them
            continue
        value = node_at(model, before.path).get_value()
        row = value if before.index is None else jax.tree.map(operator.itemgetter(before.at[0]), value)
        rows.setdefault((after.path, after.index is None), []).append(row)
    for (path, alone), values in rows.items():
        node_at(new, path).set_value(values[0] if alone else jax.tree.map(lambda *leaves: jnp.stack(leaves), *values))
    return new
