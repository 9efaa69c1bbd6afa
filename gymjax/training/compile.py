"""Compiling the step ahead of time, one program per batch shape, and saying what that took."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from gymjax.training.metrics import GIB, device_memory_gib


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled step.

    Attributes:
        call: the program.
        seconds: of tracing and compiling.
        peak_gib: arguments, outputs and temporaries at once by the compiler's own analysis; None where it gives none.
    """

    call: Callable
    seconds: float
    peak_gib: float | None


def compile_program(jitted: Any, *arguments: Any) -> Program:
    """Lowers and compiles a jitted function for arguments of these shapes and shardings."""
    started = time.perf_counter()
    compiled = jitted.lower(*arguments).compile()
    return Program(compiled, time.perf_counter() - started, program_peak_gib(compiled))


def program_peak_gib(compiled: Any) -> float | None:
    """Device memory of a compiled program per device, in GiB: arguments + outputs - donated + temporaries."""
    analysis = compiled.memory_analysis()
    if analysis is None:
        return None
    size = analysis.argument_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return (size + analysis.temp_size_in_bytes) / GIB


def describe_program(program: Program, shape: tuple[int, ...]) -> str:
    """One line for the user: shape, compile time, memory needed against memory there is."""
    text = f"compiled the step for {' x '.join(map(str, shape))} tokens in {program.seconds:.1f} s"
    if program.peak_gib is None:
        return text
    there_is = device_memory_gib()
    text += f"; it needs {program.peak_gib:.2f} GiB per device"
    return text if there_is is None else f"{text} of {there_is:.1f}"


def use_compile_cache(folder: str | None) -> None:
    """Keeps compiled programs on disk between runs: in `folder`, or on GPUs in ~/.cache/gymjax/compiled by default."""
    if folder is None and jax.default_backend() == "gpu":
        folder = str(Path.home() / ".cache" / "gymjax" / "compiled")
    if folder is not None:
        jax.config.update("jax_compilation_cache_dir", folder)
