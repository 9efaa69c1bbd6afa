"""Checks the Hopper attention kernels on a GPU against float64, over widths, groups, lengths and masks.

Usage: python scripts/check_attention.py [--out FILE]     (exit status 1 where an error is above its bar)

Each case compares the output, the log-sum-exp and the gradients of q, k, v and sinks with the definition in float64 on
the host, over several draws; the bar is 1.5 times the error of dense bf16 attention ("xla") on the same inputs.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pallas_kernels import Implementation
from pallas_kernels.flash_attention import flash_attention
from pallas_kernels.flash_attention.reference import attention_mask

WIDTHS, LENGTHS, HEADS = (64, 96, 128, 256), (1, 127, 129, 1000), ((4, 4), (8, 2), (8, 1))
MASKS: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window": 50},
    "softcap": {"softcap": 5.0},
    "documents": {"documents": True},
    "documents, window, sinks": {"documents": True, "window": 70, "sinks": True},
    "sinks, softcap": {"sinks": True, "softcap": 5.0},
    "more keys": {"more_keys": 77},
}
DRAWS = 4  # of random numbers: an error of few numbers, a sink's gradient say, would be a draw itself
NAMES = ("out", "lse", "dq", "dk", "dv", "ds")
FLOOR = {"lse": 1e-6}  # f32 rounding of sums; the dense log-sum-exp is in f32 as well


def oracle(q, k, v, sinks, dout, dlse, seen, scale: float, softcap: float | None) -> list[np.ndarray]:
    """Output, log-sum-exp and gradients in float64, from the definition; seen is (B, T, S)."""
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
    out = [weight @ v, *grads]
    out, dq, dk, dv = (x.transpose(0, 2, 1, 3) for x in out)
    return [out, lse, dq, dk, dv, -(sink * delta).sum((0, 2, 3))]


def error(value, truth) -> float:
    """Relative error in the Frobenius norm over what is finite; infinite where what is not finite differs."""
    value, truth = np.asarray(value, np.float64), np.asarray(truth, np.float64)
    finite = np.isfinite(truth)
    if (np.isfinite(value) != finite).any():
        return float("inf")
    return float(np.linalg.norm(value[finite] - truth[finite]) / max(np.linalg.norm(truth[finite]), 1e-30))


def check(case: tuple) -> tuple[str, bool]:
    """The report of one case and whether every error is within its bar."""
    width, tokens, (heads, kv_heads), mask, deterministic = case
    options: dict[str, Any] = {"causal": True, "window": None, "softcap": None} | MASKS[mask]
    documents, with_sinks = options.pop("documents", False), options.pop("sinks", False)
    keys = tokens + options.pop("more_keys", 0)
    shapes = [(2, tokens, heads, width), *[(2, keys, kv_heads, width)] * 2, (2, tokens, heads, width)]
    ids = None
    if documents:
        third = tokens // 3
        ids = jnp.asarray(np.repeat([1, 2, 0], [third, tokens - third - third // 4, third // 4])[None].repeat(2, 0))

    def draw(number: int):
        draws = jax.random.split(jax.random.key(1000 * number + tokens + width), 6)
        q, k, v, dout = (jax.random.normal(key, s, jnp.bfloat16) for key, s in zip(draws, shapes, strict=False))
        sinks = jax.random.normal(draws[5], (heads,)) if with_sinks else None
        return q, k, v, sinks, (dout, jax.random.normal(draws[4], (2, heads, tokens)))

    def program(implementation: Implementation):
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

    inputs = [draw(number) for number in range(DRAWS)]
    runs = (program("mosaic_gpu"), program("xla"), exact)
    good, words = True, []
    for name, *values in zip(NAMES, *(_joined([run(*each) for each in inputs]) for run in runs), strict=True):
        ours, dense, truth = values
        if ours is None:
            continue
        mine, its = error(ours, truth), error(dense, truth)
        within = mine <= max(1.5 * its, FLOOR.get(name, 1e-7))
        good &= within
        words.append(f"{name} {mine:.1e}/{its:.1e}{'' if within else ' FAIL'}")
    form = "pair" if deterministic else "fused"
    title = f"D{width} T{tokens} N{heads} K{kv_heads} {mask}, {form}"
    return f"{'ok  ' if good else 'FAIL'} {title:<52} " + "  ".join(words), good


def _joined(results: list) -> list[np.ndarray | None]:
    """Each output of several draws, end to end."""
    return [
        None if each[0] is None else np.concatenate([np.asarray(one, np.float64).ravel() for one in each])
        for each in zip(*results, strict=True)
    ]


def checked(case: tuple) -> tuple[str, bool]:
    """`check`, with a case that does not run reported as one that fails."""
    try:
        return check(case)
    except Exception as broken:  # whatever the compiler or the device says; the other cases go on
        return f"FAIL {case}: {type(broken).__name__}: {str(broken)[:300]}", False


def cases() -> list[tuple]:
    """Every width with every length and mask, heads in turn; the widths of the fused backward in both forms."""
    chosen = []
    for i, (width, tokens, mask) in enumerate(itertools.product(WIDTHS, LENGTHS, MASKS)):
        forms = (True, False) if width in (64, 128) else (True,)
        chosen += [(width, tokens, HEADS[i % len(HEADS)], mask, form) for form in forms]
    return chosen


def main() -> int:
    """Runs every case, programs compiled side by side."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="where each case's errors are written as well")
    parser.add_argument("--every", type=int, default=1, help="check every n-th case only")
    parser.add_argument("--first", type=int, default=0, help="the case that begins the count")
    options = parser.parse_args()
    chosen = cases()[options.first :: options.every]
    with ThreadPoolExecutor(12) as pool, (options.out or Path(os.devnull)).open("w") as out:
        passed = 0
        for line, good in pool.map(checked, chosen):
            passed += good
            print(line, file=out, flush=True)
            if not (good and options.out):
                print(line, flush=True)
        summary = f"{passed} of {len(chosen)} cases within the bar"
        print(summary, file=out)
    print(summary)
    return int(passed < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
