"""The numbers that each key accepts."""

import re
from collections.abc import Callable, Iterator
from typing import Any

from gymjax.config.coerce import text
from gymjax.config.sections import Config, flat

_AT_LEAST_1 = ("at least 1", lambda v: v >= 1)
_AT_LEAST_0 = ("at least 0", lambda v: v >= 0)
_STEPS = ("a whole number of steps, or a share of the run below 1", lambda v: 0 < v < 1 or (v >= 1 and v == int(v)))
_SEED = ("at least 0 and below 2^63", lambda v: 0 <= v < 2**63)
_ABOVE_0 = ("above 0", lambda v: v > 0)
_SHARE = ("at least 0 and below 1", lambda v: 0 <= v < 1)
_SHARE_WITH_1 = ("above 0 and at most 1", lambda v: 0 < v <= 1)
_MINUS_1_OR_ABOVE = ("-1 or at least 1", lambda v: v == -1 or v >= 1)

RANGES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "quantization_bit": ("4, or not given", lambda v: v == 4),
    "cutoff_len": ("at least 2 tokens", lambda v: v >= 2),
    "max_samples": _AT_LEAST_1,
    "val_size": _AT_LEAST_0,
    "lora_rank": _AT_LEAST_1,
    "lora_alpha": _AT_LEAST_1,
    "lora_dropout": _SHARE,
    "pissa_iter": ("-1 (exact) or at least 1", lambda v: v == -1 or v >= 1),
    "loftq_iter": _AT_LEAST_1,
    "loraplus_lr_ratio": _ABOVE_0,
    "learning_rate": _SHARE_WITH_1,
    "adam_beta1": _SHARE,
    "adam_beta2": _SHARE,
    "adam_epsilon": _ABOVE_0,
    "weight_decay": _SHARE,
    "max_grad_norm": _AT_LEAST_0,
    "min_lr_ratio": _SHARE,
    "warmup_ratio": _SHARE,
    "warmup_steps": _AT_LEAST_0,
    "num_train_epochs": _ABOVE_0,
    "max_steps": ("-1 (num_train_epochs decides) or at least 1", lambda v: v == -1 or v >= 1),
    "per_device_train_batch_size": _AT_LEAST_1,
    "per_device_eval_batch_size": _AT_LEAST_1,
    "gradient_accumulation_steps": _AT_LEAST_1,
    "logging_steps": _STEPS,
    "save_steps": _STEPS,
    "save_total_limit": _AT_LEAST_1,
    "eval_steps": _STEPS,
    "early_stopping_steps": _AT_LEAST_1,
    "seed": _SEED,
    "data_seed": _SEED,
    "neftune_noise_alpha": _AT_LEAST_0,
    "moe_aux_loss_coef": _AT_LEAST_0,
    "router_z_loss_coef": _AT_LEAST_0,
    "loss_scale": _AT_LEAST_1,
    "dp_size": _MINUS_1_OR_ABOVE,
    "fsdp_size": _MINUS_1_OR_ABOVE,
    "profile_steps": ("first-last with first at least 1, such as 3-5", lambda v: _is_range(v)),
    "temperature": ("at least 0 (0 = greedy)", lambda v: v >= 0),
    "top_p": _SHARE_WITH_1,
    "top_k": ("at least 0 (0 = no limit)", lambda v: v >= 0),
    "min_p": ("at least 0 and at most 1", lambda v: 0 <= v <= 1),
    "repetition_penalty": _ABOVE_0,
    "max_new_tokens": _AT_LEAST_1,
    "export_size": _ABOVE_0,
}
# For every number in these mappings.
ITEM_RANGES = {"lora_rank_pattern": _AT_LEAST_1, "lora_alpha_pattern": _AT_LEAST_1}


def out_of_range(config: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield (keys, message) for each number outside its range."""
    values = flat(config)
    for key, (rule, holds) in RANGES.items():
        if values[key] is not None and not holds(values[key]):
            yield (key,), f"{key} must be {rule}, is {text(values[key])}"
    for key, (rule, holds) in ITEM_RANGES.items():
        for name, value in values[key].items():
            if not holds(value):
                yield (key,), f"{key} must be {rule} for {name}, is {value}"


def _is_range(steps: str) -> bool:
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", steps)
    return match is not None and 1 <= int(match[1]) <= int(match[2] or match[1])
