"""Runs every Hopper kernel once, forward and backward, on little data: what compute-sanitizer is to watch.

Usage: compute-sanitizer --tool memcheck|racecheck python scripts/sanitize.py [OP ...]
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # each array is the tool's own to guard

import jax
import jax.numpy as jnp
import numpy as np

from gymjax.quant.nf4 import quantize
from pallas_kernels.flash_attention import flash_attention
from pallas_kernels.grouped_matmul import GroupedLayer, grouped_matmul, grouped_mlp
from pallas_kernels.linear_cross_entropy import linear_cross_entropy
from pallas_kernels.lora_linear import lora_linear
from pallas_kernels.nf4_linear import mosaic_gpu, nf4_linear
from pallas_kernels.nf4_linear.mosaic_gpu_turned_tiles import TurnedTiles
from pallas_kernels.rms_norm import rms_norm
from pallas_kernels.rope import rope
from pallas_kernels.swiglu import swiglu

KERNELS: Any = "mosaic_gpu" if jax.default_backend() == "gpu" else "xla"  # elsewhere this file tests itself


def normal(*shape: int) -> jax.Array:
    """A normal bf16 array."""
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), jnp.bfloat16)


def both_ways(call: Callable, *args: jax.Array) -> None:
    """Runs a call and its gradients."""
    jax.block_until_ready(jax.jit(jax.grad(lambda args: jnp.sum(call(*args).astype(jnp.float32))))(args))


def attention() -> None:
    """Grouped heads, a ragged length, documents; each forward form, both backward forms."""
    ids = jnp.asarray(np.repeat([1, 2, 3, 0], [70, 130, 61, 39])[None], jnp.int32)
    for width, deterministic in ((64, False), (128, False), (128, True), (256, True)):
        q, k, v = (normal(1, 300, heads, width) for heads in (4, 2, 2))
        both_ways(
            lambda q, k, v, d=deterministic: flash_attention(
                q, k, v, causal=True, segment_ids=ids, deterministic=d, implementation=KERNELS
            ),
            *(q, k, v),
        )
        print(f"attention, width {width}, deterministic {deterministic}: ran", flush=True)


def groups() -> None:
    """Ragged groups, one of them empty."""
    sizes = jnp.asarray([130, 0, 61, 9], jnp.int32)
    both_ways(lambda x, w: grouped_matmul(x, w, sizes, implementation=KERNELS), normal(200, 256), normal(4, 256, 256))


def gated() -> None:
    """Gated blocks of ragged groups with adapters, one group empty."""
    sizes, factor = jnp.asarray([130, 0, 61, 9], jnp.int32), jnp.ones(4)

    def block(x, weight, *parts):
        gate, up, down = (GroupedLayer(w, a, b, factor) for w, a, b in (parts[:3], parts[3:6], parts[6:]))
        return grouped_mlp(x, gate, up, down, weight, sizes, implementation=KERNELS)

    up, down = ((4, 256, 512), (4, 16, 512), (4, 256, 16)), ((4, 512, 256), (4, 16, 256), (4, 512, 16))
    both_ways(block, normal(200, 512), normal(200), *(normal(*shape) for shape in (*up, *up, *down)))


def nf4() -> None:
    """Unpacking alone and inside the product."""
    weight = quantize(np.asarray(normal(256, 512), np.float32))
    for rows in (64, 4096):
        both_ways(lambda x: nf4_linear(x, weight, implementation=KERNELS), normal(rows, 512))


def nf4_turned() -> None:
    """Decoded in registers: alone and in pairs, tiles whole and in parts, with an adapter's product."""
    if KERNELS == "xla":
        return
    w = quantize(np.asarray(normal(256, 512), np.float32))
    packed = w.codes, w.absmax, w.nested_absmax, w.offset
    cuts = (2, 1), (None, 1), (None, 2)
    for transpose, pair, (unit, parts) in itertools.product((False, True), (False, True), cuts):
        depth, width = w.shape if transpose else w.shape[::-1]
        extra = normal(300, 16), normal(16, width) if transpose else normal(width, 16)
        tiles = TurnedTiles(unit=unit, parts=parts, pair=pair)
        product = functools.partial(mosaic_gpu.fused, transpose=transpose, extra=extra, tiles=tiles)
        jax.block_until_ready(product(normal(300, depth), packed, w.shape))


def adapters() -> None:
    """Products with an adapter, of rows that end within a tile."""
    w, a, b = normal(512, 1024), normal(16, 1024), normal(512, 16)
    both_ways(lambda x, a, b: lora_linear(x, w, a, b, scale=1.0, implementation=KERNELS), normal(1088, 1024), a, b)


def norm() -> None:
    """Normalisation of rows that a warpgroup shares, and of short ones."""
    for width in (1024, 128, 576):
        both_ways(lambda x, s: rms_norm(x, s, eps=1e-5, implementation=KERNELS), normal(1024, width), normal(width))


def gate() -> None:
    """The gated activation."""
    both_ways(lambda gate, up: swiglu(gate, up, implementation=KERNELS), normal(1000, 1024), normal(1000, 1024))


def rotation() -> None:
    """Queries and keys in one pass, as many as the kernel is for: halves and neighbours, whole heads and parts."""
    for interleaved, (heads, kv_heads, turned) in itertools.product((False, True), ((24, 8, 128), (32, 2, 64))):
        angles = jnp.linspace(0.0, 1.0, 8192 * turned // 2).reshape(1, 8192, -1)
        turn = functools.partial(rope, interleaved=interleaved, implementation=KERNELS)
        both_ways(
            lambda q, k, turn=turn, angles=angles: jnp.concatenate(turn(q, k, jnp.cos(angles), jnp.sin(angles)), 2),
            *(normal(1, 8192, count, 128) for count in (heads, kv_heads)),
        )


def loss() -> None:
    """Exponentials and their codes, summed or kept; tiles that reach beyond the vocabulary; pairs of blocks."""
    rng = np.random.default_rng(0)
    ways = ((64, True, "sum"), (64, False, "sum"), (128, False, "none"))
    for vocabulary, length in ((16384, 100), (17280, 100), (16384, 520)):
        labels = jnp.asarray(rng.integers(0, 16384, (2, length)), jnp.int32).at[0, :9].set(-100)
        for width, frozen, reduction in ways[: 3 if length == 100 else 2]:  # codes of few tokens only are kept
            options: Any = {"frozen_head": frozen, "reduction": reduction, "chunk_tokens": 1024}
            both_ways(
                lambda x, w, o=options, y=labels: linear_cross_entropy(x, w, y, implementation=KERNELS, **o),
                normal(2, length, width),
                normal(vocabulary, width),
            )


ALL = {
    call.__name__: call for call in (attention, groups, gated, nf4, nf4_turned, adapters, norm, gate, rotation, loss)
}


def main(names: list[str]) -> int:
    """Runs what is named, or everything."""
    for name in names or ALL:
        try:
            ALL[name]()
            print(f"{name}: ran", flush=True)
        except (ValueError, NotImplementedError, TypeError) as error:
            print(f"{name}: {error}", flush=True)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
