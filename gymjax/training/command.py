"""What every entry shares: its arguments, its help, and errors that fit on one line."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any, NoReturn

from gymjax.config.sections import SECTIONS
from gymjax.config.source import ConfigError, read_overrides

HELP = ("-h", "--help")
_OURS = ("gymjax", "pallas_kernels", "__main__")
_BAD_USE, _INTERRUPTED = 2, 130


def split_arguments(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """(configuration file or None, overrides): the file comes first, `key=value` after it."""
    if arguments and not arguments[0].startswith("-") and "=" not in arguments[0]:
        return arguments[0], list(arguments[1:])
    return None, list(arguments)


def take(arguments: Sequence[str], names: Collection[str]) -> tuple[dict[str, str], list[str]]:
    """Separates an entry's own keys from those of the configuration.

    Args:
        arguments: overrides, without the configuration file.
        names: the entry's own keys.

    Returns:
        ({own key: text}, the other overrides).

    Raises:
        ConfigError: an argument is no override, or an own key has no value.
    """
    own: dict[str, str] = {}
    others = []
    for entry in read_overrides(arguments):
        if entry.key not in names:
            others.append(f"{entry.key}={'' if entry.value is None else entry.value}")
        elif entry.value is None:
            raise ConfigError(f"command line: {entry.key} is empty; write {entry.key}=value")
        else:
            own[entry.key] = entry.value
    return own, others


def flag(own: Mapping[str, str], name: str, *, default: bool = False) -> bool:
    """A true/false key of an entry.

    Raises:
        ConfigError: it is neither.
    """
    text = own.get(name, str(default)).lower()
    if text not in ("true", "false"):
        raise ConfigError(f"command line: {name} must be true or false, is {own[name]}")
    return text == "true"


def keys_text(sections: Sequence[str], own: dict[str, str] | None = None) -> str:
    """The keys that an entry reads, one a line: its own with their meaning, the configuration's with their default."""
    lines = [f"  {name:<28} {meaning}" for name, meaning in (own or {}).items()]
    defaults = {section: SECTIONS[section]() for section in sections}
    for section, values in defaults.items():
        lines.append(f" {section}:")
        lines += [f"  {f.name:<28} {_default(getattr(values, f.name))}" for f in fields(values)]
    return "\n".join(lines)


def _default(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "-"
    return "-" if value in (None, "", {}) else str(value)


def run_process(main: Callable[[Sequence[str]], int | None], usage: Callable[[], str]) -> NoReturn:
    """Runs an entry with this process' arguments, and ends the process with `run`'s status, or with 130 after Ctrl-C.

    Then at once: XLA's threads may still be computing, and would abort a process that takes itself apart.
    """
    try:
        sys.exit(run(main, usage, sys.argv[1:]))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_INTERRUPTED)


def run(main: Callable[[Sequence[str]], int | None], usage: Callable[[], str], arguments: Sequence[str]) -> int:
    """Runs an entry as a command.

    Mistakes in what the user gave (ValueError and the like that this project raises, files that cannot be read or
    written) print one line; every other error keeps its traceback.

    Args:
        main: the entry; returns an exit status, None for success.
        usage: text for --help.
        arguments: of the command line.

    Returns:
        Exit status: main's; 2 after a mistake.
    """
    if any(argument in HELP for argument in arguments):
        print(usage().strip())
        return 0
    try:
        return main(arguments) or 0
    except (ValueError, NotImplementedError, FloatingPointError, OSError) as error:
        if not is_expected(error):
            raise
        print(f"error: {error}", file=sys.stderr)
        return _BAD_USE


def is_expected(error: Exception) -> bool:
    """Whether an error was raised by this project's own lines, or is about a file."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    package = frame.f_globals.get("__name__", "").partition(".")[0]
    return isinstance(error, OSError) or package in _OURS
