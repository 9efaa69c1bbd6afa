"""Times the linear cross-entropy: its Hopper kernels, then loss and gradients in several chunks, and their memory.

Usage: python scripts/tune_linear_cross_entropy.py [--batch 4x2048] [--width 4096] [--vocabulary 128256] [--top 8]

The kernels alone: TFLOP/s of the head's product that gives exponentials, beside XLA's that gives bf16 or f32 logits.
The loss, with a frozen and with a trained head: milliseconds of loss and gradients (bars: 0.65 of the trained form that
holds all logits for a frozen head, 1.00 for a trained one), and GiB beside arguments and results (bars: 0.5, and 0.5
beyond the f32 gradient of a trained head). What fails is named, and the rest is timed all the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
from profile_step import profiled

from pallas_kernels._tiles import Tiles
from pallas_kernels.bench import median_seconds
from pallas_kernels.linear_cross_entropy import linear_cross_entropy
from pallas_kernels.linear_cross_entropy.cases import PEERS
from pallas_kernels.linear_cross_entropy.mosaic_gpu import refuses
from pallas_kernels.linear_cross_entropy.mosaic_gpu_codes import gradients
from pallas_kernels.linear_cross_entropy.mosaic_gpu_exponentials import exponentials

FORMS = {  # implementation, chunk, group; all logits at once last, as it is the slowest to compile
    True: (
        ("mosaic_gpu", 256, 256),  # twice as many exponentials are stored at a time, of a trained head four times
        ("mosaic_gpu", 512, 512),
        ("mosaic_gpu", 1024, 1024),
        ("xla", 512, 512),
        ("xla", 256, 1024),
    ),
    False: (
        ("mosaic_gpu", 256, 512),
        ("mosaic_gpu", 512, 1024),
        ("mosaic_gpu", 512, 2048),
        ("mosaic_gpu", 1024, 4096),
        ("xla", 512, 1024),
    ),
}
ALONE = {"": Tiles(), ", band 8": Tiles(band=8), ", band 4": Tiles(band=4)}
PAIRS = {f", pair{name}": dataclasses.replace(tiles, pair=True) for name, tiles in ALONE.items()}


def attempt(name: str, measure: Callable[[], str]) -> None:
    """Prints what a measurement says, or why it failed."""
    try:
        print(f"{name:<40} {measure()}", flush=True)
    except Exception as failure:  # the others are to be seen too
        print(f"{name:<40} {type(failure).__name__}: {str(failure)[:300]}", flush=True)


def product_alone(x: jax.Array, head: jax.Array, multiply: Callable[..., Any]) -> str:
    """Time and rate of the head's product by hidden states in one form."""
    program = jax.jit(multiply).lower(x, head).compile()
    seconds = median_seconds(program, x, head)
    return f"{1e6 * seconds:8.1f} us  {2 * len(x) * head.size / seconds / 1e12:6.1f} TFLOP/s"


def products(rows: int, head: jax.Array, forms: dict[str, Tiles]) -> None:
    """Prints how long the kernel of the head's product takes with so many hidden states, in each form."""
    x = jax.random.normal(jax.random.key(2), (rows, head.shape[1]), head.dtype)
    labels, reference = jnp.arange(rows, dtype=jnp.int32), jnp.full(rows, 4, jnp.float32)
    for name, tiles in forms.items():
        powers = functools.partial(exponentials, labels=labels, reference=reference, scale=1.0, tiles=tiles)
        attempt(f"exponentials, {rows} rows{name}", functools.partial(product_alone, x, head, powers))
    codes = functools.partial(exponentials, labels=labels, reference=reference, scale=1.0, coded=True)
    attempt(f"codes, {rows} rows", functools.partial(product_alone, x, head, codes))


def codes_alone(rows: int, vocabulary: int, piece: int) -> str:
    """Time and rate of codes that become gradients in place, 2 bytes read and 2 written a logit."""
    codes = jnp.zeros((rows, vocabulary), jnp.int16)
    labels, each = jnp.arange(rows, dtype=jnp.int32), jnp.ones(rows, jnp.float32)

    def in_place(codes: jax.Array, labels: jax.Array, each: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.lax.bitcast_convert_type(gradients(codes, labels, each, each, piece=piece), jnp.int16), each + 1

    program = jax.jit(in_place, donate_argnums=0).lower(codes, labels, each).compile()

    def step(labels: Any, each: Any) -> Any:  # the codes go round, so that nothing copies them
        nonlocal codes
        codes, done = program(codes, labels, each)
        return done

    seconds = median_seconds(step, labels, each)
    return f"{1e6 * seconds:8.1f} us  {4 * rows * vocabulary / seconds / 1e9:6.0f} GB/s"


def xla_products(rows: int, head: jax.Array) -> None:
    """Prints how long XLA's products take: logits of both dtypes, and the one back from as many exponentials."""
    x = jax.random.normal(jax.random.key(2), (rows, head.shape[1]), head.dtype)
    for dtype in (jnp.bfloat16, jnp.float32):
        logits = functools.partial(jnp.einsum, "md,vd->mv", preferred_element_type=dtype)
        name = f"xla's product, {rows} rows, {jnp.dtype(dtype).name}"
        attempt(name, functools.partial(product_alone, x, head, logits))
    back = functools.partial(jnp.einsum, "mv,vd->md", preferred_element_type=jnp.float32)
    powers = jax.random.uniform(jax.random.key(3), (rows, head.shape[0]), head.dtype)
    attempt(f"xla's product back, {rows} rows", functools.partial(product_alone, powers, head, back))


def whole_loss(loss: Callable[..., jax.Array], frozen: bool, top: int, arrays: tuple[jax.Array, ...]) -> str:
    """Time, memory and value of the loss with its gradients, and its `top` longest kernels."""
    program = jax.jit(jax.value_and_grad(loss, 0 if frozen else (0, 1))).lower(*arrays).compile()
    seconds = median_seconds(program, *arrays)
    memory: Any = program.memory_analysis()
    value = float(program(*arrays)[0]) / arrays[2].size
    found = profiled(lambda: program(*arrays), program, 2)[0] if top else []
    longest = "".join(f"\n{kernel.line()}" for kernel in found[:top])
    return f"{1e3 * seconds:7.2f} ms  {memory.temp_size_in_bytes / 2**30:6.3f} GiB  loss {value:.7f}{longest}"


def main() -> None:
    """Times every form and prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", default="4x2048")
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--top", type=int, default=0, help="kernels of each form to print, by the profiler")
    parser.add_argument("--tiny", action="store_true", help="a small shape, to see that the script runs")
    options = parser.parse_args()
    rows, length = map(int, options.batch.split("x"))
    width, vocabulary = options.width, options.vocabulary
    if options.tiny:
        rows, length, width, vocabulary = 2, 16, 8, 33
    print(jax.devices()[0].device_kind, "jax", jax.__version__, (rows, length, width, vocabulary), flush=True)
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (rows, length, width), jnp.bfloat16)
    head = jax.random.normal(keys[1], (vocabulary, width), jnp.bfloat16) * width**-0.5
    labels = jax.random.randint(keys[2], (rows, length), 0, vocabulary)
    kernels = refuses(width, vocabulary, jnp.bfloat16, trained=True) is None
    for tokens in (512, 1024, 2048) if kernels else ():
        products(tokens, head, ALONE)
        xla_products(tokens, head)
    for piece in (2048, 4096, 8192) if kernels else ():
        attempt(f"gradients of codes, 2048 rows, {piece}", functools.partial(codes_alone, 2048, vocabulary, piece))
    for frozen in (True, False):
        shared: dict[str, Any] = {"frozen_head": frozen, "reduction": "sum"}
        kind = "frozen" if frozen else "trained"
        for name, chunk, group in FORMS[frozen]:
            sizes: dict[str, Any] = {"chunk_tokens": chunk, "group_tokens": group, "implementation": name}
            loss = functools.partial(linear_cross_entropy, **shared, **sizes)
            attempt(
                f"{kind} {name} {chunk} {group}",
                functools.partial(whole_loss, loss, frozen, options.top, (x, head, labels)),
            )
        full = functools.partial(PEERS["naive"].call, **shared)
        attempt(f"{kind} all logits", functools.partial(whole_loss, full, frozen, options.top, (x, head, labels)))
    for tokens in (1024, 2048) if kernels else ():
        products(tokens, head, PAIRS)


if __name__ == "__main__":
    main()
