"""Where a training step's time goes: the device's kernels, added up by the part of the model that they belong to.

Usage: python scripts/profile_step.py [--shape llama3.1-8b] [--base nf4] [--remat full] [--batch 4x2048]
           [--attention mosaic_gpu] [--steps 3] [--top 60]

Prints a table: milliseconds a step, times run a step, the kernel, the operation's name in the model. The step is that
of bench_train.py. What is not a kernel (gaps between kernels) is the difference of the first line's two numbers.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

# Kernels that run as one command buffer carry its name instead of their own.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_enable_command_buffer="

import jax
from bench_train import compile_step
from jax.profiler import ProfileData
from step_shapes import add_options, setting_of


class Kernel(NamedTuple):
    """A kernel's share of a step."""

    milliseconds: float
    runs: float
    name: str
    source: str

    def line(self) -> str:
        """Of the printed table."""
        return f"{self.milliseconds:8.2f} {self.runs:6.0f}  {self.name[:60]:<60} {self.source[-110:]}"


def sources(text: str) -> dict[str, str]:
    """HLO operation -> its name in the model, without the transformations' names that all share."""
    found = re.findall(r'%([\w.\-]+) = .*?op_name="([^"]*)"', text)
    return {name: re.sub(r"jit\(\w+\)/|while/body/|closed_call/", "", source) for name, source in found}


def kernels(profile: ProfileData, names: dict[str, str], steps: int) -> list[Kernel]:
    """Kernels of every device stream, grouped by kernel and HLO operation, the longest first."""
    total: dict[tuple[str, str], list[float]] = defaultdict(list)
    for plane in profile.planes:
        for line in plane.lines:
            if not (plane.name.startswith("/device:GPU") and line.name.startswith("Stream")):
                continue
            for event in line.events:
                operation = next((str(value) for key, value in event.stats if key == "hlo_op"), "")
                total[event.name, operation].append(event.duration_ns / 1e6)
    found = [
        Kernel(sum(times) / steps, len(times) / steps, name, f"{operation} {names.get(operation, '')}")
        for (name, operation), times in total.items()
    ]
    return sorted(found, reverse=True)


def profiled(step: Callable[[], Any], compiled: Any, steps: int) -> tuple[list[Kernel], float]:
    """Kernels of a step of the compiled program, and its seconds, after two steps to warm up."""
    for _ in range(2):
        jax.block_until_ready(step())
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        with jax.profiler.trace(folder):
            jax.block_until_ready([step() for _ in range(steps)][-1])
            seconds = time.perf_counter() - started
        profile = ProfileData.from_file(str(next(Path(folder).rglob("*.xplane.pb"))))
    return kernels(profile, sources(compiled.as_text()), steps), seconds / steps


def main() -> None:
    """Runs a few steps under the profiler and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    parser.add_argument("--remat", default="full")
    parser.add_argument("--batch", default="4x2048", help="rows x tokens")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--top", type=int, default=60)
    options = parser.parse_args()
    program, _, state, frozen, batch = compile_step(setting_of(options, options.batch, options.remat))
    arguments = [state]

    def step() -> Any:
        arguments[0], metrics = program.call(arguments[0], frozen, batch)
        return metrics

    found, seconds = profiled(step, program.call, options.steps)
    busy = sum(kernel.milliseconds for kernel in found)
    print(f"{1e3 * seconds:.1f} ms a step, {busy:.1f} ms of kernels")
    for kernel in found[: options.top]:
        print(kernel.line())


if __name__ == "__main__":
    sys.exit(main())
