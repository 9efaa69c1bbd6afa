"""Other systems' names for our keys: Axolotl's, TRL's and spellings of values. Every mapping is in a literal dict."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gymjax.config.coerce import coerce, text
from gymjax.config.source import parse_flow

# Another name, the same value.
RENAMED: dict[str, str] = {
    "base_model": "model_name_or_path",
    "lora_model_dir": "adapter_name_or_path",
    "lora_r": "lora_rank",
    "use_liger_kernel": "enable_liger_kernel",
    "lora_target_modules": "lora_target",
    "lora_modules_to_save": "additional_target",
    "modules_to_save": "additional_target",
    "peft_use_rslora": "use_rslora",
    "peft_use_dora": "use_dora",
    "revision_of_model": "model_revision",
    "sequence_len": "cutoff_len",
    "max_seq_length": "cutoff_len",
    "sample_packing": "packing",
    "train_on_inputs": "train_on_prompt",
    "val_set_size": "val_size",
    "dataset_prepared_path": "tokenized_path",
    "default_system_message": "default_system",
    "micro_batch_size": "per_device_train_batch_size",
    "eval_batch_size": "per_device_eval_batch_size",
    "num_epochs": "num_train_epochs",
    "lr_scheduler": "lr_scheduler_type",
    "optimizer": "optim",
    "cosine_min_lr_ratio": "min_lr_ratio",
    "early_stopping_patience": "early_stopping_steps",
    "evaluation_strategy": "eval_strategy",
    "dp_shard_size": "fsdp_size",
    "dp_replicate_size": "dp_size",
}

# Another name whose value decides: name -> value -> what it means in our keys.
VALUED: dict[str, dict[str, dict[str, str]]] = {
    "adapter": {
        "lora": {"finetuning_type": "lora"},
        "qlora": {"finetuning_type": "lora", "quantization_bit": "4"},
    },
    "load_in_4bit": {"true": {"quantization_bit": "4"}, "false": {}},
    "loftq_bits": {"4": {}},
    "lora_target_linear": {"true": {"lora_target": "all"}, "false": {}},
    "neat_packing": {"true": {"packing": "true"}, "false": {}},
    "use_muon": {"true": {"optim": "muon"}, "false": {}},
    "use_unsloth_gc": {"true": {"gradient_checkpointing": "offload"}, "false": {}},
    "disable_gradient_checkpointing": {
        "true": {"gradient_checkpointing": "none"},
        "false": {"gradient_checkpointing": "full"},
    },
    "flash_attention": {"true": {"flash_attn": "auto"}, "false": {}},
    "sdp_attention": {"true": {"flash_attn": "auto"}, "false": {}},
    "xformers_attention": {"true": {"flash_attn": "auto"}, "false": {}},
    "attn_implementation": {
        "flash_attention_2": {"flash_attn": "auto"},
        "flash_attention_3": {"flash_attn": "auto"},
        "flex_attention": {"flash_attn": "auto"},
        "xformers": {"flash_attn": "auto"},
        "sdpa": {"flash_attn": "auto"},
        "eager": {"flash_attn": "disabled"},
    },
    "shuffle_merged_datasets": {"true": {"disable_shuffling": "false"}, "false": {"disable_shuffling": "true"}},
    "use_tensorboard": {"true": {"report_to": "tensorboard"}, "false": {}},
    "auto_resume_from_checkpoints": {"true": {}, "false": {"resume_from_checkpoint": "false"}},
    "chat_template": {"tokenizer_default": {}},
}

# Spellings of our own keys' values; None = the default.
SPELLINGS: dict[str, dict[str, str | None]] = {
    "optim": {
        "adamw_torch": "adamw",
        "adamw_torch_fused": "adamw",
        "adamw_hf": "adamw",
        "adamw_torch_xla": "adamw",
        "adamw_apex_fused": "adamw",
        "adamw_bnb_8bit": "adamw_8bit",
        "adamw_torch_8bit": "adamw_8bit",
        "ao_adamw_8bit": "adamw_8bit",
        "paged_adamw": "adamw",
        "paged_adamw_32bit": "adamw",
        "paged_adamw_8bit": "adamw_8bit",
        "paged_lion_32bit": "lion",
        "lion_32bit": "lion",
    },
    "flash_attn": {"sdpa": "auto", "fa2": "auto", "fa3": "auto"},
    "gradient_checkpointing": {"true": "full", "false": "none", "unsloth": "offload"},
    "save_strategy": {"false": "no"},
    "eval_strategy": {"false": "no"},
    "metric_for_best_model": {"loss": "eval_loss"},
    "bf16": {"auto": None},
    "fp16": {"auto": None},
    "lr_scheduler_type": {"cosine_warmup_with_min_lr": "cosine_with_min_lr"},
}

# Two names of one key that do not contradict each other -> the one that counts.
TOGETHER: dict[frozenset[str], str] = {
    frozenset(("lora_target_linear", "lora_target_modules")): "lora_target_linear",  # all linear layers beside those
}

_UNPAGED = "the same update; the state stays on the devices, which the plan counts"

# Printed once when the key, or the key with this value, is met.
REMARKS: dict[tuple[str, str], str] = {
    ("flash_attn", "sdpa"): "flash_attn: sdpa means auto here; the fastest kernel that accepts the shapes runs",
    ("flash_attn", "fa2"): "flash_attn: fa2 means auto here; the fastest kernel that accepts the shapes runs",
    ("flash_attn", "fa3"): "flash_attn: fa3 means auto here; the fastest kernel that accepts the shapes runs",
    **{
        (key, f"paged_{name}"): f"{key}: paged_{name} is {name.replace('_32bit', '')} here: {_UNPAGED}"
        for key in ("optim", "optimizer")
        for name in ("adamw", "adamw_32bit", "adamw_8bit", "lion_32bit")
    },
    ("neat_packing", "false"): "neat_packing: packed documents never see each other here, with it or without",
}


def _datasets(key: str, value: Any, target: str) -> dict[str, Any]:
    """Axolotl's `[{path: ..., type: ...}]`: what is read, written behind the path; columns tell the shape of rows."""
    rows = parse_flow(value) if isinstance(value, str) and value.lstrip().startswith("[") else value
    rows = rows if isinstance(rows, list) else [rows]
    return {target: [name for i, row in enumerate(rows) for name in _dataset_names(f"{key}[{i}]", row)]}


def _dataset_names(where: str, row: Any) -> list[str]:
    """One name, or one for each subset where `name` lists several."""
    if isinstance(row, str):
        return [row]
    if not isinstance(row, Mapping) or not row.get("path"):
        raise ValueError(f"{where} must be a path or a mapping with a path, is {row!r}")
    path = str(row["path"])
    options: list[list[str]] = [[]]
    for name, value in row.items():
        said = name == "ds_type" and Path(path).suffix.startswith(f".{value}")
        if value is None or name == "path" or said:
            continue
        if name in _DATASET_OPTIONS:
            choices = _dataset_option(where, name, value)
            options = [[*before, *choice] for before in options for choice in choices]
            continue
        allowed = _DATASET_KEYS.get(name, ())
        written = (
            ", ".join(f"{k}: {text(value[k])}" for k in sorted(value)) if isinstance(value, Mapping) else text(value)
        )
        if written not in allowed:
            raise ValueError(f"{where}.{name}: {written} is known, not supported yet; {_DATASET_REMEDY}")
    return [f"{path}?{'&'.join(chosen)}" if chosen else path for chosen in options]


def _dataset_option(where: str, name: str, value: Any) -> list[list[str]]:
    values = value if isinstance(value, list) else [value]
    several = name in ("name", "data_files")
    if not values or not all(isinstance(v, str) and v and "&" not in v for v in values) or len(values) > 1 > several:
        raise ValueError(f"{where}.{name} must be one text{' or a list of them' if several else ''}, is {value!r}")
    if values[0] in _DATASET_DEFAULTS.get(name, ()):
        return [[]]
    written = [f"{_DATASET_OPTIONS[name]}={v}" for v in values]
    return [[one] for one in written] if name == "name" else [written]


# What is read of a dataset: Axolotl's name -> the option behind "?" in our dataset key, see data/sources.py.
_DATASET_OPTIONS = {
    "name": "subset",
    "split": "split",
    "data_files": "data_files",
    "revision": "revision",
    "ds_type": "ds_type",
}
_DATASET_DEFAULTS = {"revision": ("main",)}

_DATASET_REMEDY = (
    "the shape of the rows is read from their columns (alpaca, sharegpt, messages, text); describe other columns in"
    " dataset_info.json"
)

# Other keys of one dataset: the values that need nothing done.
_DATASET_KEYS: dict[str, tuple[str, ...]] = {
    "type": ("chat_template", "chat_template.default", "alpaca", "sharegpt", "completion"),
    "roles_to_train": ("assistant",),
    "train_on_eos": ("turn",),
    "field_messages": ("messages", "conversations"),
    "message_property_mappings": ("content: content, role: role", "content: value, role: from"),
    "field": ("text",),
    "trust_remote_code": ("true", "false"),  # a repository's scripts are never run
}


def _scheduler_kwargs(key: str, value: Any) -> dict[str, Any]:
    """The Trainer's `{min_lr: 1e-6}` or `{min_lr_rate: 0.1}`."""
    names = {"min_lr": "min_lr", "min_lr_rate": "min_lr_ratio"}
    numbers = coerce(value, Mapping[str, float])
    unknown = sorted(set(numbers) - set(names))
    if unknown:
        raise ValueError(f"{key} takes min_lr or min_lr_rate, has {', '.join(unknown)}")
    return {names[name]: number for name, number in numbers.items()}


def _warmup_steps(key: str, value: Any) -> dict[str, Any]:
    """A share below 1 is the Trainer's newer spelling of warmup_ratio."""
    try:
        number = coerce(value, float)
    except ValueError:
        return {key: value}
    return {"warmup_ratio": number} if 0 < number < 1 else {key: value}


def _per_epoch(key: str, value: Any, strategy: str) -> dict[str, Any]:
    """Never, at each epoch's end, or so often an epoch."""
    often = coerce(value, float)
    if often < 0:
        raise ValueError(f"{key} must be at least 0, is {text(value)}")
    if often in (0, 1):
        return {strategy: "epoch" if often else "no"}
    return {strategy: "steps", key: often}


def _special_tokens(key: str, value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping) and set(value) <= {"pad_token"}:
        return {}
    raise ValueError(f"{key} is known, not supported yet (but pad_token); set special tokens in the tokenizer's files")


def _plugins(key: str, value: Any) -> dict[str, Any]:
    others = [name for name in coerce(value, tuple[str, ...]) if not any(known in name for known in _OWN_KERNELS)]
    if others:
        raise ValueError(f"{key}: {', '.join(others)} is known, not supported yet; remove it")
    return {}


def _init_lora_weights(key: str, value: Any) -> dict[str, Any]:
    """PEFT's `true`, `pissa`, `pissa_niter_N` and `loftq`."""
    written = text(value)
    if written.lower() == "true":
        return {}
    if written == "loftq":
        return {"loftq_init": True}
    if written == "pissa":
        return {"pissa_init": True, "pissa_iter": -1}
    if written.startswith("pissa_niter_"):
        return {"pissa_init": True, "pissa_iter": written.removeprefix("pissa_niter_")}
    raise ValueError(f"{key}: {written} is known, not supported yet; use true, pissa, pissa_niter_N or loftq")


def _loftq_config(key: str, value: Any) -> dict[str, Any]:
    """PEFT's `{loftq_bits: 4, loftq_iter: 1}`."""
    numbers = coerce(value, Mapping[str, int])
    unknown = sorted(set(numbers) - {"loftq_bits", "loftq_iter"})
    if unknown:
        raise ValueError(f"{key} takes loftq_bits and loftq_iter, has {', '.join(unknown)}")
    if numbers.get("loftq_bits", 4) != 4:
        raise ValueError(f"{key}.loftq_bits must be 4, is {numbers['loftq_bits']}; the base is packed into NF4")
    return {name: number for name, number in numbers.items() if name == "loftq_iter"}


def _peft(key: str, value: Any) -> dict[str, Any]:
    """Axolotl's `{loftq_config: {loftq_bits: 4}}`, which asks for LoftQ."""
    if isinstance(value, Mapping) and set(value) == {"loftq_config"}:
        return {"loftq_init": True} | _loftq_config(f"{key}.loftq_config", value["loftq_config"])
    raise ValueError(f"{key} takes loftq_config, is {value!r}")


_OWN_KERNELS = ("liger", "cut_cross_entropy")

# Names whose value has to be taken apart; each returns values for our keys or raises ValueError.
STRUCTURED: dict[str, Callable[[str, Any], dict[str, Any]]] = {
    "datasets": lambda key, value: _datasets(key, value, "dataset"),
    "test_datasets": lambda key, value: _datasets(key, value, "eval_dataset"),
    "lr_scheduler_kwargs": _scheduler_kwargs,
    "warmup_steps": _warmup_steps,
    "evals_per_epoch": lambda key, value: _per_epoch(key, value, "eval_strategy"),
    "saves_per_epoch": lambda key, value: _per_epoch(key, value, "save_strategy"),
    "special_tokens": _special_tokens,
    "init_lora_weights": _init_lora_weights,
    "peft_init_lora_weights": _init_lora_weights,
    "loftq_config": _loftq_config,
    "peft": _peft,
    "plugins": _plugins,
}
