"""The only place where an implementation is picked."""

import contextlib
import contextvars
import itertools
from collections.abc import Generator, Mapping
from typing import get_args

from pallas_kernels import Implementation

NAMES: tuple[str, ...] = get_args(Implementation)
"""What `implementation=` accepts; which of them exist differs by operation."""

Refusals = Mapping[Implementation, str | None]
"""Implementation -> why it refuses the arguments, or None where it accepts; fastest first."""

_PLAIN: contextvars.ContextVar[frozenset[str]] = contextvars.ContextVar("ops left to XLA", default=frozenset())


@contextlib.contextmanager
def left_to_xla(*ops: str) -> Generator[None]:
    """While a program is traced in this scope, `implementation=None` means "xla" for these operations.

    For measuring what kernels gain in a whole program. What jax.jit traced before stays as it is: trace anew.

    Args:
        ops: operations' names.
    """
    token = _PLAIN.set(_PLAIN.get() | frozenset(ops))
    try:
        yield
    finally:
        _PLAIN.reset(token)


def choose(op: str, wanted: Implementation | None, refusals: Refusals) -> Implementation:
    """Name the implementation that runs.

    Args:
        op: the operation's name, for messages.
        wanted: the caller's choice, or None for the first that accepts.
        refusals: the implementations that exist for `op`, fastest first, each with its reason to refuse or None.

    Returns:
        `wanted` itself, or the first name in `refusals` that accepts.

    Raises:
        ValueError: `wanted` is no implementation's name.
        NotImplementedError: `wanted` refuses these arguments or does not exist for `op`, or nothing accepts.
    """
    if wanted is None and op in _PLAIN.get():
        wanted = "xla"
    usable = [name for name, reason in refusals.items() if reason is None]
    remedy = f"usable here: {', '.join(map(repr, usable))}" if usable else "no implementation accepts these arguments"
    if wanted is None:
        if usable:
            return usable[0]
        raise NotImplementedError(f"{op}: {remedy}: {_reasons(refusals)}")
    if wanted not in NAMES:
        raise ValueError(f"{op}: implementation={wanted!r} is unknown; name one of {', '.join(NAMES)}, or pass None")
    if wanted not in refusals:
        raise NotImplementedError(f"{op}: there is no {wanted!r} implementation of this operation; {remedy}")
    if refusals[wanted] is not None:
        raise NotImplementedError(f"{op}: {wanted!r} refuses: {refusals[wanted]}; {remedy}")
    return wanted


def explain(op: str, refusals: Refusals) -> str:
    """Say in one line which implementation `None` picks and why the faster ones refuse."""
    if op in _PLAIN.get():
        return f"{op}: xla (left to XLA)"
    faster = dict(itertools.takewhile(lambda item: item[1] is not None, refusals.items()))
    chosen = next((name for name in refusals if name not in faster), "nothing")
    return f"{op}: {chosen}" + (f" ({_reasons(faster)})" if faster else "")


def _reasons(refusals: Refusals) -> str:
    return "; ".join(f"{name} refuses: {reason}" for name, reason in refusals.items() if reason is not None)
