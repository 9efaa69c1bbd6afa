"""Strict conversion of a written value to a field's type."""

import re
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from gymjax.config.source import parse_flow

_INT = re.compile(r"[+-]?\d[\d_]*")
_FLOAT = re.compile(r"[+-]?(\d[\d_]*\.?\d*|\.\d+)([eE][+-]?\d+)?")
_BOOLS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def text(value: Any) -> str:
    """Write a value as a configuration file would."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "null"
    if isinstance(value, list | tuple):
        return ",".join(text(v) for v in value)
    return str(value)


def coerce(value: Any, kind: Any) -> Any:
    """Convert a text, a parsed YAML value or a Python value to the annotation `kind`.

    Args:
        value: text from a file or the command line, or an object.
        kind: int, float, bool, str, Literal[...], tuple[X, ...], Mapping[str, X], or a union of them with None.

    Raises:
        ValueError: the value is not one of that type; the message says what must hold and what was given.
    """
    if get_origin(kind) in (Union, UnionType):
        return _coerce_union(value, kind)
    if get_origin(kind) is Literal:
        return _coerce_choice(value, kind)
    if get_origin(kind) is tuple:
        return tuple(coerce(item, get_args(kind)[0]) for item in _items(value))
    if get_origin(kind) in (dict, Mapping):
        return _coerce_mapping(value, get_args(kind)[1])
    return _SCALARS[kind](value)


def describe_type(kind: Any) -> str:
    """Name an annotation in words for messages."""
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(text(choice) for choice in get_args(kind))
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(describe_type(k) for k in get_args(kind) if k is not NoneType)
    return {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}[kind]


def _fail(value: Any, kind: Any) -> ValueError:
    return ValueError(f"must be {describe_type(kind)}, is {text(value)!r}")


def _coerce_union(value: Any, kind: Any) -> Any:
    if value is None and NoneType in get_args(kind):
        return None
    reasons = []
    for member in get_args(kind):
        try:
            if member is not NoneType:
                return coerce(value, member)
        except ValueError as error:
            reasons.append(error)
    raise reasons[0] if len(reasons) == 1 else _fail(value, kind)


def _coerce_choice(value: Any, kind: Any) -> Any:
    written = text(value)
    for choice in get_args(kind):
        if written.lower() == text(choice).lower():
            return choice
    raise _fail(value, kind)


def _items(value: Any) -> list[Any]:
    if isinstance(value, str):
        if value.lstrip().startswith("["):
            return _items(parse_flow(value))
        return [part.strip() for part in value.split(",") if part.strip()]
    if isinstance(value, list | tuple):
        return list(value)
    if isinstance(value, Mapping):
        raise ValueError(f"must be a comma list, is the mapping {dict(value)!r}")
    return [value]


def _coerce_mapping(value: Any, item_kind: Any) -> dict[str, Any]:
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = parse_flow(value)
    if not isinstance(value, Mapping):
        raise ValueError(f"must be a mapping such as {{q_proj: 16}}, is {text(value)!r}")
    result = {}
    for name, item in value.items():
        try:
            result[str(name)] = coerce(item, item_kind)
        except ValueError as error:
            raise ValueError(f"entry {name}: {error}") from None
    return result


def _bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in _BOOLS:
        return _BOOLS[value.lower()]
    raise _fail(value, bool)


def _int(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and _INT.fullmatch(value.strip()):
        return int(value)
    raise _fail(value, int)


def _float(value: Any) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf"):
        return float(value)
    if isinstance(value, str) and _FLOAT.fullmatch(value.strip()) and abs(float(value)) < float("inf"):
        return float(value)
    raise _fail(value, float)


def _str(value: Any) -> str:
    if isinstance(value, list | tuple | Mapping):
        raise ValueError(f"must be one text, is {value!r}")
    return text(value)


_SCALARS = {bool: _bool, int: _int, float: _float, str: _str}
