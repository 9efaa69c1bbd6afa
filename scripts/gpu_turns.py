"""Turns at one GPU for processes that start and compile side by side."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path


class Turns:
    """Two locks in a folder: one shared by all that compile, from here to their first turn, and one that a turn takes.

    Args:
        folder: that all processes know.
        patience: seconds to wait for others that compile, which disturb short timings; then they are not waited for.
        longest: seconds of a turn, after which its process ends: a kernel that hangs must not keep the GPU.
    """

    def __init__(self, folder: Path, patience: float = 60, longest: float = 40):
        self._folder, self._patience, self._longest = folder, patience, longest
        self._compiling = (folder / "compiling").open("a")
        fcntl.flock(self._compiling, fcntl.LOCK_SH)

    @contextlib.contextmanager
    def alone(self, who: str) -> Generator[None]:
        """While the GPU is this process's alone, after all others have compiled; `who` names it if it hangs."""
        fcntl.flock(self._compiling, fcntl.LOCK_UN)
        end = time.monotonic() + self._patience
        while not _taken(self._compiling) and time.monotonic() < end:
            time.sleep(0.2)
        fcntl.flock(self._compiling, fcntl.LOCK_UN)
        with (self._folder / "timing").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            watch = threading.Timer(self._longest, self._give_up, (who,))
            watch.daemon = True
            watch.start()
            try:
                yield
            finally:
                watch.cancel()

    def _give_up(self, who: str) -> None:
        print(f"{who}: a turn of more than {self._longest:.0f} s; its process ends", file=sys.stderr, flush=True)
        os._exit(1)


def _taken(file) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
