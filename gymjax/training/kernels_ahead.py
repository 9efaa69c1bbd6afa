"""Compiles a program's Mosaic kernels in threads while XLA begins with the program, so that it finds them made.

XLA compiles one Mosaic kernel after another where it meets it in the program, and each shuts out the compiling of
XLA's own kernels, as LLVM's options differ: 10 of 12 seconds of an 8B step. jaxlib keeps compiled kernels by their hash
for the whole process and locks that store only to look, so that a program of nothing but one kernel fills it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

TARGET = "mosaic_gpu_v2"  # the custom call of jax 0.11; where it has another name, nothing is found, nothing is done
# What looking into a program may raise under another version of JAX, which promises nothing of its representation.
UNKNOWN = (AttributeError, ImportError, KeyError, OSError, RuntimeError, TypeError, ValueError)


def distinct_kernels(lowered: jax.stages.Lowered) -> list[dict[str, Any]]:
    """Attributes of each distinct Mosaic kernel of a program, longest first, as they take longest to compile."""
    from jaxlib.mlir import ir  # here, as jax promises nothing of it

    found: dict[Any, dict[str, Any]] = {}

    def look(operation: Any) -> ir.WalkResult:
        attributes = operation.attributes
        if operation.name == "stablehlo.custom_call" and attributes["call_target_name"].value == TARGET:
            config = attributes["mhlo.backend_config" if "mhlo.backend_config" in attributes else "backend_config"]
            found[config["kernel_hash"].value_bytes] = {item.name: _value(item.attr) for item in config}
        return ir.WalkResult.ADVANCE

    module: Any = lowered.compiler_ir("stablehlo")
    module.operation.walk(look)
    return sorted(found.values(), key=lambda kernel: len(kernel["module"]), reverse=True)


def _value(attribute: Any) -> bytes | bool:
    return attribute.value_bytes if hasattr(attribute, "value_bytes") else attribute.value


def lower_kernel(kernel: dict[str, Any], device: jax.Device) -> jax.stages.Lowered:
    """A program of one kernel, which is never to be run: neither its arguments nor its results matter."""
    call = jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct((), jnp.float32))

    def mosaic_kernel() -> jax.Array:
        return call(**kernel)

    program = jax.jit(mosaic_kernel, out_shardings=SingleDeviceSharding(device))
    return program.trace().lower(lowering_platforms=("cuda",))


def compile_kernel(kernel: dict[str, Any], device: jax.Device) -> None:
    """Has the kernel compiled into the process' store."""
    lower_kernel(kernel, device).compile()


@contextlib.contextmanager
def kernels_ahead(
    lowered: jax.stages.Lowered, device: jax.Device | None, folder: str | None = None
) -> Generator[list[Future]]:
    """While it is open, the program's kernels are compiled in threads; closing drops those that have not begun.

    It changes no result and raises nothing: whatever is wrong with a kernel, or with finding it, is left for XLA to
    meet when it compiles the program. A program that went through here before with the same cache will be found there,
    kernels and all, so that nothing is started.

    Args:
        lowered: the program.
        device: one that it is compiled for; None for no threads.
        folder: of the persistent cache, which gets a file of no bytes for each program; None where none is used.

    Yields:
        One future a kernel, none where nothing is to be done.
    """
    kernels, mark = [], None
    if device is not None:
        with contextlib.suppress(*UNKNOWN):
            kernels = distinct_kernels(lowered)
            mark = Path(folder) / f"kernels-{_digest(lowered, device)}" if folder and kernels else None
            kernels = [] if mark is not None and mark.exists() else kernels
    if not kernels:
        yield []
        return
    pool = ThreadPoolExecutor(min(len(kernels), os.cpu_count() or 1), thread_name_prefix="kernel")
    try:
        yield [pool.submit(compile_kernel, kernel, device) for kernel in kernels]
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    if mark is not None:
        with contextlib.suppress(OSError):  # a folder that nobody may write to, or that is no local one
            mark.touch()


def _digest(lowered: jax.stages.Lowered, device: jax.Device) -> str:
    """Of what decides, in the main, whether JAX finds a program in its cache."""
    about = [lowered.as_text(), jax.__version__, device.device_kind, os.environ.get("XLA_FLAGS", "")]
    return hashlib.sha256("\n".join(about).encode()).hexdigest()
