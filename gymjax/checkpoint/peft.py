"""Adapter folders that PEFT loads: adapter_config.json and adapter_model.safetensors."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gymjax.adapters.lora import LoraRow, LoraSpec, attach, lora_modules
from gymjax.adapters.select import train_modules
from gymjax.checkpoint.files import replacing, require_space
from gymjax.checkpoint.hf import read_json, write_json
from gymjax.checkpoint.safetensors_io import Tensor, open_tensors, total_bytes, write_tensors
from gymjax.models.decoder import Decoder
from gymjax.models.names import HFWeight, hf_weights, node_at
from gymjax.optim.labels import Trained

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_EMBED, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Settings of PEFT's LoraConfig that change what the adapter computes, with the only values that are done here.
_ONLY = {
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "bias": ("none", None),
    "fan_in_fan_out": (False, None),
    "trainable_token_indices": (None,),
    "target_parameters": (None, []),
    "layer_replication": (None,),
    "alora_invocation_tokens": (None,),
    "use_qalora": (False, None),
    "use_bdlora": (False, None),
}


def save_adapter(
    folder: Path,
    model: Decoder,
    spec: LoraSpec,
    *,
    base: str,
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
        tokenizer: written with its `save_pretrained`.

    Raises:
        ValueError: the model has no adapter.
        OSError: not enough disk; what the folder held is intact.
    """
    tensors: dict[str, Tensor] = {}
    for row, a, b in _host_factors(model):
        tensors[f"{_PREFIX}{row.name}.lora_A.weight"] = _tensor(a)
        tensors[f"{_PREFIX}{row.name}.lora_B.weight"] = _tensor(b)
    if not tensors:
        raise ValueError("the model has no adapter to save; save a whole model with save_folder")
    saved = _trained_base_weights(model)
    for weight in saved:
        tensors[_PREFIX + weight.name] = _tensor(_weight_row(model, weight))
    tied = model.cfg.tie_embeddings and any(weight.name == _EMBED for weight in saved)
    if tied:
        tensors[_PREFIX + _HEAD] = tensors[_PREFIX + _EMBED]
    names = [row.name for _, row in lora_modules(model)]
    config = _config(model, spec, base, names, _module_names(model, saved, tied), tied)
    require_space(folder, total_bytes(tensors.values()))
    with replacing(folder) as temporary:
        write_tensors(temporary / WEIGHTS, dict(sorted(tensors.items())))
        write_json(temporary / CONFIG, config)
        if tokenizer is not None:
            tokenizer.save_pretrained(str(temporary))


def _host_factors(model: Decoder) -> Iterator[tuple[LoraRow, np.ndarray, np.ndarray]]:
    """Every adapted module with its own a (R, in) and b (out, R); each stacked array comes to the host once."""
    previous, a, b = None, np.empty(0), np.empty(0)
    for lora, row in lora_modules(model):
        if lora is not previous:
            previous, a, b = lora, np.asarray(lora.a.get_value()), np.asarray(lora.b.get_value())
        at = () if row.index is None else (row.index,)
        yield row, a[at][: row.rank], b[at][:, : row.rank]


def _tensor(value: np.ndarray) -> Tensor:
    return Tensor(value.shape, np.dtype(np.float32), lambda: np.asarray(value, np.float32))


def _config(
    model: Decoder, spec: LoraSpec, base: str, names: Sequence[str], modules: list[str], tied: bool
) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": spec.rank,
        "lora_alpha": _plain(spec.alpha),
        "lora_dropout": spec.dropout,
        "target_modules": _short_names(names, [name for name in _linear_names(model) if name not in set(names)]),
        "bias": "none",
        "use_rslora": spec.use_rslora,
        "use_dora": False,
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
    return [w.name.removesuffix(".weight") for w in hf_weights(model.cfg) if w.quantizable or w.name == _HEAD]


def _short_names(names: Iterable[str], others: Sequence[str]) -> list[str]:
    """Names shortened to their last part wherever no other module ends in it, as PEFT matches ends of paths."""
    taken = {name.rsplit(".", 1)[-1] for name in others}
    return sorted({name if (last := name.rsplit(".", 1)[-1]) in taken else last for name in names})


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


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """An adapter folder's adapter_config.json, checked to describe an adapter that is done here.

    Raises:
        FileNotFoundError: no such folder, or no adapter in it.
        ValueError: another kind of adapter than LoRA, or a variant of LoRA that is not done.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; adapter_name_or_path must be a PEFT adapter folder")
    config = read_json(path)
    if config.get("peft_type") != "LORA":
        raise ValueError(f"{path}: peft_type {config.get('peft_type')} is not supported; supported: LORA")
    wrong = [f"{key}: {config[key]}" for key, values in _ONLY.items() if key in config and config[key] not in values]
    if wrong:
        raise ValueError(f"{path}: not supported: {', '.join(wrong)}; plain LoRA and rsLoRA are")
    return config


def load_adapter(model: Decoder, folder: Path | str) -> LoraSpec:
    """Attach the adapter of a PEFT folder to a model, in place; its modules_to_save become trained weights.

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
    config = read_adapter_config(folder)
    if not (folder / WEIGHTS).exists() and (folder / "adapter_model.bin").exists():
        raise FileNotFoundError(
            f"{folder} holds adapter_model.bin, pickled and never read; save the adapter again with PEFT >= 0.5"
        )
    tensors = {name.removeprefix(_PREFIX): value for name, value in open_tensors(folder / WEIGHTS).items()}
    modules = sorted({m[1] for name in tensors if (m := re.fullmatch(r"(.+)\.lora_[AB]\.weight", name))})
    whole = {name: value for name, value in tensors.items() if ".lora_" not in name}
    unknown = sorted((set(modules) - set(_linear_names(model))) | (set(whole) - _names_and_head(model)))
    unknown += [name for name in tensors if ".lora_" in name and not re.search(r"\.lora_[AB]\.weight$", name)]
    if unknown or not modules:
        raise ValueError(
            f"{folder}: the adapter does not fit this base: {', '.join(unknown[:6]) or 'it holds no lora_A'} "
            f"is not part of it. It was trained on {config.get('base_model_name_or_path')}"
        )
    spec = LoraSpec(
        rank=config["r"],
        alpha=config["lora_alpha"],
        dropout=config.get("lora_dropout") or 0.0,
        targets=tuple(modules),
        use_rslora=bool(config.get("use_rslora")),
        rank_pattern=config.get("rank_pattern") or {},
        alpha_pattern=config.get("alpha_pattern") or {},
    )
    attach(model, spec, key=jax.random.key(0))
    _fill(folder, model, tensors)
    _load_whole(folder, model, whole)
    return spec


def _names_and_head(model: Decoder) -> set[str]:
    return {weight.name for weight in hf_weights(model.cfg)} | {_HEAD}


def _fill(folder: Path, model: Decoder, tensors: Mapping[str, np.ndarray]) -> None:
    """Write the factors of every module over the freshly attached ones."""
    values: dict[int, tuple[Any, np.ndarray]] = {}
    wrong = []
    for lora, row in lora_modules(model):
        for variable, kind in ((lora.a, "A"), (lora.b, "B")):
            name = f"{row.name}.lora_{kind}.weight"
            _, array = values.setdefault(id(variable), (variable, np.array(variable.get_value())))
            part = array if row.index is None else array[row.index]
            part = part[: row.rank] if kind == "A" else part[:, : row.rank]
            if name not in tensors or tensors[name].shape != part.shape:
                wrong.append(f"{name} is {tensors[name].shape if name in tensors else 'missing'}, must be {part.shape}")
            else:
                part[...] = tensors[name]
    if wrong:
        raise ValueError(
            f"{folder}: {len(wrong)} tensors do not fit {CONFIG} and the base: {'; '.join(wrong[:6])}. "
            "Check r, rank_pattern and the base model"
        )
    for variable, array in values.values():
        variable.set_value(jax.device_put(jnp.asarray(array), variable.get_value().sharding))


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
