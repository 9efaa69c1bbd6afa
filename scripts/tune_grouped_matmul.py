"""Times the grouped product's kernels on a GPU with other sizes of tiles than those that mosaic_gpu.tiles_of chooses.

Usage: python scripts/tune_grouped_matmul.py [CASE ...] [--weights] [--forms NAME ...] [--other FILE]

Cases are those of pallas_kernels/grouped_matmul/cases.py; default: 4. With --weights only the weights' gradient is
timed. FILE is a Python file with another version of its kernel, which is timed beside the present one's forms, such as
`git show main:pallas_kernels/grouped_matmul/mosaic_gpu_weights.py > before.py`.

A line for each case and kernel: TFLOP/s of each form, the best first, as tune_forms.py times them.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tune_forms import seconds_of_forms

from pallas_kernels._tiles import HALF, Tiles
from pallas_kernels.bench import build
from pallas_kernels.grouped_matmul.cases import CASES
from pallas_kernels.grouped_matmul.mosaic_gpu_gated import gated_gradients, gated_rows
from pallas_kernels.grouped_matmul.mosaic_gpu_rows import group_rows
from pallas_kernels.grouped_matmul.mosaic_gpu_weights import group_weights

DEFAULT = (
    "M65536-E64-F1024-D2048",
    "M65536-E64-F2048-D1024",
    "M16384-E8-F14336-D4096",
    "M65536-E128-F768-D2048",
)
WEIGHTS = {  # of the weights' gradient alone
    "stored at once": Tiles(late=False),
    "stored at once, 3 slots, 4 buffers": Tiles(stages=3, stores=4, late=False),
    "depth 32, 8 slots": Tiles(depth=32, stages=8),
    "depth 32, 7 slots, 3 buffers": Tiles(depth=32, stages=7, stores=3),
    "depth 32, 6 slots, 4 buffers, stored at once": Tiles(depth=32, stages=6, stores=4, late=False),
}
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
GATED = {  # of products that are gated; the result is half gate's and half up's, forward
    "256": Tiles(),
    "256, 3 slots, 4 buffers": Tiles(stages=3, stores=4),
    "256, band 8": Tiles(band=8),
    "256, band 32": Tiles(band=32),
}


def kernel_of(path: Path):
    """group_weights of a Python file."""
    spec = importlib.util.spec_from_file_location("other_weights", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.group_weights


def main() -> None:
    """Prints a line for each case and kernel."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", default=DEFAULT)
    parser.add_argument("--weights", action="store_true", help="the weights' gradient alone")
    parser.add_argument("--forms", nargs="+", help="of those that are timed: " + ", ".join(FORMS | WEIGHTS | GATED))
    parser.add_argument("--other", type=Path, help="a file with another version of its kernel")
    options = parser.parse_args()
    for case in CASES:
        if case.name not in options.cases:
            continue
        (x, w, sizes), _, _ = build(case)
        dy = jax.random.normal(jax.random.key(1), (x.shape[0], w.shape[1]), x.dtype)
        rows = {form: functools.partial(group_rows, tiles=tiles) for form, tiles in FORMS.items()}
        weights = {"other": functools.partial(kernel_of(options.other), tiles=Tiles())} if options.other else {}
        weights |= {form: functools.partial(group_weights, tiles=tiles) for form, tiles in (FORMS | WEIGHTS).items()}
        kernels: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[Any, ...]]] = {
            "forward": (rows, {"transposed": True}, ((x,), (w,), sizes)),
            "dx": (rows, {"transposed": False}, ((dy,), (w,), sizes)),
            "dw": (weights, {"dtype": w.dtype}, (x, dy, sizes)),
        }
        weight, gated = jnp.ones(len(x) + HALF), {}
        for name, kernel, args in (
            ("gated", gated_rows, ((x,), (w,), (w,), weight, sizes)),
            ("gated dx", gated_gradients, ((x,), (w.swapaxes(1, 2),), dy, dy, weight, sizes)),
        ):
            gated[name] = {form: functools.partial(kernel, tiles=tiles) for form, tiles in GATED.items()}, {}, args
        kernels |= gated
        for kernel in ("dw",) if options.weights else kernels:
            forms, same, args = kernels[kernel]
            flops = case.flops * (2 if kernel == "gated" else 1)
            whole = {
                form: functools.partial(function, **same)
                for form, function in forms.items()
                if form in (options.forms or forms)
            }
            seconds = seconds_of_forms(f"{case.name} {kernel}", whole, args, apart=1e-3)
            rates = (f"{form} {flops / time / 1e12:.0f}" for form, time in seconds.items())
            print(f"{case.name} {kernel}: " + ", ".join(rates), flush=True)


if __name__ == "__main__":
    main()
