"""A configuration as text: to store, and to print."""

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import yaml

from gymjax.config.checks import inapplicable
from gymjax.config.coerce import text
from gymjax.config.sections import SECTIONS, Config, flat

_PLAIN = re.compile(r"[A-Za-z0-9_./~@+%][A-Za-z0-9_./~@+%-]*")
_FILLED = {"data_seed", "do_eval", "eval_steps"}
_READ_AS_UNSET = {"~", "null", "Null", "NULL"}


def to_yaml(config: Config) -> str:
    """Write all keys with their resolved values as YAML that load() reads back to an equal Config.

    Keys that mean nothing here (lora_* with finetuning_type: full) are left out, as giving them is an error.
    """
    lines = []
    hidden = inapplicable(config)
    for section, kind in SECTIONS.items():
        lines.append(f"### {section}")
        values = getattr(config, section)
        lines += [f"{f.name}: {_written(getattr(values, f.name))}" for f in fields(kind) if f.name not in hidden]
    return "\n".join(lines) + "\n"


def differences(config: Config) -> dict[str, tuple[Any, Any]]:
    """Return key -> (value, default) for all keys whose value is not the default and was not filled from others."""
    defaults = flat(Config())
    hidden = inapplicable(config) | (_FILLED - config.explicit)
    return {
        key: (value, defaults[key])
        for key, value in flat(config).items()
        if value != defaults[key] and key not in hidden
    }


def texts(config: Config) -> dict[str, str]:
    """All keys' values as a configuration file would have them, to be kept and compared."""
    return {key: text(value) for key, value in flat(config).items()}


def describe(config: Config) -> str:
    """Write what a person wants to see before a run: the values that are not defaults, and the notes."""
    changed = differences(config)
    width = max((len(key) for key in changed), default=0)
    lines = [f"{key:<{width}}  {text(value)}{_default(default)}" for key, (value, default) in changed.items()]
    return "\n".join([*lines, *(f"note: {note}" for note in config.notes)])


def _default(default: Any) -> str:
    return f"  (default {text(default)})" if default not in (None, (), {}, "") else ""


def _written(value: Any) -> str:
    if value is None or (isinstance(value, tuple | Mapping) and not value):
        return "null"
    if isinstance(value, str):
        return value if _PLAIN.fullmatch(value) and value not in _READ_AS_UNSET else _quoted(value)
    if isinstance(value, tuple):
        return "[" + ", ".join(_written(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_written(name)}: {item}" for name, item in value.items()) + "}"
    return text(value)


def _quoted(value: str) -> str:
    """Write a double-quoted YAML scalar on one line."""
    return yaml.safe_dump(value, default_style='"', allow_unicode=True, width=float("inf")).strip()
