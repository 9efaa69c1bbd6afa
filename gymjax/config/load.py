"""From a file and overrides to a checked Config."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from gymjax.config.checks import problems
from gymjax.config.sections import SECTIONS, Config, flat
from gymjax.config.source import ConfigError, Entry, read_file, read_overrides
from gymjax.config.translate import Given, Translation, located, translate

# Keys that become another one, once what they refer to is known: key -> (that one, what both do).
_MEANT = {
    "min_lr": ("min_lr_ratio", "set the lowest learning rate"),
    "saves_per_epoch": ("save_steps", "say how often"),
    "evals_per_epoch": ("eval_steps", "say how often"),
}


def load(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file and apply overrides, later ones winning.

    Args:
        path: a flat YAML file in LLaMA-Factory's or Axolotl's keys, or None for overrides alone.
        overrides: `key=value`, `--key=value` or `--key value`; an empty value or null restores the default.

    Raises:
        ConfigError: with one line for each problem: place, key, what must hold, what to do.
    """
    return _build(read_file(path) if path is not None else [], read_overrides(overrides))


def from_dict(values: Mapping[str, Any]) -> Config:
    """Build a Config from the same keys as Python values, for notebooks.

    Raises:
        ConfigError: as load().
    """
    return _build([Entry(key, value) for key, value in values.items()], [])


def change(config: Config, **values: Any) -> Config:
    """Return a checked copy with other values; keys that load() fills from others are filled again.

    Raises:
        ConfigError: as load().
    """
    before = flat(config)
    base = [Entry(key, before[key]) for key in before if key in config.explicit]
    result = _build(base, [Entry(key, value) for key, value in values.items()])
    return replace(result, notes=tuple(dict.fromkeys(config.notes + result.notes)))


def _build(base: Sequence[Entry], overrides: Sequence[Entry]) -> Config:
    layers = [translate(base), *(translate([entry]) for entry in overrides)]
    _axolotl_default(base, layers[0])
    given = {key: value for layer in layers for key, value in layer.values.items()}
    given = {key: value for key, value in given.items() if value.value is not None}
    wrong = [problem for layer in layers for problem in layer.problems]
    where = {key: value.where for key, value in given.items()}
    for key, (native, what) in _MEANT.items():
        if key in given and native in given:
            wrong.append(_placed((key, native), f"{key} and {native} both {what}; keep one", where))
    _raise(wrong)
    notes = [note for layer in layers for note in layer.notes]
    config = _resolve({key: value.value for key, value in given.items()}, tuple(dict.fromkeys(notes)))
    _raise([_placed(keys, message, where) for keys, message in problems(config)])
    return config


def _raise(wrong: Sequence[str]) -> None:
    if wrong:
        raise ConfigError("\n".join(wrong))


def _placed(keys: Sequence[str], message: str, where: Mapping[str, str]) -> str:
    places = dict.fromkeys(where[key] for key in keys if where.get(key))
    return located(", ".join(places), message)


def _axolotl_default(entries: Sequence[Entry], translation: Translation) -> None:
    """An Axolotl file without `adapter` trains all weights, where LLaMA-Factory's default is lora."""
    base = next((entry for entry in entries if entry.key == "base_model"), None)
    if base is not None and "finetuning_type" not in translation.values:
        translation.values["finetuning_type"] = Given("full", "base_model without adapter", base.where)
        translation.notes.append("base_model without adapter: finetuning_type full, as Axolotl reads it")


def _resolve(values: dict[str, Any], notes: tuple[str, ...]) -> Config:
    """Fill the keys whose default depends on others."""
    explicit = frozenset(_MEANT[key][0] if key in _MEANT else key for key in values)
    defaults = Config()
    values.setdefault("lora_alpha", 2 * values.get("lora_rank", defaults.adapter.lora_rank))
    values.setdefault("packing", values.get("stage") == "pt")
    values.setdefault("data_seed", values.get("seed", defaults.train.seed))
    if "min_lr" in values:
        floor = values.pop("min_lr") / values.get("learning_rate", defaults.optim.learning_rate)
        values["min_lr_ratio"] = floor
    for often in ("saves_per_epoch", "evals_per_epoch"):
        if often in values:
            epochs = values.get("num_train_epochs", defaults.train.num_train_epochs)
            values[_MEANT[often][0]] = 1 / max(values.pop(often) * epochs, 1 + 1e-9)  # below 1: a share, not a step
    _resolve_evaluation(values, defaults)
    sections = {
        section: kind(**{f.name: values[f.name] for f in fields(kind) if f.name in values})
        for section, kind in SECTIONS.items()
    }
    return Config(**sections, explicit=explicit, notes=notes)


def _resolve_evaluation(values: dict[str, Any], defaults: Config) -> None:
    has_data = bool(values.get("eval_dataset")) or values.get("val_size", 0) > 0
    saving = values.get("save_strategy", defaults.train.save_strategy)
    often = "steps" if "eval_steps" in values or saving == "steps" else "epoch"
    values.setdefault("eval_strategy", often if has_data else "no")
    values.setdefault("eval_steps", values.get("save_steps", defaults.train.save_steps))
    values.setdefault("do_eval", has_data)
