"""Times attention's forward and backward with each way to cap scores, on a GPU: what the cap costs.

Usage: python scripts/try_softcap.py
"""

from __future__ import annotations

import functools
import itertools
import sys
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels.bench import median_seconds
from pallas_kernels.flash_attention import mosaic_gpu, mosaic_gpu_tanh, mosaic_gpu_tiles

SHAPES = {"B4-S4096-N32-K8-D128": (4, 4096, 32, 8, 128), "B4-S4096-N32-K8-D64": (4, 4096, 32, 8, 64)}
VARIANTS = {"no cap": None, "cap 30": 30.0, "cap 30, rational": 30.0, "cap 30, hardware": 30.0, "cap 3": 3.0}


@contextmanager
def way(variant: str) -> Generator[None]:
    """Traces a variant: what is not the kernels' own is put in their place."""

    def always(*_):
        return arith.constant(ir.IntegerType.get_signless(1), 1)

    def hardware(product, scale: float, *, staged: bool):
        return jnp.tanh(product * scale)

    if "rational" in variant:
        with mock.patch.object(mosaic_gpu_tanh, "_any_beyond", always):
            yield
    elif "hardware" in variant:
        with mock.patch.object(mosaic_gpu_tiles, "tanh", hardware):
            yield
    else:
        yield


def lowered(shape: tuple[int, ...], variant: str) -> tuple:
    """The forward with what the backward needs, and the backward."""
    batch, tokens, heads, kv_heads, width = shape
    q, k = (jax.ShapeDtypeStruct((batch, tokens, n, width), jnp.bfloat16) for n in (heads, kv_heads))
    options: dict[str, Any] = {"causal": True, "window": None, "segment_ids": None, "scale": width**-0.5}
    attend = functools.partial(mosaic_gpu.forward, softcap=VARIANTS[variant], **options)
    jax.clear_caches()
    with way(variant):
        keep = jax.jit(lambda q, k, v: jax.vjp(lambda *qkv: attend(*qkv)[0], q, k, v)).trace(q, k, k)
        out, back = keep.out_info
        out, back = (jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree) for tree in (out, back))
        backward = jax.jit(lambda back, dout: back(dout)).trace(back, out)
        platforms = None if jax.default_backend() == "gpu" else ("cuda",)
        return keep.lower(lowering_platforms=platforms), backward.lower(lowering_platforms=platforms)


def main() -> None:
    """Compiles all side by side, then times one after another."""
    begun = time.monotonic()
    cases = list(itertools.product(SHAPES, VARIANTS))
    programs = [lowered(SHAPES[shape], variant) for shape, variant in cases]
    print(f"lowered after {time.monotonic() - begun:.1f} s", flush=True)
    with ThreadPoolExecutor(2 * len(programs)) as pool:
        futures = [[pool.submit(program.compile) for program in pair] for pair in programs]
        compiled: list[list[Any]] = [[each.exception() or each.result() for each in pair] for pair in futures]
    print(f"compiled after {time.monotonic() - begun:.1f} s", flush=True)
    for (shape, variant), (keep, backward) in zip(cases, compiled, strict=True):
        try:
            for failed in (each for each in (keep, backward) if isinstance(each, BaseException)):
                raise failed
            batch, tokens, heads, kv_heads, width = SHAPES[shape]
            draws = jax.random.split(jax.random.key(0), 4)
            q, k, v, dout = (
                jax.random.normal(key, (batch, tokens, n, width), jnp.bfloat16)
                for key, n in zip(draws, (heads, kv_heads, kv_heads, heads), strict=True)
            )
            flops = 4 * batch * heads * tokens**2 * width / 2
            _, back = keep(q, k, v)
            forward, behind = median_seconds(keep, q, k, v), median_seconds(backward, back, dout)
            print(
                f"{shape} {variant:<18} forward {forward * 1e3:.3f} ms {flops / forward / 1e12:4.0f} TFLOP/s"
                f"   backward {behind * 1e3:.3f} ms {2.5 * flops / behind / 1e12:4.0f} TFLOP/s",
                flush=True,
            )
        except Exception as broken:
            print(f"{shape} {variant}: {type(broken).__name__}: {str(broken)[:300]}", flush=True)


if __name__ == "__main__":
    main()
