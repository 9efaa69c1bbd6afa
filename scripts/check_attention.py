"""Checks the Hopper attention kernels on a GPU against float64, over widths, groups, lengths and masks.

Usage: python scripts/check_attention.py [--seconds 100] [--masks softcap ...] [--widths 256 ...] [--out FILE]
(exit status 1 where an error is above its bar)

Each case compares the output, the log-sum-exp and the gradients of q, k, v and sinks with the definition in float64 on
the host, over several draws; the bar is 1.5 times the error of dense bf16 attention ("xla") on the same inputs. Cases
are shared out to processes, which compile side by side, and come in an order that has every mask at every width early.
Printed are failures, what was not reached, and the worst ratio of each output.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pallas_kernels import Implementation
from pallas_kernels.flash_attention import flash_attention
from pallas_kernels.flash_attention.mosaic_gpu import FUSED_WIDTHS
from pallas_kernels.flash_attention.reference import attention_mask

WIDTHS, LENGTHS, HEADS = (64, 96, 128, 256), (1, 127, 129, 1000), ((4, 4), (8, 2), (8, 1))
MASKS: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window": 50},
    "softcap": {"softcap": 5.0},  # of scores around 1, so that warps take each of the ways of mosaic_gpu_tanh
    "softcap 10": {"softcap": 10.0},
    "softcap 30": {"softcap": 30.0},
    "documents": {"documents": True},
    "documents, window, sinks": {"documents": True, "window": 70, "sinks": True},
    "sinks, softcap": {"sinks": True, "softcap": 5.0},
    "more keys": {"more_keys": 77},
}
ENVIRONMENT = {  # of the processes, which are many on one GPU; nothing is timed
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "XLA_FLAGS": os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0",
    "OMP_NUM_THREADS": "2",
    "OPENBLAS_NUM_THREADS": "2",
}
DRAWS = {1: 64, 127: 4, 129: 4, 1000: 4}  # of each length: an error of few numbers would be a draw itself
# Sinks' gradients are one for each head. With nothing rounded but weights and the output, which FlashAttention's
# formula of delta reads, their error is 1.41 times dense attention's (D256 T127 N8, soft-cap 5, 160 draws), in parts of
# 16 draws 1.31 to 1.64.
DRAWS_OF_SINKS = {1: 64, 127: 64, 129: 64, 1000: 16}
NAMES = ("out", "lse", "dq", "dk", "dv", "ds")
FLOOR = {"lse": 2e-6}  # f32 rounding of sums, and of a capped score (1e-6 of it); the dense one is f32
ROUNDING = 1.7e-3  # of bf16, root of the mean square


def oracle(q, k, v, sinks, dout, dlse, seen, scale: float, softcap: float | None) -> list[Any]:
    """Output, log-sum-exp, gradients and what rounding leaves of sinks', in float64; seen is (B, T, S)."""
    q, k, v, dout, dlse = (np.asarray(x, np.float64) for x in (q, k, v, dout, dlse))
    group = q.shape[2] // k.shape[2]
    q, dout = (x.transpose(0, 2, 1, 3) for x in (q, dout))
    k, v = (np.repeat(x.transpose(0, 2, 1, 3), group, axis=1) for x in (k, v))
    product = q @ k.swapaxes(2, 3) * scale
    score = product if softcap is None else softcap * np.tanh(product / softcap)
    slope = 1.0 if softcap is None else 1 - (score / softcap) ** 2
    score = np.where(seen[:, None], score, -np.inf)
    sink = np.full(q.shape[1], -np.inf) if sinks is None else np.asarray(sinks, np.float64)
    sink = sink[None, :, None, None]
    top = np.maximum(np.maximum(score.max(-1, keepdims=True), sink), -1e300)
    weight, sink = np.exp(score - top), np.exp(sink - top)
    total = weight.sum(-1, keepdims=True) + sink
    empty = total == 0
    weight, sink = weight / np.where(empty, 1, total), sink / np.where(empty, 1, total)
    with np.errstate(divide="ignore"):
        lse = np.where(empty, -np.inf, np.log(total) + top)[..., 0]
    dweight = dout @ v.swapaxes(2, 3)
    delta = (weight * dweight).sum(-1, keepdims=True) - np.where(empty, 0, dlse[..., None])
    dscore = weight * (dweight - delta) * slope * scale
    batch, heads, keys, width = k.shape
    grouped = (batch, heads // group, group, keys, width)
    grads = [
        dscore @ k,
        *(x.reshape(grouped).sum(2) for x in (dscore.swapaxes(2, 3) @ q, weight.swapaxes(2, 3) @ dout)),
    ]
    values = weight @ v
    # A sink's gradient is a sum over queries whose terms cancel: what rounding `out` leaves of it.
    rest = ROUNDING * np.linalg.norm(sink * values * dout)
    out = [values, *grads]
    out, dq, dk, dv = (x.transpose(0, 2, 1, 3) for x in out)
    return [out, lse, dq, dk, dv, -(sink * delta).sum((0, 2, 3)), rest]


def error(value, truth) -> float:
    """Relative error in the Frobenius norm over what is finite; infinite where what is not finite differs."""
    value, truth = np.asarray(value, np.float64), np.asarray(truth, np.float64)
    finite = np.isfinite(truth)
    if (np.isfinite(value) != finite).any():
        return float("inf")
    return float(np.linalg.norm(value[finite] - truth[finite]) / max(np.linalg.norm(truth[finite]), 1e-30))


def check(case: tuple, ours: Implementation) -> list[dict[str, Any]]:
    """The report of one case in each form of the backward: its title, and of each output its ratio to the bar."""
    width, tokens, (heads, kv_heads), mask = case
    options: dict[str, Any] = {"causal": True, "window": None, "softcap": None} | MASKS[mask]
    documents, with_sinks = options.pop("documents", False), options.pop("sinks", False)
    keys = tokens + options.pop("more_keys", 0)
    shapes = [(2, tokens, heads, width), *[(2, keys, kv_heads, width)] * 2, (2, tokens, heads, width)]
    ids = None
    if documents:
        third = tokens // 3
        ids = jnp.asarray(np.repeat([1, 2, 0], [third, tokens - third - third // 4, third // 4])[None].repeat(2, 0))

    @jax.jit
    def draw(number):
        draws = jax.random.split(jax.random.key(1000 * number + tokens + width), 6)
        q, k, v, dout = (jax.random.normal(key, s, jnp.bfloat16) for key, s in zip(draws, shapes, strict=False))
        sinks = jax.random.normal(draws[5], (heads,)) if with_sinks else None
        return q, k, v, sinks, (dout, jax.random.normal(draws[4], (2, heads, tokens)))

    def program(implementation: Implementation, deterministic: bool):
        def attend(q, k, v, sinks):
            flags: dict[str, Any] = {"segment_ids": ids, "deterministic": deterministic, "return_lse": True}
            return flash_attention(q, k, v, sinks=sinks, implementation=implementation, **options, **flags)

        @jax.jit
        def both(q, k, v, sinks, cotangents):
            out, back = jax.vjp(attend, q, k, v, sinks)
            return *out, *back(cotangents)

        return both

    seen = attention_mask(tokens, keys, options["causal"], options["window"], ids, ids)
    seen = np.ones((1, tokens, keys), bool) if seen is None else np.asarray(seen)

    def exact(q, k, v, sinks, cotangents):
        dout, dlse = cotangents
        return oracle(q, k, v, sinks, dout, dlse, seen, width**-0.5, options["softcap"])

    inputs = [draw(number) for number in range((DRAWS_OF_SINKS if with_sinks else DRAWS)[tokens])]
    forms = {"fused": False, "pair": True} if width in FUSED_WIDTHS else {"pair": True}
    dense, *mine = (program(*which) for which in (("xla", True), *((ours, form) for form in forms.values())))
    with ThreadPoolExecutor(1) as aside:
        truth = aside.submit(lambda: [exact(*each) for each in inputs])
        dense, *mine = (_joined([run(*each) for each in inputs]) for run in (dense, *mine))
    *truth, rest = _joined(truth.result())
    floors = dict(FLOOR)
    if with_sinks and rest is not None and truth[-1] is not None:
        floors["ds"] = 1.5 * float(np.linalg.norm(rest) / max(np.linalg.norm(truth[-1]), 1e-30))
    reports = []
    for form, got in zip(forms, mine, strict=True):
        errors = {
            name: (error(one, exact), error(its, exact))
            for name, one, its, exact in zip(NAMES, got, dense, truth, strict=True)
            if one is not None
        }
        ratios = {name: one / max(its, floors.get(name, 1e-7) / 1.5) for name, (one, its) in errors.items()}
        words = "  ".join(f"{name} {one:.1e}/{its:.1e}" for name, (one, its) in errors.items())
        title = f"D{width} T{tokens} N{heads} K{kv_heads} {mask}, {form}"
        reports.append({"title": title, "ratios": ratios, "words": words})
    return reports


def _joined(results: list) -> list[np.ndarray | None]:
    """Each output of several draws, end to end."""
    return [
        None if each[0] is None else np.concatenate([np.asarray(one, np.float64).ravel() for one in each])
        for each in zip(*results, strict=True)
    ]


def cases() -> list[tuple]:
    """Every width with every length and mask, heads in turn; the first quarter has each mask at each width."""
    chosen = []
    for turn, (m, mask), (w, width) in itertools.product(range(len(LENGTHS)), enumerate(MASKS), enumerate(WIDTHS)):
        chosen.append((width, LENGTHS[(turn + m + w) % len(LENGTHS)], HEADS[len(chosen) % len(HEADS)], mask))
    return chosen


def work(share: list[tuple], ours: Implementation) -> None:
    """Checks a share of the cases; prints each by its name before, and its reports after."""
    for case in share:
        print(json.dumps({"begins": str(case)}), flush=True)
        try:
            reports = check(case, ours)
        except Exception as broken:  # whatever the compiler or the device says; the other cases go on
            words = f"{type(broken).__name__}: {str(broken)[:300]}"
            reports = [{"title": str(case), "ratios": {"out": float("inf")}, "words": words}]
        print(json.dumps({"reports": reports}), flush=True)


def listen(process: subprocess.Popen, reports: list, unfinished: dict) -> None:
    """Collects what a process prints."""
    for line in process.stdout or ():
        said = json.loads(line)
        unfinished[process.pid] = said.get("begins")
        reports += said.get("reports", [])


def main() -> int:
    """Starts the processes and reports what they found until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1e9, help="until the last case")
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--first", type=int, default=0, help="the case to begin with")
    parser.add_argument("--last", type=int, help="the case to end before")
    parser.add_argument("--masks", nargs="*", choices=list(MASKS), default=list(MASKS), help="which; default all")
    parser.add_argument("--widths", nargs="*", type=int, choices=WIDTHS, default=WIDTHS, help="which; default all")
    parser.add_argument("--ours", default="mosaic_gpu", help="xla tries this program itself, without a GPU")
    parser.add_argument("--out", type=Path, default=Path(os.devnull), help="where each case's errors are written")
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    chosen = cases()[options.first : options.last]
    chosen = [case for case in chosen if case[-1] in options.masks and case[0] in options.widths]
    if options.share is not None:
        work(chosen[options.share :: options.processes], options.ours)
        return 0
    begun, reports, unfinished = time.monotonic(), [], {}
    command = [sys.executable, __file__, *sys.argv[1:], "--share"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    running = [
        subprocess.Popen([*command, str(n)], env=os.environ | ENVIRONMENT, **pipes) for n in range(options.processes)
    ]
    ears = [threading.Thread(target=listen, args=(process, reports, unfinished)) for process in running]
    for ear in ears:
        ear.start()
    for ear in ears:
        ear.join(max(0.0, begun + options.seconds - time.monotonic()))
    for process in running:
        process.kill()
    return summarize(reports, [name for name in unfinished.values() if name], len(chosen), options.out)


def summarize(reports: list[dict], unfinished: list[str], count: int, out: Path) -> int:
    """Prints failures and the worst ratios; 1 where there are failures or no case."""
    failed = [each for each in reports if max(each["ratios"].values()) > 1.5]
    out.write_text("".join(f"{each['title']}: {each['words']}\n" for each in reports))
    for each in failed:
        print("FAIL", each["title"], each["words"], sep="  ")
    for name in NAMES:
        if known := [(each["ratios"][name], each["title"]) for each in reports if name in each["ratios"]]:
            ratio, title = max(known)
            print(f"worst {name:<3} {ratio:5.2f} of dense bf16's error (bar 1.5): {title}")
    print(f"{len(reports) - len(failed)} of {len(reports)} within the bar; of {count} shapes not ended: {unfinished}")
    return int(bool(failed) or not reports)


if __name__ == "__main__":
    sys.exit(main())
