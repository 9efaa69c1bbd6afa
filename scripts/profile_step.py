"""Where a training step's time goes: the device's kernels, added up by the part of the model that they belong to.

Usage: python scripts/profile_step.py [--shape llama3.1-8b] [--base nf4] [--remat full] [--batch 4x2048]
           [--attention mosaic_gpu] [--unfused] [--steps 3] [--top 60]

Prints a table: milliseconds a step, times run a step, the kernel, the operation's name in the model. The step is that
of bench_train.py. What is not a kernel (gaps between kernels) is the difference of the first line's two numbers.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

# Kernels that run as one command buffer carry its name instead of their own.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_enable_command_buffer="

import jax
from bench_train import compile_step
from jax.profiler import ProfileEvent
from step_shapes import add_options, setting_of

from pallas_kernels._profile import traced_kernels


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
    found: dict[str, str] = {}
    computation, called = "", {}
    for line in text.splitlines():
        if header := re.match(r"(?:ENTRY )?%([\w.\-]+) \(.*\{$", line):
            computation = header[1]
        if operation := re.match(r'\s+(?:ROOT )?%([\w.\-]+) = .*?op_name="([^"]*)"', line):
            source = re.sub(r"jit\(\w+\)/|while/body/|closed_call/", "", operation[2])
            found[operation[1]] = called[computation] = source
        elif fusion := re.match(r"\s+(?:ROOT )?%([\w.\-]+) = .*? calls=%([\w.\-]+)", line):
            found[fusion[1]] = called.get(fusion[2], "")  # a fusion without a name has its last operation's
    return found


def kernels(events: list[ProfileEvent], names: dict[str, str], steps: int) -> list[Kernel]:
    """Kernels of a run, the longest first; those of one name and place in the model are added up.

    They are the same in every layer, and where layers follow each other in the program each is an operation of its own.
    """
    total: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event in events:
        operation = next((str(value) for key, value in event.stats if key == "hlo_op"), "")
        place = f"{without_number(operation)} {names.get(operation, '')}"
        total[without_number(event.name), place].append(event.duration_ns / 1e6)
    found = [Kernel(sum(times) / steps, len(times) / steps, name, place) for (name, place), times in total.items()]
    return sorted(found, reverse=True)


def without_number(name: str) -> str:
    """The name that XLA made different by numbers: loop_add_fusion of loop_add_fusion.31, or of loop_add_fusion_31."""
    return re.sub(r"(?:[._]\d+)+$", "", name)


def profiled(step: Callable[[], Any], compiled: Any, steps: int) -> tuple[list[Kernel], float]:
    """Kernels of a step of the compiled program, and its seconds, after two steps to warm up."""
    for _ in range(2):
        jax.block_until_ready(step())
    seconds: list[float] = []

    def run() -> None:
        started = time.perf_counter()
        jax.block_until_ready([step() for _ in range(steps)][-1])
        seconds.append(time.perf_counter() - started)

    return kernels(traced_kernels(run), sources(compiled.as_text()), steps), seconds[0] / steps


def main() -> None:
    """Runs a few steps under the profiler and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    parser.add_argument("--remat", default="full")
    parser.add_argument("--batch", default="4x2048", help="rows x tokens")
    parser.add_argument("--unfused", action="store_true", help="with enable_liger_kernel: false")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--top", type=int, default=60)
    options = parser.parse_args()
    setting = setting_of(options, options.batch, options.remat, fused=not options.unfused)
    program, _, state, frozen, batch = compile_step(setting)
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
