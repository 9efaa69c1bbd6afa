"""From keys as written to typed values of our own keys."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, get_args, get_type_hints

from gymjax.config import known
from gymjax.config.aliases import REMARKS, RENAMED, SPELLINGS, STRUCTURED, TOGETHER, VALUED
from gymjax.config.coerce import coerce, text
from gymjax.config.sections import SECTIONS
from gymjax.config.source import Entry

# Keys that are no fields: load() turns min_lr into min_lr_ratio, once learning_rate is known, and Axolotl's others into
# shares of the run, once num_train_epochs is.
TYPES: dict[str, Any] = {f.name: get_type_hints(kind)[f.name] for kind in SECTIONS.values() for f in fields(kind)} | {
    "min_lr": float,
    "evals_per_epoch": float,
    "saves_per_epoch": float,
}


@dataclass(frozen=True)
class Given:
    """A typed value, with the name it was written under and where."""

    value: Any
    written: str
    where: str


@dataclass
class Translation:
    """What some entries mean: typed values (None = back to the default), remarks, and problems one line each."""

    values: dict[str, Given] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def translate(entries: Iterable[Entry]) -> Translation:
    """Map every entry to our keys; nothing is raised, so that all problems are shown together."""
    result = Translation()
    for entry in entries:
        try:
            _translate_one(entry, result)
        except ValueError as error:
            result.problems.append(located(entry.where, str(error)))
    return result


def located(where: str, message: str) -> str:
    """Put a place in front of a message."""
    return f"{where}: {message}" if where else message


def names() -> set[str]:
    """Return every key that is accepted or known."""
    return set(TYPES) | set(RENAMED) | set(VALUED) | set(STRUCTURED) | set(known.ACCEPTED) | set(known.UNSUPPORTED)


def _translate_one(entry: Entry, result: Translation) -> None:
    key, value = entry.key, entry.value
    remark = REMARKS.get((key, text(value).lower()))
    if remark:
        result.notes.append(remark)
    if key in STRUCTURED and value is not None:
        for native, part in STRUCTURED[key](key, value).items():
            _add(native, part, entry, result)
    elif key in TYPES or key in RENAMED:
        _add(RENAMED.get(key, key), value, entry, result)
    elif key in VALUED:
        for native, part in _valued(key, value).items():
            _add(native, part, entry, result)
    elif key not in STRUCTURED:
        _without_field(key, value, result)


def _add(native: str, value: Any, entry: Entry, result: Translation) -> None:
    try:
        typed = _typed(native, value)
    except ValueError as error:
        raise ValueError(f"{entry.key} {error}") from None
    before = result.values.get(native)
    counts = None if before is None else TOGETHER.get(frozenset((before.written, entry.key)))
    if counts is not None:
        if entry.key == counts:
            result.values[native] = Given(typed, entry.key, entry.where)
        return
    if before is not None and before.value != typed and None not in (before.value, typed):
        what = f"{before.written} and {entry.key} both set {native}, to {text(before.value)} and {text(typed)}"
        raise ValueError(f"{what}; keep one")
    if before is None or before.value is None:
        result.values[native] = Given(typed, entry.key, entry.where)


def _typed(native: str, value: Any) -> Any:
    kind = TYPES[native]
    if isinstance(value, list) and len(value) == 1 and native == "report_to":
        value = value[0]
    written = text(value).lower()
    if written in known.UNSUPPORTED_VALUES.get(native, {}):
        remedy = known.UNSUPPORTED_VALUES[native][written]
        raise ValueError(f"is {written}: known, not supported yet; {remedy}")
    value = SPELLINGS.get(native, {}).get(written, value)
    unset = value is None or (value == "None" and "none" not in get_args(kind))
    typed = None if unset else coerce(value, kind)
    return None if typed in ((), {}) else typed


def _valued(key: str, value: Any) -> dict[str, str]:
    if value is None:
        return {}
    choices = VALUED[key]
    written = text(value).lower()
    written = {"yes": "true", "on": "true", "no": "false", "off": "false"}.get(written, written)
    if written in choices:
        return choices[written]
    if key == "chat_template":
        return {"template": text(value)}
    instead = sorted({native for meaning in choices.values() for native in meaning})
    raise ValueError(f"{key} must be one of {', '.join(choices)}, is {text(value)!r}; or set {', '.join(instead)}")


def _without_field(key: str, value: Any, result: Translation) -> None:
    note = known.ACCEPTED.get(key) or _by_prefix(key, known.ACCEPTED_PREFIXES)
    remedy = known.UNSUPPORTED.get(key) or _by_prefix(key, known.UNSUPPORTED_PREFIXES)
    if note:
        if value is not None:
            result.notes.append(f"{key}: {note}")
    elif remedy:
        if not _asks_for_nothing(key, value):
            shown = "" if isinstance(value, Mapping) else f": {text(value)}"
            raise ValueError(f"{key}{shown} is known, not supported yet; {remedy}")
    else:
        raise ValueError(f"unknown key {key}{_did_you_mean(key)}")


def _by_prefix(key: str, table: Mapping[str, str]) -> str | None:
    return next((meaning for prefix, meaning in table.items() if key.startswith(prefix)), None)


def _asks_for_nothing(key: str, value: Any) -> bool:
    empty = value is None or (isinstance(value, list | Mapping) and not value)
    return empty or text(value).lower() in ("", "false", "no", "off", "none", *known.HARMLESS.get(key, ()))


def _did_you_mean(key: str) -> str:
    close = difflib.get_close_matches(key, sorted(names()), n=1)
    return f"; did you mean {close[0]}?" if close else "; gymjax/config/sections.py lists all keys"
