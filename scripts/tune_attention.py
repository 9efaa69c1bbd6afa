"""Times attention's forward kernel on a GPU in other forms than the one that mosaic_gpu.FORWARDS chooses.

Usage: python scripts/tune_attention.py [CASE ...]    (cases: pallas_kernels/flash_attention/cases.py; default: 3)

A line for each case and form as it is timed, TFLOP/s, cuDNN's first, and one for each case with all of them, the best
first. A form whose results, of these keys and of growing ones, differ from the first one's by more than rounding is
marked WRONG; one that does not compile is named on the error stream.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pallas_kernels.bench import build, median_seconds
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
def difference(got, first):
    """The largest of some results, relative, in the Frobenius norm."""
    pairs = [[x.astype(jnp.float32).ravel() for x in pair] for pair in zip(got, first, strict=True)]
    return jnp.stack([jnp.linalg.norm(one - other) / jnp.linalg.norm(other) for one, other in pairs]).max()


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
    """Prints a line for each case and form."""
    for case in CASES:
        if case.name not in (wanted or DEFAULT):
            continue
        qkv, arrays, options = build(case)
        rates, first = {}, None
        for name, function in programs(qkv[0], options).items():
            (q, k, v), more = qkv, tuple(arrays.values())
            args = (q, k, v, *more)
            try:
                run = jax.jit(function).lower(*args).compile()
                result = run(*args), run(q, grown(k), v, *more)
                first = result if first is None else first
                wrong = not float(difference(result, first)) < 5e-3  # twice what weights in 16 bits make
                name += " WRONG" if wrong else ""
                rates[name] = case.flops / median_seconds(run, *args) / 1e12
                print(f"{case.name} {name}: {rates[name]:.0f}", flush=True)
            except Exception as error:
                print(f"{case.name} {name}: {str(error)[:300]}", file=sys.stderr, flush=True)
        ranked = sorted(rates.items(), key=lambda item: -item[1])
        print(f"{case.name}: " + ", ".join(f"{name} {rate:.0f}" for name, rate in ranked), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
