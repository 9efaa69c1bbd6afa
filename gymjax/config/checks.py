"""Rules that tie keys together; every message names the keys, the values and what to do."""

import re
from collections.abc import Iterator
from dataclasses import fields

from gymjax.config.ranges import out_of_range
from gymjax.config.remat import is_list
from gymjax.config.sections import KEPT_NAMES, REMAT, AdapterConfig, Config

Problem = tuple[tuple[str, ...], str]

FREEZE_KEYS = tuple(f.name for f in fields(AdapterConfig) if f.name.startswith("freeze_"))
LORA_KEYS = tuple(f.name for f in fields(AdapterConfig) if f.name not in ("finetuning_type", *FREEZE_KEYS))


def problems(config: Config) -> Iterator[Problem]:
    """Yield (keys, message) for every rule that the configuration breaks."""
    if not config.model.model_name_or_path:
        yield ("model_name_or_path",), "model_name_or_path must be given: a folder, a .gguf file or a hub id"
    yield from out_of_range(config)
    for rule in (
        _adapter,
        _patterns,
        _start,
        _data,
        _mixing,
        _schedule,
        _precision,
        _evaluation,
        _best_model,
        _mesh,
        _remat,
    ):
        yield from rule(config)


def inapplicable(config: Config) -> set[str]:
    """Return the keys that mean nothing with this finetuning_type, start and precision; giving one is an error."""
    kind = config.adapter.finetuning_type
    keys = set() if kind == "lora" else set(LORA_KEYS)
    keys |= set() if kind == "freeze" else set(FREEZE_KEYS)
    keys |= set() if config.adapter.pissa_init else {"pissa_iter", "pissa_convert"}
    keys |= set() if config.adapter.loftq_init else {"loftq_iter"}
    return keys if config.train.fp16 else keys | {"loss_scale"}


def _adapter(config: Config) -> Iterator[Problem]:
    kind = config.adapter.finetuning_type
    for group, remedy in ((LORA_KEYS, "lora"), (FREEZE_KEYS, "freeze")):
        given = [key for key in group if key in config.explicit and kind != remedy]
        if given:
            message = f"{', '.join(given)} would do nothing with finetuning_type: {kind}"
            yield (*given, "finetuning_type"), f"{message}; remove it, or set finetuning_type: {remedy}"
    if config.model.quantization_bit and kind != "lora":
        message = f"quantization_bit: {config.model.quantization_bit} cannot be trained with finetuning_type: {kind}"
        keys = ("quantization_bit", "finetuning_type")
        yield keys, f"{message}; a 4-bit base stays frozen: use finetuning_type: lora, or drop quantization_bit"
    if config.model.adapter_name_or_path and kind != "lora":
        keys = ("adapter_name_or_path", "finetuning_type")
        yield keys, f"adapter_name_or_path needs finetuning_type: lora, is {kind}; merge the adapter first"
    if "," in (config.model.adapter_name_or_path or ""):
        yield ("adapter_name_or_path",), "adapter_name_or_path must be one folder; merge the earlier adapters first"
    if "all" in config.adapter.lora_target and len(config.adapter.lora_target) > 1:
        yield ("lora_target",), f"lora_target must be all or names, is {', '.join(config.adapter.lora_target)}"
    if kind == "freeze" and config.adapter.freeze_trainable_layers == 0:
        message = "freeze_trainable_layers: 0 with finetuning_type: freeze trains no layer"
        yield ("freeze_trainable_layers", "finetuning_type"), f"{message}; give n (the last n) or -n (the first n)"


def _patterns(config: Config) -> Iterator[Problem]:
    """Names of modules in patterns are regular expressions, as PEFT's."""
    for key in ("lora_rank_pattern", "lora_alpha_pattern"):
        for name in getattr(config.adapter, key):
            try:
                re.compile(name)
            except re.error as error:
                message = f"{key}: {name!r} is no regular expression ({error})"
                yield (key,), f"{message}; give a module's name (q_proj), or .* for what may stand before it"


def _start(config: Config) -> Iterator[Problem]:
    """Where A and B come from."""
    adapter, bits = config.adapter, config.model.quantization_bit
    if adapter.finetuning_type != "lora":
        return
    for owner, keys in (("pissa_init", ("pissa_iter", "pissa_convert")), ("loftq_init", ("loftq_iter",))):
        # False asks for nothing: files of other systems spell it out.
        given = [key for key in keys if key in config.explicit and getattr(adapter, key) is not False]
        if given and not getattr(adapter, owner):
            yield (*given, owner), f"{', '.join(given)} would do nothing without {owner}: true; remove it, or set that"
    if adapter.pissa_init and adapter.loftq_init:
        message = "pissa_init: true and loftq_init: true exclude each other"
        yield ("pissa_init", "loftq_init"), f"{message}: A and B have one start; keep one"
    if adapter.loftq_init and not bits:
        message = "loftq_init: true has no loss to start from with quantization_bit: null"
        yield ("loftq_init",), f"{message}; set quantization_bit: 4, or use pissa_init"
    if adapter.loftq_init and "lm_head" in adapter.lora_target:
        message = f"loftq_init: true cannot start lora_target: {', '.join(adapter.lora_target)}"
        yield ("loftq_init", "lora_target"), f"{message}; lm_head is never quantized: take it out"
    if adapter.pissa_init and adapter.pissa_convert and bits:
        message = f"pissa_convert: true with quantization_bit: {bits} would not be exact"
        remedy = (
            "the quantized rest is no part of the original weights; leave pissa_convert out: residual_base is saved"
        )
        yield ("pissa_convert", "quantization_bit"), f"{message}: {remedy}"


def _data(config: Config) -> Iterator[Problem]:
    data = config.data
    if data.train_on_prompt and data.mask_history:
        message = "train_on_prompt: true and mask_history: true exclude each other"
        yield ("train_on_prompt", "mask_history"), f"{message}: one trains the earlier turns, one masks them; keep one"
    if data.val_size > 0 and data.eval_dataset:
        message = f"val_size: {data.val_size:g} and eval_dataset: {', '.join(data.eval_dataset)} exclude each other"
        yield ("val_size", "eval_dataset"), f"{message}; keep one"
    if data.val_size > 1 and data.val_size != int(data.val_size):
        yield ("val_size",), f"val_size must be a share below 1 or a whole number of rows, is {data.val_size:g}"


def _mixing(config: Config) -> Iterator[Problem]:
    data = config.data
    if not data.interleave_probs:
        return
    probs = ", ".join(f"{p:g}" for p in data.interleave_probs)
    if data.mix_strategy == "concat":
        message = f"interleave_probs: {probs} would do nothing with mix_strategy: concat"
        yield ("interleave_probs", "mix_strategy"), f"{message}; use interleave_under or interleave_over"
    if len(data.interleave_probs) != len(data.dataset):
        message = f"interleave_probs has {len(data.interleave_probs)} numbers for {len(data.dataset)} names in dataset"
        yield ("interleave_probs", "dataset"), f"{message}; give one for each"
    # Probabilities are typed by hand, as in 0.33,0.33,0.34: six digits are enough to see a mistake.
    if abs(sum(data.interleave_probs) - 1) > 1e-6 or min(data.interleave_probs) < 0:
        yield ("interleave_probs",), f"interleave_probs must be at least 0 and sum to 1, is {probs}"


def _schedule(config: Config) -> Iterator[Problem]:
    optim = config.optim
    kind = optim.lr_scheduler_type
    if optim.warmup_ratio > 0 and optim.warmup_steps > 0:
        message = f"warmup_ratio: {optim.warmup_ratio:g} and warmup_steps: {optim.warmup_steps} exclude each other"
        yield ("warmup_ratio", "warmup_steps"), f"{message}; keep one"
    warmup = "warmup_ratio" if optim.warmup_ratio > 0 else "warmup_steps"
    if kind == "constant" and (optim.warmup_ratio > 0 or optim.warmup_steps > 0):
        message = f"{warmup} would do nothing with lr_scheduler_type: constant"
        yield (warmup, "lr_scheduler_type"), f"{message}; use constant_with_warmup"
    if kind == "cosine_with_min_lr" and optim.min_lr_ratio == 0:
        message = "lr_scheduler_type: cosine_with_min_lr needs min_lr_ratio above 0"
        yield ("lr_scheduler_type",), f"{message} (or lr_scheduler_kwargs: {{min_lr: ...}}); or use cosine"
    if optim.min_lr_ratio > 0 and not kind.startswith("cosine"):
        message = f"min_lr_ratio: {optim.min_lr_ratio:g} would do nothing with lr_scheduler_type: {kind}"
        yield ("min_lr_ratio", "lr_scheduler_type"), f"{message}; use cosine_with_min_lr"


def _precision(config: Config) -> Iterator[Problem]:
    if config.train.bf16 and config.train.fp16:
        yield ("bf16", "fp16"), "bf16: true and fp16: true exclude each other; keep one"
    if "loss_scale" in config.explicit and not config.train.fp16:
        yield ("loss_scale",), "loss_scale would do nothing without fp16: true; remove it, or set fp16: true"


def _evaluation(config: Config) -> Iterator[Problem]:
    train, data = config.train, config.data
    has_data = data.val_size > 0 or bool(data.eval_dataset)
    remedy = "set val_size (say 0.1) or eval_dataset"
    if train.eval_strategy != "no" and not has_data:
        yield ("eval_strategy",), f"eval_strategy: {train.eval_strategy} has nothing to evaluate on; {remedy}"
    if train.do_eval and not has_data:
        yield ("do_eval",), f"do_eval: true has nothing to evaluate on; {remedy}"
    if train.do_eval is False and has_data and train.eval_strategy != "no":
        message = f"do_eval: false and eval_strategy: {train.eval_strategy} contradict each other"
        yield ("do_eval", "eval_strategy"), f"{message}; keep one"
    if train.early_stopping_steps is not None and train.eval_strategy == "no":
        message = f"early_stopping_steps: {train.early_stopping_steps} needs evaluations, eval_strategy is no"
        yield ("early_stopping_steps", "eval_strategy"), f"{message}; {remedy} and eval_strategy: steps"


def _best_model(config: Config) -> Iterator[Problem]:
    train = config.train
    if not train.load_best_model_at_end:
        return
    if train.save_only_model:
        message = "load_best_model_at_end: true reads train states back, and save_only_model: true writes none"
        yield ("load_best_model_at_end", "save_only_model"), f"{message}; leave one of them out"
    if train.eval_strategy == "no":
        message = "load_best_model_at_end: true needs evaluations, eval_strategy is no"
        yield ("load_best_model_at_end", "eval_strategy"), f"{message}; set val_size or eval_dataset"
    elif train.save_strategy != train.eval_strategy:
        message = "load_best_model_at_end: true needs save_strategy and eval_strategy to be the same"
        keys = ("load_best_model_at_end", "save_strategy", "eval_strategy")
        yield keys, f"{message}, they are {train.save_strategy} and {train.eval_strategy}"
    elif train.save_strategy == "steps" and not _saved_where_evaluated(train.save_steps, train.eval_steps):
        message = "load_best_model_at_end: true needs save_steps to be a multiple of eval_steps, or the same share"
        keys = ("load_best_model_at_end", "save_steps", "eval_steps")
        yield keys, f"{message}, they are {train.save_steps} and {train.eval_steps}"


def _saved_where_evaluated(saved: float, evaluated: float | None) -> bool:
    """Of shares of the run, which become whole steps, only where they are the same."""
    if not evaluated or saved == evaluated:
        return True
    return min(saved, evaluated) >= 1 and saved % evaluated == 0


def _mesh(config: Config) -> Iterator[Problem]:
    if config.train.dp_size == -1 and config.train.fsdp_size == -1:
        yield ("dp_size", "fsdp_size"), "dp_size: -1 and fsdp_size: -1 cannot both take the rest; give one a number"


def _remat(config: Config) -> Iterator[Problem]:
    wanted = config.train.gradient_checkpointing
    if wanted not in REMAT and not is_list(",".join(word.strip() for word in wanted.split(",")), KEPT_NAMES):
        known = f"{', '.join(REMAT)}, or names of {', '.join(KEPT_NAMES)} joined by commas"
        yield ("gradient_checkpointing",), f"gradient_checkpointing must be one of {known}; is {wanted!r}"
