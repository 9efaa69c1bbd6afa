"""Times the linear cross-entropy with other chunks and groups of tokens beside all logits at once, and its memory.

Usage: python scripts/tune_linear_cross_entropy.py [--batch 4x2048] [--width 4096] [--vocabulary 128256] [--tiny]

Prints for each form, with a frozen and with a trained head: milliseconds of loss and gradients, the ratio to the
full-logits form (bars: 0.65 frozen, 1.00 trained), and GiB beside arguments and results (bars: 0.5, and 0.5 beyond the
f32 gradient of a trained head). `two-pass` reads the logits once more, for their maximum. A form that fails is named,
and the next ones are timed all the same.
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp

from pallas_kernels.bench import median_seconds
from pallas_kernels.linear_cross_entropy import linear_cross_entropy, reference
from pallas_kernels.linear_cross_entropy.cases import PEERS

SIZES = {True: ((2048, 2048), (512, 512), (512, 1024), (256, 1024)), False: ((2048, 2048), (512, 1024), (256, 1024))}


def forms(frozen: bool):
    """Name, loss and form of the log-sum-exp of everything that is timed."""
    shared: dict[str, Any] = {"frozen_head": frozen, "reduction": "sum"}
    yield "full logits", functools.partial(PEERS["naive"].call, **shared), reference.one_pass_lse
    for chunk, group in SIZES[frozen]:
        loss = functools.partial(linear_cross_entropy, **shared, chunk_tokens=chunk, group_tokens=group)
        yield f"chunk {chunk} group {group}", loss, reference.one_pass_lse
    chunk, group = SIZES[frozen][0]
    loss = functools.partial(linear_cross_entropy, **shared, chunk_tokens=chunk, group_tokens=group)
    yield f"chunk {chunk} group {group} two-pass", loss, functools.partial(jax.nn.logsumexp, axis=-1)


def main() -> None:
    """Times every form and prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", default="4x2048")
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--tiny", action="store_true", help="a small shape, to see that the script runs")
    options = parser.parse_args()
    rows, length = map(int, options.batch.split("x"))
    width, vocabulary = options.width, options.vocabulary
    if options.tiny:
        rows, length, width, vocabulary = 2, 16, 8, 33
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (rows, length, width), jnp.bfloat16)
    head = jax.random.normal(keys[1], (vocabulary, width), jnp.bfloat16) * width**-0.5
    labels = jax.random.randint(keys[2], (rows, length), 0, vocabulary)
    print(jax.devices()[0].device_kind, "jax", jax.__version__, (rows, length, width, vocabulary), flush=True)
    for frozen in (True, False):
        first, name = None, ""
        for name, loss, lse in forms(frozen):
            reference.one_pass_lse = lse  # a script's own process, for one comparison
            step = jax.jit(jax.value_and_grad(loss, 0 if frozen else (0, 1)))
            try:
                program = step.lower(x, head, labels).compile()
                seconds = median_seconds(program, x, head, labels)
            except Exception as failure:  # the other forms are to be seen too
                print(f"frozen {frozen} {name}: {type(failure).__name__}: {str(failure)[:500]}", flush=True)
                continue
            first = first or seconds
            memory: Any = program.memory_analysis()
            extra = memory.temp_size_in_bytes / 2**30
            value = float(program(x, head, labels)[0]) / labels.size
            print(
                f"frozen {frozen!s:<5} {name:<36} {1e3 * seconds:7.2f} ms  {seconds / first:5.3f}  {extra:6.3f} GiB  "
                f"loss {value:.7f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
