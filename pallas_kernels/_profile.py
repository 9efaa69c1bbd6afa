"""Kernels of programs by the device's own clock."""

import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData, ProfileEvent

KERNELS_APART = {"xla_gpu_graph_min_graph_size": 1_000_000}
"""Compiler's options of a program whose kernels are told apart: those of a command buffer carry its name."""

SETTLED = 1.0
"""Seconds of calls after which a GPU's clock depends on them alone: by up to 5 % on what ran before."""

_CALLS, _AGAIN = 20, 0.3  # timed; seconds of calls before them in the trace, as its start is a pause
_CACHE = 2**28  # bytes of several calls' arguments, of which no GPU's cache holds a call's until its turn comes again
_COPIES = 16  # of a call's arguments, at most


def traced_kernels(call: Callable[[], Any]) -> list[ProfileEvent]:
    """Call a function, and return the kernels and copies that ran on the GPU meanwhile.

    Args:
        call: returns after its programs have ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            call()
        profile = ProfileData.from_file(str(next(Path(folder).rglob("*.xplane.pb"))))
    on_device = (plane for plane in profile.planes if plane.name.startswith("/device:GPU"))
    streams = (line for plane in on_device for line in plane.lines if line.name.startswith("Stream"))
    return [event for line in streams for event in line.events]


def kernel_seconds(compiled: Callable[..., Any], *args: Any) -> float:
    """Median durations of a call's kernels, added up: its time in a queue that the host keeps full, of a settled GPU.

    Calls take turns at copies of small arguments, which so come from memory, as the weights of a layer after others do.

    Args:
        compiled: a program for the GPU, compiled with KERNELS_APART.
        args: its arguments.

    Raises:
        RuntimeError: the profiler saw no kernel.
    """
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(args) if isinstance(leaf, jax.Array))
    turns = [args, *(_copied(args) for _ in range(1, min(_COPIES, -(-_CACHE // max(size, 1)))))]

    def calls(number: int) -> None:
        for i in range(number - 1):
            compiled(*turns[i % len(turns)])  # its result is dropped, so that the next one has its memory, as in a loop
        jax.block_until_ready(compiled(*turns[-1]))

    calls(3)
    start, settling = time.perf_counter(), 0
    while time.perf_counter() < start + SETTLED:
        calls(_CALLS)
        settling += _CALLS
    untimed = int(settling * _AGAIN / SETTLED)
    kernels = traced_kernels(lambda: calls(untimed + _CALLS))
    timed = sorted(kernels, key=lambda kernel: kernel.start_ns)[len(kernels) * untimed // (untimed + _CALLS) :]
    return added_medians(((kernel.name, kernel.duration_ns) for kernel in timed), _CALLS) / 1e9


def _copied(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, jax.Array) else leaf, tree)


def added_medians(kernels: Iterable[tuple[str, float]], calls: int) -> float:
    """Durations of a call's kernels added up, where each takes the median of its name, in the unit that they have.

    Args:
        kernels: names and durations of so many calls.
        calls: see there.

    Raises:
        RuntimeError: there is no kernel.
    """
    durations = defaultdict(list)
    for name, duration in kernels:
        durations[name].append(duration)
    if not durations:
        raise RuntimeError("the profiler saw no kernel on the GPU: is another profiler running, or CUPTI missing?")
    return sum(statistics.median(times) * len(times) for times in durations.values()) / calls
