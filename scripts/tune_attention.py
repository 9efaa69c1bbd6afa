"""Times attention's forward kernel on a GPU in other forms than the one that mosaic_gpu.FORWARDS chooses.

Usage: python scripts/tune_attention.py [CASE ...]    (cases: pallas_kernels/flash_attention/cases.py; default: 3)

A line for each case: TFLOP/s of cuDNN and of each form, the best first, as tune_forms.py times them. Results of these
keys and of growing ones are compared.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tune_forms import seconds_of_forms

from pallas_kernels.bench import build
from pallas_kernels.flash_attention import flash_attention
from pallas_kernels.flash_attention.bounds import row_bounds
from pallas_kernels.flash_attention.cases import CASES
from pallas_kernels.flash_attention.mosaic_gpu import WIDTHS
from pallas_kernels.flash_attention.mosaic_gpu_forward_ahead import forward_ahead
from pallas_kernels.flash_attention.mosaic_gpu_forward_wide import forward_wide
from pallas_kernels.flash_attention.mosaic_gpu_items import ForwardTiles
from pallas_kernels.flash_attention.mosaic_gpu_tiles import Scores

DEFAULT = ("B2-S4096-N32-K8-D256-causal", "B4-S4096-N32-K8-D128-causal", "B4-S4096-N32-K8-D64-causal")
FORMS = {  # of each width
    width: {
        "128 keys": (forward_ahead, ForwardTiles()),
        "64 keys": (forward_ahead, ForwardTiles(block_kv=64, stages=4)),
    }
    for width in WIDTHS
} | {256: {f"{keys} keys": (forward_wide, ForwardTiles(block_kv=keys)) for keys in (64, 80)}}
FORMS[64] |= {"3 slots": (forward_ahead, ForwardTiles(stages=3))}
CUDNN = "cudnn"


@jax.jit
def grown(k):
    """Keys of which later ones are larger, so that maxima grow on their way."""
    return (k * jnp.linspace(0.1, 10.0, k.shape[1])[:, None, None]).astype(k.dtype)


def programs(q, options: dict[str, Any]) -> dict[str, Any]:
    """What is timed, by name: functions of q, k, v and perhaps segment_ids that return the output first."""
    ours = {key: options[key] for key in ("causal", "window")}
    scores = Scores(q.shape[-1] ** -0.5, options.get("softcap"))

    def form(run, tiles, q, k, v, segment_ids=None):
        lo, hi = row_bounds(q.shape[1], k.shape[1], segment_ids=segment_ids, **ours)
        return run(q, k, v, lo, hi, scores=scores, tiles=tiles)[0]

    def cudnn(q, k, v, segment_ids=None):
        return flash_attention(q, k, v, segment_ids=segment_ids, implementation="cudnn", **ours)

    found = {name: functools.partial(form, *chosen) for name, chosen in FORMS[q.shape[-1]].items()}
    return found if "softcap" in options else {CUDNN: cudnn} | found


def main(wanted: list[str]) -> None:
    """Prints a line for each case."""
    for case in CASES:
        if case.name not in (wanted or DEFAULT):
            continue
        (q, k, v), arrays, options = build(case)
        args, growing = ((q, keys, v, *arrays.values()) for keys in (k, grown(k)))
        # apart: twice what weights in 16 bits make
        seconds = seconds_of_forms(case.name, programs(q, options), args, apart=5e-3, also=growing)
        rates = (f"{form} {case.flops / time / 1e12:.0f}" for form, time in seconds.items())
        print(f"{case.name}: " + ", ".join(rates), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
