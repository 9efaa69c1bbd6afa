"""SIGTERM and Ctrl-C as a request that the loop honours between two steps."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Generator


@contextlib.contextmanager
def stop_requests() -> Generator[threading.Event]:
    """An event that SIGTERM or the first Ctrl-C sets; a second Ctrl-C interrupts at once.

    Outside the main thread, where Python takes no signal handlers, the event just never fires.
    """
    requested = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield requested
        return

    def handle(number: int, _frame) -> None:
        if requested.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        requested.set()

    old = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield requested
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
