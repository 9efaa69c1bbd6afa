"""Adapter folders that PEFT loads: adapter_config.json and adapter_model.safetensors."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gymjax.adapters.lora import LoraSpec, attach, lora_modules
from gymjax.adapters.select import train_modules
from gymjax.adapters.svd_start import EXACT, SvdStart, as_plain_lora, split_weight
from gymjax.adapters.tensors import SUFFIXES, A, B, adapter_tensors, misfits, set_adapter_tensors
from gymjax.checkpoint.adapter_base import CONFIG, check_base, own_base
from gymjax.checkpoint.files import replacing, require_space
from gymjax.checkpoint.hf import write_json
from gymjax.checkpoint.peft_config import read_adapter_config
from gymjax.checkpoint.peft_experts import from_peft, to_peft
from gymjax.checkpoint.safetensors_io import Tensor, open_tensors, total_bytes, write_tensors
from gymjax.models.decoder import Decoder
from gymjax.models.names import HFWeight, hf_weights, linears, node_at
from gymjax.optim.labels import Trained
from pallas_kernels.nf4_linear import NF4Weight

WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_EMBED, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_HEAD_BASE = "lm_head.base_layer.weight"  # the frozen head, which PEFT saves along with an adapter of it


def save_adapter(
    folder: Path,
    model: Decoder,
    spec: LoraSpec,
    *,
    base: str,
    revision: str | None = None,
    start: Mapping[str, np.ndarray] | None = None,
    tokenizer: Any = None,
) -> None:
    """Write a model's adapters, in f32, as PEFT stores them; all files or none.

    Base weights that are trained beside the adapter become PEFT's modules_to_save. An embedding whose head is tied is
    written twice with ensure_weight_tying, which is what PEFT needs to give equal logits.

    Args:
        folder: where to; files of other names that it holds stay.
        model: with adapters attached.
        spec: what they were attached with.
        base: base_model_name_or_path for the config.
        revision: of the base on the hub, which PEFT then loads; None for main.
        start: factors that the model's base gave up: the adapter is written as plain LoRA of twice the rank, for the
            base as it was before.
        tokenizer: written with its `save_pretrained`.

    Raises:
        ValueError: the model has no adapter.
        OSError: not enough disk; what the folder held is intact.
    """
    arrays = adapter_tensors(model)
    if not arrays:
        raise ValueError("the model has no adapter to save; save a whole model with save_folder")
    if start:
        spec, arrays = as_plain_lora(spec, arrays, start)
    saved = _trained_base_weights(model)
    tied = model.cfg.tie_embeddings and any(weight.name == _EMBED for weight in saved)
    names = [row.name for _, row in lora_modules(model)]
    over = {"base_model_name_or_path": base, "revision": revision}
    config = _config(spec, over, names, _module_names(model, saved, tied), tied)
    config, arrays = to_peft(model, spec, config, arrays)
    targets = config["target_modules"]
    config["target_modules"] = _short_names(targets, [n for n in _linear_names(model) if n not in set(names)])
    tensors = {_PREFIX + name: _tensor(value) for name, value in arrays.items()}
    for weight in saved:
        tensors[_PREFIX + weight.name] = _tensor(_weight_row(model, weight))
    if tied:
        tensors[_PREFIX + _HEAD] = tensors[_PREFIX + _EMBED]
    require_space(folder, total_bytes(tensors.values()))
    with replacing(folder) as temporary:
        write_tensors(temporary / WEIGHTS, dict(sorted(tensors.items())))
        write_json(temporary / CONFIG, config)
        if tokenizer is not None:
            tokenizer.save_pretrained(str(temporary))


def _tensor(value: np.ndarray) -> Tensor:
    return Tensor(value.shape, np.dtype(np.float32), lambda: np.asarray(value, np.float32))


def _config(
    spec: LoraSpec, over: Mapping[str, str | None], names: Sequence[str], modules: list[str], tied: bool
) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        **over,
        "r": spec.rank,
        "lora_alpha": _plain(spec.alpha),
        "lora_dropout": spec.dropout,
        "target_modules": list(names),
        "bias": "none",
        "use_rslora": spec.use_rslora,
        "use_dora": spec.use_dora,
        "modules_to_save": modules or None,
        "ensure_weight_tying": tied,
        "rank_pattern": dict(spec.rank_pattern),
        "alpha_pattern": {key: _plain(value) for key, value in spec.alpha_pattern.items()},
        "init_lora_weights": True,
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def _plain(number: float) -> float | int:
    return int(number) if float(number).is_integer() else number


def _linear_names(model: Decoder) -> list[str]:
    return [name for _, names in linears(model) for name in names.values()]


def _short_names(names: Iterable[str], others: Sequence[str]) -> list[str]:
    """Names shortened to the shortest ending that no other module has, as PEFT matches ends of paths."""
    taken = {ending for name in others for ending in _endings(name)}
    return sorted({next((ending for ending in _endings(name) if ending not in taken), name) for name in names})


def _endings(name: str) -> list[str]:
    """The last part of a path, of an expert's what it has in every layer ("experts.3.up_proj"), and the whole."""
    parts = name.split(".")
    return [parts[-1], ".".join(parts[-3:]) if parts[-2:-1] and parts[-2].isdigit() else name, name]


def _trained_base_weights(model: Decoder) -> list[HFWeight]:
    return [weight for weight in hf_weights(model.cfg) if isinstance(node_at(model, weight.path), Trained)]


def _module_names(model: Decoder, saved: Sequence[HFWeight], tied: bool) -> list[str]:
    """Paths of the modules trained whole; shortened where PEFT, which compares ends of texts, hits no other module."""
    paths = [weight.name.rsplit(".", 1)[0] for weight in saved] + (["lm_head"] if tied else [])
    everything = {weight.name.rsplit(".", 1)[0] for weight in hf_weights(model.cfg)}
    short = {path: path.rsplit(".", 1)[-1] for path in paths}
    unclear = {last for last in short.values() if any(p.endswith(last) and p not in short for p in everything)}
    return sorted({path if last in unclear else last for path, last in short.items()})


def _weight_row(model: Decoder, weight: HFWeight) -> np.ndarray:
    value = node_at(model, weight.path).get_value()
    return np.asarray(value if weight.index is None else value[weight.index])


def open_adapter(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """An adapter folder's config and its tensors, mapped, by the names of their modules.

    Raises:
        FileNotFoundError: no adapter, or only pickled weights.
        ValueError: one that is not supported, or damaged weights.
    """
    config = read_adapter_config(folder)
    if not (folder / WEIGHTS).exists() and (folder / "adapter_model.bin").exists():
        raise FileNotFoundError(
            f"{folder} holds adapter_model.bin, pickled and never read; save the adapter again with PEFT >= 0.5"
        )
    if not (folder / WEIGHTS).exists():
        raise FileNotFoundError(f"{folder} holds {CONFIG} without {WEIGHTS}; copy the adapter's weights there too")
    tensors = {name.removeprefix(_PREFIX): value for name, value in open_tensors(folder / WEIGHTS).items()}
    whole_numbers = [f"{name} ({v.dtype})" for name, v in tensors.items() if not jnp.issubdtype(v.dtype, jnp.floating)]
    if whole_numbers:
        raise ValueError(
            f"{folder / WEIGHTS}: weights must be floating-point, these are not: {', '.join(whole_numbers[:6])}; save "
            "the adapter again with PEFT"
        )
    return config, tensors


def load_adapter(model: Decoder, folder: Path | str) -> LoraSpec:
    """Attach the adapter of a PEFT folder to a model, in place; its modules_to_save become trained weights.

    A PiSSA adapter of PEFT's, which counts on a base without its principal part, becomes plain LoRA of twice the rank
    over the base as it is.

    Args:
        model: its base, without adapters.
        folder: adapter folder.

    Returns:
        What was attached.

    Raises:
        FileNotFoundError: no adapter, or only pickled weights.
        ValueError: an adapter of another base, or one that is not supported; the message names the tensors.
    """
    folder = Path(folder)
    config, tensors = open_adapter(folder)
    config, tensors = from_peft(folder, model, config, tensors)
    _check_head(folder, model, tensors.pop(_HEAD_BASE, None))
    suffixes = SUFFIXES if config.get("use_dora") else (A, B)
    adapted = {name: value for name, value in tensors.items() if name.endswith(suffixes)}
    modules = sorted({name.rpartition(".lora_")[0] for name in adapted})
    whole = {name: value for name, value in tensors.items() if ".lora_" not in name}
    unknown = sorted((set(modules) - set(_linear_names(model))) | (set(whole) - _names_and_head(model)))
    unknown += sorted(tensors.keys() - adapted.keys() - whole.keys())
    if unknown or not modules:
        raise ValueError(
            f"{folder}: the adapter does not fit this base: {', '.join(unknown[:6]) or 'it holds no lora_A'} "
            f"is not part of it. It was trained on {config.get('base_model_name_or_path')}"
        )
    _check_complete(folder, model, config, modules, whole)
    spec = _spec(config, modules)
    base = own_base(folder)
    if base is not None:
        check_base(model, folder, base, modules[0])
    if config.get("init_lora_weights") == "pissa":
        spec, adapted = _over_whole_base(folder, model, spec, adapted)
    attach(model, spec, key=jax.random.key(0))
    _refuse(folder, set_adapter_tensors(model, adapted))
    _load_whole(folder, model, whole)
    return spec


def _check_complete(
    folder: Path, model: Decoder, config: Mapping[str, Any], modules: Sequence[str], whole: Iterable[str]
) -> None:
    """Refuses weights that lack what the adapter's config names: cut files, or a base of more layers.

    Experts of a layer are checked to be alike when they are attached. Where the config narrows its names to some
    layers, the tensors say which.
    """
    targets, saved = config.get("target_modules"), config.get("modules_to_save") or ()
    narrowed = config.get("layers_to_transform") is not None or config.get("exclude_modules")
    named = LoraSpec(targets=tuple(targets) if isinstance(targets, list) and not narrowed else ())
    missing = [name for name in _linear_names(model) if named.is_target(name) and ".experts." not in name]
    missing = [name for name in missing if name not in modules]
    bases = {weight.name.rsplit(".", 1)[0] for weight in hf_weights(model.cfg)}
    there = {name.rsplit(".", 1)[0] for name in whole}
    missing += [
        name
        for name in saved
        if any(base.endswith(name) for base in bases) and not any(module.endswith(name) for module in there)
    ]
    if missing:
        raise ValueError(
            f"{folder}: {WEIGHTS} lacks {', '.join(missing[:6])}{', ...' if missing[6:] else ''}, which {CONFIG} names "
            f"in this base. The adapter was trained on {config.get('base_model_name_or_path')}: name that as "
            "model_name_or_path, or copy the adapter's files again"
        )


def _spec(config: Mapping[str, Any], modules: Sequence[str]) -> LoraSpec:
    return LoraSpec(
        rank=config["r"],
        alpha=config["lora_alpha"],
        dropout=config.get("lora_dropout") or 0.0,
        targets=tuple(modules),
        use_rslora=bool(config.get("use_rslora")),
        use_dora=bool(config.get("use_dora")),
        rank_pattern=config.get("rank_pattern") or {},
        alpha_pattern=config.get("alpha_pattern") or {},
    )


def attach_blank(model: Decoder, folder: Path | str) -> LoraSpec:
    """Attaches an adapter of the shapes that `load_adapter` makes, in place; for shapes under jax.eval_shape.

    Raises:
        FileNotFoundError: no adapter in the folder.
        ValueError: one that is not supported, or of another base.
    """
    folder = Path(folder)
    config, tensors = open_adapter(folder)
    modules = {name.rpartition(".lora_")[0] for name in tensors if ".lora_" in name}
    known = set(_linear_names(model))
    spec = _spec(config, sorted(modules & known) or config["target_modules"])
    if config.get("init_lora_weights") == "pissa":
        spec = dataclasses.replace(spec, rank=2 * spec.rank)
    attach(model, spec, key=jax.random.key(0))
    whole = {name for name in tensors if ".lora_" not in name and name != _HEAD_BASE}
    whole -= {_HEAD} if model.cfg.tie_embeddings else set()
    train_modules(model, sorted({name.rsplit(".", 1)[0] for name in whole}), key="modules_to_save")
    return spec


def _names_and_head(model: Decoder) -> set[str]:
    return {weight.name for weight in hf_weights(model.cfg)} | {_HEAD}


def _over_whole_base(
    folder: Path, model: Decoder, spec: LoraSpec, tensors: dict[str, np.ndarray]
) -> tuple[LoraSpec, dict[str, np.ndarray]]:
    """A PiSSA adapter as plain LoRA: its first factors are found again from the base, as PEFT does on loading."""
    start: dict[str, np.ndarray] = {}
    for layer, names in linears(model):
        w = layer.w.get_value()
        for index, name in names.items():
            if spec.rank_of(name) and isinstance(w, NF4Weight):
                raise ValueError(
                    f"{folder}: init_lora_weights: pissa starts from 16-bit weights, but {name} is quantized; leave "
                    "quantization_bit out, or convert it with PEFT's path_initial_model_for_weight_conversion"
                )
            if spec.rank_of(name):
                row = np.asarray(w if index is None else w[index])
                split_weight(SvdStart("pissa", EXACT, seed=0), spec, start, name, row, lambda rest: rest)
    _refuse(folder, misfits(tensors, start))
    return as_plain_lora(spec, tensors, start)


def _refuse(folder: Path, wrong: Sequence[str]) -> None:
    if wrong:
        raise ValueError(
            f"{folder}: {len(wrong)} tensors do not fit {CONFIG} and the base: {'; '.join(wrong[:6])}. "
            "Check r, rank_pattern and the base model"
        )


def _check_head(folder: Path, model: Decoder, saved: np.ndarray | None) -> None:
    """Refuses an adapter of another head than the model's; rounding to 8 bits or more is the same head."""
    if saved is None or model.head is None:  # without a head its adapter is refused by name
        return
    ours, theirs = (np.asarray(head, np.float32) for head in (model.head.w.get_value(), np.asarray(saved)))
    if ours.shape != theirs.shape or not np.allclose(ours, theirs, rtol=2**-7, atol=1e-6):
        raise ValueError(
            f"{folder}: {_HEAD_BASE} is not the base's lm_head (shapes {theirs.shape} and {ours.shape}): the adapter "
            "belongs to a base whose head was changed or resized; name that one as model_name_or_path"
        )


def _load_whole(folder: Path, model: Decoder, whole: Mapping[str, np.ndarray]) -> None:
    """Modules saved whole become trained variables of the model."""
    if model.cfg.tie_embeddings and (_EMBED in whole or _HEAD in whole):
        if not (_EMBED in whole and _HEAD in whole and np.array_equal(whole[_EMBED], whole[_HEAD])):
            raise ValueError(
                f"{folder}: the base ties its head to its embedding, but the adapter trained them apart; "
                "train it with ensure_weight_tying, or untie the base first"
            )
        whole = {name: value for name, value in whole.items() if name != _HEAD}
    weights = {weight.name: weight for weight in hf_weights(model.cfg)}
    train_modules(model, sorted({name.rsplit(".", 1)[0] for name in whole}), key="modules_to_save")
    for name, value in whole.items():
        weight = weights[name]
        if value.shape != weight.shape:
            raise ValueError(
                f"{folder}: {name} is {value.shape}, the base's is {weight.shape}; was the vocabulary resized?"
            )
        variable = node_at(model, weight.path)
        old, new = variable.get_value(), jnp.asarray(np.asarray(value, np.float32))
        variable.set_value(jax.device_put(new if weight.index is None else old.at[weight.index].set(new), old.sharding))
