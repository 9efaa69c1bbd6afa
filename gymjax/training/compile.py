"""Compiling the step ahead of time, one program per batch shape, and saying what that took."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import jax
import optax
from flax import nnx

from gymjax.training.kernels_ahead import kernels_ahead
from gymjax.training.metrics import GIB, device_memory_gib
from gymjax.training.step import StepSettings, TrainState, make_step


def compiler_options(settings: StepSettings) -> dict[str, Any]:
    """XLA's options for a step.

    What is computed again is left to the plan, which refuses what does not fit before anything is compiled. XLA
    computes again too where temporaries need more than 95 % of what the arguments leave of 0.8 of the GPU's memory,
    however much of it the allocator may use: with 130 of 140 GiB allowed and 117 needed, it gathered the rows of
    experts three times. The factor takes the place of the 95.

    Products are cuBLAS' from the beginning, not after Triton's have been tried: only then XLA lets them read a layer's
    weights where they are stacked, and write into the stacks of `scan_in_place`. In other scans it would run a product
    twice for that. Nor are products of one input merged, such as queries, keys and values: that takes a copy that joins
    their weights, and others of what is sliced from the result. Without fused operations, and where all is kept by the
    scan of `jax.grad`, XLA's choices stay its own.
    """
    options: dict[str, Any] = {"xla_gpu_memory_limit_slop_factor": 1000}
    if settings.fused_ops and settings.remat != "none":
        options |= {"xla_gpu_enable_triton_gemm": False, "xla_gpu_dot_merger_threshold_mb": 0}
    return options


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled step.

    Attributes:
        call: the program.
        seconds: of tracing and compiling.
        cached: whether it came from the persistent cache; None where none is used.
        peak_gib: arguments, outputs and temporaries at once by the compiler's own analysis; None where it gives none.
        traced: of the seconds, those that went to tracing and lowering, in Python.
    """

    call: Callable
    seconds: float
    cached: bool | None
    peak_gib: float | None
    traced: float = 0.0


def jit_step(
    graphdef: nnx.GraphDef, optimizer: optax.GradientTransformation, settings: StepSettings, state: TrainState
) -> Any:
    """The jitted step; its state is donated, and comes back where it was.

    Args:
        graphdef: model structure.
        optimizer: of the trained weights.
        settings: of the step.
        state: arrays, or shapes with shardings.
    """
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    step = make_step(graphdef, optimizer, settings)
    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, None), compiler_options=compiler_options(settings))


def compile_program(jitted: Any, *arguments: Any) -> Program:
    """Lowers and compiles a jitted function for arguments of these shapes and shardings."""
    started = time.perf_counter()
    with _cache_events() as events:
        lowered = jitted.lower(*arguments)
        traced = time.perf_counter() - started
        with kernels_ahead(lowered, _one_device(arguments), _cache_folder()):
            compiled = lowered.compile()
    seconds = time.perf_counter() - started
    return Program(compiled, seconds, _HIT in events if events else None, program_peak_gib(compiled), traced)


def _one_device(arguments: Any) -> jax.Device | None:
    """Any device that the arguments lie, or will lie, on, of this process where there is one; None for plain shapes."""
    for leaf in jax.tree.leaves(arguments):
        if (sharding := getattr(leaf, "sharding", None)) is not None:
            return min(sharding.addressable_devices or sharding.device_set, key=lambda device: device.id)
    return None


def _cache_folder() -> str | None:
    return jax.config.jax_compilation_cache_dir if jax.config.jax_enable_compilation_cache else None


_HIT, _MISS = "/jax/compilation_cache/cache_hits", "/jax/compilation_cache/cache_misses"


@contextlib.contextmanager
def _cache_events() -> Generator[list[str]]:
    """The names of hits and misses of JAX's persistent cache, as they come in this thread."""
    events: list[str] = []
    ours = threading.get_ident()

    def listen(event: str, **_: Any) -> None:
        if event in (_HIT, _MISS) and threading.get_ident() == ours:
            events.append(event)

    jax.monitoring.register_event_listener(listen)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_listener(listen)


def program_peak_gib(compiled: Any) -> float | None:
    """Device memory of a compiled program per device, in GiB: arguments + outputs - donated + temporaries."""
    analysis = compiled.memory_analysis()
    if analysis is None:
        return None
    size = analysis.argument_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return (size + analysis.temp_size_in_bytes) / GIB


def describe_program(program: Program, shape: tuple[int, ...]) -> str:
    """One line for the user: shape, compile time, whether it was cached, memory needed against memory there is."""
    text = f"compiled the step for {' x '.join(map(str, shape))} tokens in {program.seconds:.1f} s"
    if program.cached is not None:
        text += " (found in the cache)" if program.cached else " (not in the cache so far)"
    if program.peak_gib is None:
        return text
    there_is = device_memory_gib()
    text += f"; it needs {program.peak_gib:.2f} GiB per device"
    return text if there_is is None else f"{text} of {there_is:.1f}"


def use_compile_cache(folder: str | None) -> None:
    """Keeps compiled programs on disk between runs.

    Args:
        folder: where; "none" for nowhere; None for JAX_COMPILATION_CACHE_DIR, or on GPUs, where compiling is slow, for
            ~/.cache/gymjax/compiled.
    """
    if folder is None and jax.default_backend() == "gpu":
        folder = jax.config.jax_compilation_cache_dir or str(Path.home() / ".cache" / "gymjax" / "compiled")
    if folder is not None:
        jax.config.update("jax_compilation_cache_dir", None if folder == "none" else folder)
