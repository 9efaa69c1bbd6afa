"""Reading configuration text: YAML with line numbers, and command-line overrides.

Scalars stay text until the field they are for is known: `1e-4` then is a number, `no` a text or a boolean as needed.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

_NULLS = {"", "~", "null", "Null", "NULL"}
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


class ConfigError(ValueError):
    """A configuration that cannot run; its message has one line for each problem."""


@dataclass(frozen=True)
class Entry:
    """One key as somebody wrote it; `where` is "file:line", "command line" or empty."""

    key: str
    value: Any
    where: str = ""


def read_file(path: str | Path) -> list[Entry]:
    """Read a flat YAML file.

    Raises:
        ConfigError: the file is missing, is no YAML, is no mapping at its top, or gives a key twice.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"{path}: no such configuration file; give the path of a YAML file")
    try:
        node = yaml.compose(path.read_text(encoding="utf-8-sig"), Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{path}{line}: not valid YAML: {error.problem}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML text: {error}") from None
    if node is None:
        return []
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{path}:{node.start_mark.line + 1}: the file must hold `key: value` lines")
    return list(_entries(node, str(path)))


def read_overrides(arguments: Sequence[str]) -> list[Entry]:
    """Read `key=value`, `--key=value`, `--key value` and a bare `--flag` (true).

    Raises:
        ConfigError: an argument has none of these forms.
    """
    entries = []
    position = 0
    while position < len(arguments):
        argument = arguments[position]
        position += 1
        name, equals, value = argument.lstrip("-").partition("=")
        if not _KEY.fullmatch(name) or not (equals or argument.startswith("--")):
            raise ConfigError(f"command line: {argument!r} is no override; write key=value")
        if not equals:
            following = arguments[position] if position < len(arguments) else "--"
            if following.startswith("--") or _looks_like_override(following):
                value = "true"
            else:
                value, position = following, position + 1
        entries.append(Entry(name.replace("-", "_"), None if value in _NULLS else value, "command line"))
    return entries


def parse_flow(text: str) -> Any:
    """Parse `[a, b]` or `{a: 1}`; scalars stay text.

    Raises:
        ValueError: not valid YAML.
    """
    try:
        return _plain(yaml.compose(text, Loader=yaml.SafeLoader), "", {})
    except yaml.YAMLError as error:
        raise ValueError(f"{text!r} is not valid YAML: {getattr(error, 'problem', error)}") from None


def _looks_like_override(argument: str) -> bool:
    name, equals, _ = argument.partition("=")
    return bool(equals) and _KEY.fullmatch(name) is not None


def _entries(node: yaml.MappingNode, path: str) -> Iterator[Entry]:
    seen: dict[str, int] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(f"{path}:{line}: a key must be a plain name")
        key = key_node.value
        if key in seen:
            raise ConfigError(f"{path}:{line}: {key} is given twice, first in line {seen[key]}; keep one")
        seen[key] = line
        yield Entry(key, _plain(value_node, path, {}), f"{path}:{line}")


def _plain(node: yaml.Node | None, path: str, done: dict[int, Any]) -> Any:
    """Turn a node into dicts, lists and texts; `done` keeps anchors shared and a self-reference finite (null)."""
    if isinstance(node, yaml.ScalarNode):
        return None if node.style is None and node.value in _NULLS else node.value
    if node is None or id(node) in done:
        return done.get(id(node))
    done[id(node)] = None
    if isinstance(node, yaml.SequenceNode):
        done[id(node)] = [_plain(child, path, done) for child in node.value]
    else:
        done[id(node)] = {entry.key: entry.value for entry in _nested(node, path, done)}
    return done[id(node)]


def _nested(node: yaml.Node, path: str, done: dict[int, Any]) -> Iterator[Entry]:
    seen: set[str] = set()
    for key_node, value_node in node.value:
        where = f"{path}:{key_node.start_mark.line + 1}"
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(f"{where}: a key must be a plain name")
        if key_node.value in seen:
            raise ConfigError(f"{where}: {key_node.value} is given twice; keep one")
        seen.add(key_node.value)
        yield Entry(key_node.value, _plain(value_node, path, done), where)
