"""Reading an adapter's adapter_config.json: every setting is done here, known to change nothing, or refused."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gymjax.checkpoint.adapter_base import CONFIG
from gymjax.checkpoint.hf import read_json
from gymjax.models.hf_values import is_number, is_whole

# Settings of PEFT's LoraConfig that say how an adapter was made, or what its tensors show; any other must be unset.
_WITHOUT_EFFECT = {
    "peft_type",
    "task_type",
    "auto_mapping",
    "peft_version",
    "revision",
    "inference_mode",
    "exclude_modules",
    "init_lora_weights",
    "layers_to_transform",
    "layers_pattern",
    "megatron_config",
    "megatron_core",
    "loftq_config",
    "eva_config",
    "corda_config",
    "lora_ga_config",
    "qalora_group_size",
    "runtime_config",
}
# How PEFT started the factors, where loading needs nothing done about it.
_STARTS = (True, False, None, "gaussian", "eva", "orthogonal", "pissa")


def _names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _pattern(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    def check(value: Any) -> bool:
        return isinstance(value, dict) and all(_is_regex(key) and holds(number) for key, number in value.items())

    return check


def _is_regex(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return False
    return True


_NEEDED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "r": ("a whole number of at least 1", is_whole),
    "lora_alpha": ("a number", is_number),
}
_OPTIONAL: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "base_model_name_or_path": ("a text", lambda value: isinstance(value, str)),
    "lora_dropout": ("at least 0 and below 1", lambda value: is_number(value) and 0 <= value < 1),
    "use_rslora": ("true or false", lambda value: isinstance(value, bool)),
    "use_dora": ("true or false", lambda value: isinstance(value, bool)),
    "ensure_weight_tying": ("true or false", lambda value: isinstance(value, bool)),
    "target_modules": ("a text or a list of names", lambda value: isinstance(value, str) or _names(value)),
    "target_parameters": ("a list of names", _names),
    "modules_to_save": ("a list of names", _names),
    "rank_pattern": ("regular expressions with whole numbers of at least 1", _pattern(is_whole)),
    "alpha_pattern": ("regular expressions with numbers", _pattern(is_number)),
}
"""What null stands for is PEFT's default."""


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """An adapter folder's adapter_config.json, checked to describe an adapter that is done here.

    Raises:
        FileNotFoundError: no such folder, or no adapter in it.
        ValueError: another kind of adapter than LoRA, a variant of LoRA that is not done, a setting that is not known,
            or a value that is none.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; adapter_name_or_path must be a PEFT adapter folder")
    config = read_json(path)
    if config.get("peft_type") != "LORA":
        raise ValueError(f"{path}: peft_type {config.get('peft_type')} is not supported; supported: LORA")
    wrong = [
        f"{key} must be {wanted}, is {config.get(key)!r}"
        for key, (wanted, holds) in (_NEEDED | _OPTIONAL).items()
        if not holds(config.get(key)) and (key in _NEEDED or config.get(key) is not None)
    ]
    if wrong:
        raise ValueError(f"{path}: {'; '.join(wrong)}; save the adapter again with PEFT")
    start = config.get("init_lora_weights")
    if start not in _STARTS:
        raise ValueError(
            f"{path}: init_lora_weights: {start} changed the base in a way that this file does not repeat; save the "
            "adapter with PEFT's path_initial_model_for_weight_conversion, or save the changed base too and name it as "
            "base_model_name_or_path, with init_lora_weights: true"
        )
    unknown = [f"{key}: {value}" for key, value in config.items() if not _is_known(key, value)]
    if unknown:
        raise ValueError(
            f"{path}: not supported: {', '.join(unknown)}; LoRA, rsLoRA and DoRA are. Remove a setting that this "
            "adapter computes the same without"
        )
    return config


def _is_known(key: str, value: Any) -> bool:
    """Whether a setting is read, has no effect, or is at the value that asks for nothing."""
    return key in _NEEDED or key in _OPTIONAL or key in _WITHOUT_EFFECT or not value or (key, value) == ("bias", "none")
