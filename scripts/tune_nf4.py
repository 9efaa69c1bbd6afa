"""Times products with NF4 weights on a GPU: the turned kernel's forms beside decoding beforehand and the bf16 product.

Usage: python scripts/tune_nf4.py [CASE ...] [--rows M ...] [--forms NAME ...]

Cases are those of pallas_kernels/nf4_linear/cases.py; default: those of 512 rows. With --rows each case is timed with
so many rows in place of its own. With --forms only the named forms are timed beside the bf16 product.

A line for each case and direction: TFLOP/s of each form, the best first, as tune_forms.py times them, and how that
compares with the bf16 product.
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

from tune_forms import seconds_of_forms

from pallas_kernels.bench import build
from pallas_kernels.nf4_linear import NF4Weight, dequantize, mosaic_gpu
from pallas_kernels.nf4_linear.cases import CASES, SHORT
from pallas_kernels.nf4_linear.mosaic_gpu_fragments import DEPTH
from pallas_kernels.nf4_linear.mosaic_gpu_turned_tiles import LEAST, suitable_turned

CHANGES: dict[str, dict[str, Any]] = {
    "turned": {},
    "whole tiles": {"unit": None, "parts": 1},
    "alone": {"pair": False},
    "128 rows": {"rows": 128, "stages": 8},
    "in a cluster": {"unit": None, "parts": 2},
    "in a cluster, alone": {"unit": None, "parts": 2, "pair": False},
    "four in a cluster, alone": {"unit": None, "parts": 4, "pair": False},
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
    units: dict[str, dict[str, Any]] = {
        name: {"unit": steps // parts if parts else 2, "parts": 1} for name, parts in PARTS.items()
    }
    for name, change in (CHANGES | units).items():
        tiles = dataclasses.replace(suitable, **change)
        if tiles.rows % (tiles.parts * LEAST) == 0 and (name == "turned" or tiles != suitable):
            found[name] = functools.partial(inside, tiles=tiles)
    return found


def main() -> None:
    """Prints a line for each case, number of rows and direction."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", default=[case.name for case in CASES if case.name.startswith("M512-")])
    parser.add_argument("--rows", type=int, nargs="+", help="of x, in place of the case's own")
    parser.add_argument("--forms", nargs="+", help="of those that are timed: beforehand, " + ", ".join(CHANGES | PARTS))
    options = parser.parse_args()
    for case in CASES:
        if case.name not in options.cases:
            continue
        (x, w), _, _ = build(case)
        packed, dense = (w.codes, w.absmax, w.nested_absmax, w.offset), dequantize(w)
        for rows in options.rows or (x.shape[0],):
            for transpose in (False, True):
                x = jax.random.normal(jax.random.key(1), (rows, w.shape[0 if transpose else 1]), jnp.bfloat16)
                args, line = (x, packed, dense), f"{w.shape} {rows} rows {'dx' if transpose else 'y'}"
                wanted = {
                    form: function
                    for form, function in forms(w, rows, transpose=transpose).items()
                    if not options.forms or form in ("bf16", *options.forms)
                }
                seconds = seconds_of_forms(line, wanted, args, apart=5e-3, short=rows <= SHORT)
                flops = 2 * rows * w.shape[0] * w.shape[1]
                words = (
                    f"{form} {flops / time / 1e12:.0f} ({seconds['bf16'] / time:.2f})" for form, time in seconds.items()
                )
                print(f"{line}: " + ", ".join(words), flush=True)


if __name__ == "__main__":
    main()
