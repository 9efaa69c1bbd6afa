"""Checks the Hopper kernels of the grouped product on a GPU against float64, over adversarial routings and widths.

Usage: python scripts/check_grouped_matmul.py [--quick] [--layers] [--threads N]   (status 1: an error above its bar)

Each case compares the product and the gradients of x and w with the definition in float64 on the host; the bar is 1.5
times the error of the plain form ("xla") on the same inputs. Rows of no group hold NaN in x and in the output's
gradient, and freed memory is full of NaN, so that what is not written shows. The shapes of real models are compared in
rows drawn at random. Every case runs twice and must give the same bits. The cases called layers are two projections
with adapters of one input: sums of products.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from check_attention import error

from pallas_kernels import Implementation
from pallas_kernels.grouped_matmul import GroupedLayer, explain, grouped_layers, grouped_matmul

ROUTINGS = {  # sizes, and rows of no group behind them
    "even": ([256] * 8, 0),
    "ragged": ([1, 17, 130, 9, 600, 63, 65, 2], 0),
    "empty experts": ([0, 300, 0, 0, 511, 0], 0),
    "all to one": ([0, 0, 1500, 0], 0),
    "all to the first, one row beyond": ([777, 0], 1),
    "one row": ([0, 1, 0], 0),
    "one row of many in no group": ([0, 1, 0], 300),
    "powers of two": ([1, 2, 4, 8, 16, 32, 64, 128, 256], 0),
    "one less": ([1, 3, 7, 15, 31, 63, 127, 255], 0),
    "one more": ([2, 3, 5, 9, 17, 33, 65, 129], 61),
    "nothing routed": ([0, 0], 200),
    "more groups than rows": ([1, 0] * 40, 0),
    "trailing rows": ([100, 0, 27], 173),
    "many tiles": ([5000, 3, 9001, 0, 2500], 7),
}
WIDTHS = ((64, 64), (128, 256), (448, 320), (1024, 768), (200, 100), (2048, 16))  # D, F
SHAPES = {  # of real models: rows, groups, D, F
    "OLMoE, gate": (65536, 64, 2048, 1024),
    "Mixtral, gate": (16384, 8, 4096, 14336),
    "Mixtral, down": (16384, 8, 14336, 4096),
    "Qwen3-30B-A3B, gate": (65536, 128, 2048, 768),
    "gpt-oss-20b": (32768, 32, 2880, 2880),
    "OLMoE, one token": (8, 64, 2048, 1024),
}
LAYERS = (
    ("ragged", (448, 320)),
    ("empty experts", (128, 256)),
    ("one more", (1024, 768)),
    ("many tiles", (2048, 1024)),
)
NAMES = ("y", "dx", "dw")
FLOOR = 2e-6  # of f32 results: the tensor cores' sums drop bits that f32 would keep
DRAWN = 48  # rows of a large result that are compared


@functools.partial(jax.jit, static_argnames="implementation")
def run(x, w, sizes, dy, implementation: Implementation):
    """The product and both gradients."""
    y, back = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, implementation=implementation), x, w)
    return y, *back(dy)


@functools.partial(jax.jit, static_argnames="implementation")
def run_in_layers(x, w, sizes, dy, implementation: Implementation):
    """The same inside a loop over one layer whose forward pass is recomputed, and under vmap."""

    def layer(_, w):
        return jax.vmap(lambda x: grouped_matmul(x, w, sizes, implementation=implementation))(x[None])[0], None

    y, back = jax.vjp(lambda w: jax.lax.scan(jax.checkpoint(layer), jnp.zeros_like(dy), w[None])[0], w)
    return y, None, *back(dy)


def draw(rows: int, used: int, groups: int, width: int, out: int, dtype, w_dtype):
    """x, w and dy, with NaN in the rows of no group; and memory full of NaN given back."""
    keys = jax.random.split(jax.random.key(rows + width), 3)
    x = jax.random.normal(keys[0], (rows, width), dtype).at[used:].set(jnp.nan)
    w = jax.random.normal(keys[1], (groups, out, width), w_dtype)
    dy = jax.random.normal(keys[2], (rows, out), dtype).at[used:].set(jnp.nan)
    waste = [jnp.full(size, jnp.nan, jnp.bfloat16) for size in (rows * out, rows * width, groups * out * width) * 2]
    jax.block_until_ready(waste)
    return x, w, dy


def oracle(x, w, sizes, dy, rng) -> list[tuple[tuple, np.ndarray]]:
    """Parts of the product and the gradients in float64, each with the index that it is the value at."""
    x, w, dy = (np.asarray(array.astype(jnp.float32)) for array in (x, w.astype(x.dtype), dy))
    ends = np.cumsum(sizes)
    used = int(ends[-1])
    rows = np.arange(len(x)) if len(x) <= 20000 else np.sort(rng.choice(len(x), DRAWN, replace=False))
    y, dx = np.zeros((len(rows), w.shape[1])), np.zeros((len(rows), w.shape[2]))
    owner = np.searchsorted(ends, rows, side="right")
    for e in np.unique(owner[rows < used]):
        mine, wide = owner == e, w[e].astype(np.float64)
        y[mine] = x[rows[mine]].astype(np.float64) @ wide.T
        dx[mine] = dy[rows[mine]].astype(np.float64) @ wide
    whole = w.size <= 2**23
    groups = np.arange(len(sizes)) if whole else rng.choice(len(sizes), min(len(sizes), 6), replace=False)
    heights = np.arange(w.shape[1]) if whole else np.sort(rng.choice(w.shape[1], DRAWN, replace=False))
    dw = np.zeros((len(groups), len(heights), w.shape[2]))
    for place, e in enumerate(groups):
        span = slice(ends[e] - sizes[e], ends[e])
        dw[place] = dy[span][:, heights].astype(np.float64).T @ x[span].astype(np.float64)
    return [((rows,), y), ((rows,), dx), (np.ix_(groups, heights), dw)]


def check(name: str, sizes, spare: int, width: int, out: int, dtype=jnp.bfloat16, w_dtype=None, layers=False) -> bool:
    """Prints and judges the errors of one case."""
    sizes, rng = np.asarray(sizes), np.random.default_rng(0)
    rows = int(sizes.sum()) + spare
    x, w, dy = draw(rows, rows - spare, len(sizes), width, out, dtype, w_dtype or dtype)
    on_device = jnp.asarray(sizes, jnp.int32)
    form = run_in_layers if layers else run
    ours, again = (form(x, w, on_device, dy, implementation="mosaic_gpu") for _ in range(2))
    dense = form(x, w, on_device, dy, implementation="xla")
    good, words = True, []
    parts = oracle(x, w, sizes, dy, rng)
    for label, got, second, plain, (at, truth) in zip(NAMES, ours, again, dense, parts, strict=True):
        if got is None:
            continue
        mine, its = (error(value[at].astype(jnp.float32), truth) for value in (got, plain))
        within = mine <= max(1.5 * its, FLOOR)
        same = bool(jnp.array_equal(got, second))
        finite = bool(jnp.all(jnp.isfinite(got)))
        zero = label == "dw" or not bool(jnp.any(got[rows - spare :]))
        faults = [
            word for word, fine in (("ERROR", within), ("DIFFERS", same), ("NAN", finite), ("ROWS", zero)) if not fine
        ]
        good &= not faults
        words.append(f"{label} {mine:.1e}/{its:.1e}{' ' + ' '.join(faults) if faults else ''}")
    title = f"{name} M{rows} E{len(sizes)} D{width} F{out} {jnp.dtype(dtype).name}{' layers' if layers else ''}"
    print(f"{'ok  ' if good else 'FAIL'} {title:<72} " + "  ".join(words), flush=True)
    return good


RANK = 16


@functools.partial(jax.jit, static_argnames="implementation")
def run_layers(x, ws, adapters, sizes, dys, implementation: Implementation):
    """Two layers with adapters, and the gradients of their input, of one down-projection and of one up-projection."""

    def layers(x, adapters):
        factor = jnp.full(len(sizes), 2.0)
        both = [GroupedLayer(w, a, b, factor) for w, (a, b) in zip(ws, adapters, strict=True)]
        return grouped_layers(x, both, sizes, implementation=implementation)

    ys, back = jax.vjp(layers, x, adapters)
    dx, ((da, _), (_, db)) = back(dys)
    return ys[0], ys[1], dx, da, db


def layers_oracle(x, ws, adapters, sizes, dys) -> list[np.ndarray]:
    """The same in float64."""
    wide = jax.tree.map(lambda array: np.asarray(array.astype(jnp.float32), np.float64), (x, ws, adapters, dys))
    x, ws, adapters, dys = wide
    ys, dx = [np.zeros_like(dy) for dy in dys], np.zeros_like(x)
    da, db, start = np.zeros_like(adapters[0][0]), np.zeros_like(adapters[1][1]), 0
    for e, size in enumerate(sizes):
        rows, start = slice(start, start + size), start + size
        for i, (w, (a, b)) in enumerate(zip(ws, adapters, strict=True)):
            dense, dw = w[e] + 2 * b[e] @ a[e], dys[i][rows].T @ x[rows]
            ys[i][rows] = x[rows] @ dense.T
            dx[rows] += dys[i][rows] @ dense
            if i == 0:
                da[e] = 2 * b[e].T @ dw
            else:
                db[e] = 2 * dw @ a[e].T
    return [*ys, dx, da, db]


def check_layers(name: str, sizes, spare: int, width: int, out: int) -> bool:
    """Prints and judges the errors of sums of products."""
    rows, used, groups = sum(sizes) + spare, sum(sizes), len(sizes)
    keys = iter(jax.random.split(jax.random.key(rows + width), 9))

    def normal(*shape, dtype=jnp.bfloat16):
        return jax.random.normal(next(keys), shape, dtype)

    x = normal(rows, width).at[used:].set(jnp.nan)
    ws, dys = (normal(groups, out, width), normal(groups, out, width)), (normal(rows, out), normal(rows, out))
    dys = tuple(dy.at[used:].set(jnp.nan) for dy in dys)
    adapters = tuple(
        (normal(groups, RANK, width, dtype=jnp.float32) * width**-0.5, normal(groups, out, RANK, dtype=jnp.float32))
        for _ in range(2)
    )
    on_device = jnp.asarray(sizes, jnp.int32)
    ours, again = (run_layers(x, ws, adapters, on_device, dys, implementation="mosaic_gpu") for _ in range(2))
    dense = run_layers(x, ws, adapters, on_device, dys, implementation="xla")
    words, good = [], True
    for label, got, second, plain, truth in zip(
        ("y0", "y1", "dx", "da", "db"),
        *(ours, again, dense, layers_oracle(x, ws, adapters, sizes, dys)),
        strict=True,
    ):
        mine, its = (error(value.astype(jnp.float32), truth) for value in (got, plain))
        fine = mine <= max(1.5 * its, FLOOR) and bool(jnp.array_equal(got, second)) and bool(jnp.isfinite(got).all())
        good &= fine
        words.append(f"{label} {mine:.1e}/{its:.1e}{'' if fine else ' ERROR'}")
    title = f"layers: {name} M{rows} E{groups} D{width} F{out}"
    print(f"{'ok  ' if good else 'FAIL'} {title:<72} " + "  ".join(words), flush=True)
    return good


def cases(quick: bool) -> Iterator[tuple[Any, ...]]:
    """Arguments of `check`: every routing with two widths in turn, other dtypes, and the shapes of real models."""
    for i, (name, (sizes, spare)) in enumerate(ROUTINGS.items()):
        for width, out in WIDTHS[i % 2 :: 2 if not quick else len(WIDTHS)]:
            yield name, sizes, spare, width, out
    for name in ("ragged", "one more"):
        yield name, *ROUTINGS[name], 448, 320, jnp.float16
        yield name, *ROUTINGS[name], 448, 320, jnp.bfloat16, jnp.float32
        yield name, *ROUTINGS[name], 448, 320, jnp.bfloat16, None, True
    rng = np.random.default_rng(1)
    for name, (rows, groups, width, out) in itertools.islice(SHAPES.items(), 1 if quick else None):
        yield name, np.bincount(rng.integers(0, groups, rows), minlength=groups), 0, width, out


def main() -> int:
    """Runs every case; one that cannot run is reported and the next ones go on."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="each routing with one width, one shape of a real model")
    parser.add_argument("--layers", action="store_true", help="sums of products alone")
    parser.add_argument("--threads", type=int, default=8, help="cases at a time")
    options = parser.parse_args()
    print(explain(jnp.zeros((64, 64), jnp.bfloat16), jnp.zeros((1, 64, 64), jnp.bfloat16)))

    def run_one(case: tuple) -> bool:
        try:
            return check_layers(*case[1:]) if case[0] == "layers" else check(*case)
        except Exception:
            print(f"FAIL {case[0]}: {traceback.format_exc(limit=-3)[-1500:]}", flush=True)
            return False

    with ThreadPoolExecutor(options.threads) as pool:  # programs are compiled side by side
        chosen = [("layers", name, *ROUTINGS[name], *size) for name, size in LAYERS]
        results = list(pool.map(run_one, chosen if options.layers else [*chosen, *cases(options.quick)]))
    print(f"{sum(results)} of {len(results)} cases within the bar")
    return int(not all(results))


if __name__ == "__main__":
    sys.exit(main())
