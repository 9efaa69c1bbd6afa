"""Times products with NF4 weights on a GPU: the turned kernel's forms beside decoding beforehand and the bf16 product.

Usage: python scripts/tune_nf4.py [CASE ...] [--rows M ...] [--forms NAME ...]

Cases are those of pallas_kernels/nf4_linear/cases.py; default: those of 512 rows. With --rows each case is timed with
so many rows in place of its own. With --forms only the named forms are timed beside the bf16 product.

A line for each case and direction: TFLOP/s of each form, the best first, and how that compares with the bf16 product. A
form whose result differs from the bf16 product's by more than rounding is marked WRONG; one that does not compile is
named on the error stream.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tune_grouped_matmul import difference

from pallas_kernels.bench import build, median_seconds
from pallas_kernels.nf4_linear import NF4Weight, dequantize, mosaic_gpu
from pallas_kernels.nf4_linear.cases import CASES
from pallas_kernels.nf4_linear.mosaic_gpu_fragments import DEPTH
from pallas_kernels.nf4_linear.mosaic_gpu_turned import suitable_turned

CHANGES: dict[str, dict[str, Any]] = {
    "turned": {},
    "by shuffles": {"tables": False},
    "whole tiles": {"unit": None},
    "alone": {"pair": False},
    "128 rows": {"rows": 128, "stages": 8},
}
PARTS = {"evenly shared": None, "halves": 2}


def forms(w: NF4Weight, rows: int, *, transpose: bool) -> dict[str, Callable[..., Any]]:
    """Functions of x, the packed weight's arrays and the dense weight; the first is what others are held against."""

    def dense_product(x, packed, dense):
        return x @ (dense if transpose else dense.T)

    def beforehand(x, packed, dense):
        arrays = dict(zip(("codes", "absmax", "nested_absmax", "offset"), packed, strict=True))
        return dense_product(
            x, packed, dequantize(dataclasses.replace(w, **arrays), x.dtype, implementation="mosaic_gpu")
        )

    def inside(x, packed, dense, tiles):
        return mosaic_gpu.fused(x, packed, w.shape, transpose=transpose, tiles=tiles)

    suitable = suitable_turned(rows, *(w.shape if transpose else w.shape[::-1]))
    found: dict[str, Callable[..., Any]] = {"bf16": dense_product, "beforehand": beforehand}
    steps = w.shape[0 if transpose else 1] // DEPTH
    units: dict[str, dict[str, Any]] = {name: {"unit": steps // parts if parts else 2} for name, parts in PARTS.items()}
    for name, change in (CHANGES | units).items():
        tiles = dataclasses.replace(suitable, **change)
        if name == "turned" or tiles != suitable:
            found[name] = functools.partial(inside, tiles=tiles)
    return found


def main() -> None:
    """Prints a line for each case, number of rows and direction."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", default=[case.name for case in CASES if case.name.startswith("M512-")])
    parser.add_argument("--rows", type=int, nargs="+", help="of x, in place of the case's own")
    parser.add_argument("--forms", nargs="+", help="of those that are timed: " + ", ".join(CHANGES | PARTS))
    options = parser.parse_args()
    for case in CASES:
        if case.name not in options.cases:
            continue
        (x, w), _, _ = build(case)
        packed, dense = (w.codes, w.absmax, w.nested_absmax, w.offset), dequantize(w)
        for rows in options.rows or (x.shape[0],):
            for transpose in (False, True):
                x = jax.random.normal(jax.random.key(1), (rows, w.shape[0 if transpose else 1]), jnp.bfloat16)
                args, rates, first = (x, packed, dense), {}, None
                for form, function in forms(w, rows, transpose=transpose).items():
                    if options.forms and form not in ("bf16", *options.forms):
                        continue
                    try:
                        run = jax.jit(function).lower(*args).compile()
                        result = run(*args)
                        first = result if first is None else first
                        wrong = not float(difference(result, first)) < 5e-3
                        seconds = median_seconds(run, *args)
                        rates[form + (" WRONG" if wrong else "")] = 2 * rows * w.shape[0] * w.shape[1] / seconds / 1e12
                    except Exception as error:  # whatever one form does, the others are timed
                        print(f"{case.name} {form}: {str(error)[:300]}", file=sys.stderr, flush=True)
                ranked = sorted(rates.items(), key=lambda item: -item[1])
                words = (f"{form} {rate:.0f} ({rate / rates['bf16']:.2f})" for form, rate in ranked)
                print(f"{w.shape} {rows} rows {'dx' if transpose else 'y'}: " + ", ".join(words), flush=True)


if __name__ == "__main__":
    main()
