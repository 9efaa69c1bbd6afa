"""Times the grouped product's kernels on a GPU with other sizes of tiles than those that mosaic_gpu.tiles_of chooses.

Usage: python scripts/tune_grouped_matmul.py [CASE ...]    (cases: pallas_kernels/grouped_matmul/cases.py; default: 4)

A line for each case and kernel: TFLOP/s of each form, the best first. A form whose result differs from the first one's
by more than rounding is marked WRONG; one that does not compile is named on the error stream.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pallas_kernels.bench import build, median_seconds
from pallas_kernels.grouped_matmul.cases import CASES
from pallas_kernels.grouped_matmul.mosaic_gpu_rows import Tiles, group_rows
from pallas_kernels.grouped_matmul.mosaic_gpu_weights import group_weights

DEFAULT = (
    "M65536-E64-F1024-D2048",
    "M65536-E64-F2048-D1024",
    "M16384-E8-F14336-D4096",
    "M65536-E128-F768-D2048",
)
FORMS = {
    "256": Tiles(),
    "256 pair": Tiles(pair=True),
    "256, 3 slots": Tiles(stages=3),
    "256, band 8": Tiles(band=8),
    "256, band 32": Tiles(band=32),
    "192": Tiles(columns=192),
    "192 pair": Tiles(columns=192, pair=True),
    "128, 6 slots": Tiles(columns=128, stages=6),
}


@jax.jit
def difference(got, first):
    """Relative, in the Frobenius norm."""
    got, first = (x.astype(jnp.float32) for x in (got, first))
    return jnp.linalg.norm((got - first).ravel()) / jnp.linalg.norm(first.ravel())


def main(wanted: list[str]) -> None:
    """Prints a line for each case and kernel."""
    for case in CASES:
        if case.name not in (wanted or DEFAULT):
            continue
        (x, w, sizes), _, _ = build(case)
        dy = jax.random.normal(jax.random.key(1), (x.shape[0], w.shape[1]), x.dtype)
        kernels = {
            "forward": (functools.partial(group_rows, transposed=True), ((x,), (w,), sizes)),
            "dx": (functools.partial(group_rows, transposed=False), ((dy,), (w,), sizes)),
            "dw": (functools.partial(group_weights, dtype=w.dtype), (x, dy, sizes)),
        }
        for kernel, (function, args) in kernels.items():
            rates, first = {}, None
            for form, tiles in FORMS.items():
                try:
                    run = jax.jit(functools.partial(function, tiles=tiles)).lower(*args).compile()
                    result = run(*args)
                    first = result if first is None else first
                    wrong = not float(difference(result, first)) < 1e-3
                    rates[form + (" WRONG" if wrong else "")] = case.flops / median_seconds(run, *args) / 1e12
                except Exception as error:
                    print(f"{case.name} {kernel} {form}: {str(error)[:300]}", file=sys.stderr, flush=True)
            ranked = sorted(rates.items(), key=lambda item: -item[1])
            print(f"{case.name} {kernel}: " + ", ".join(f"{form} {rate:.0f}" for form, rate in ranked), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
