"""Checks the gated products of experts on a GPU against float64, and times them beside separate products.

Usage: python scripts/check_gated.py [--time SHAPE ...]   (status 1: an error above its bar)

Each case compares a block's result and the gradients of its input, its rows' weights, down-projections and dense
weights with float64 on the host; the bar is 1.5 times the error of the plain form ("xla") on the same inputs. Every
case runs twice and must give the same bits. With --time, milliseconds of the blocks of real models with adapters,
forward and forward with gradients, gated in the products and by XLA between them.
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from check_attention import error

from pallas_kernels import Implementation
from pallas_kernels.bench import median_seconds
from pallas_kernels.grouped_matmul import GroupedLayer, grouped_layers, grouped_mlp

RANK = 16
SHAPES = {  # rows, groups, D, F
    "OLMoE": (131072, 64, 2048, 1024),
    "Qwen3-30B-A3B": (65536, 128, 2048, 768),
    "Mixtral": (16384, 8, 4096, 14336),
}
ROUTINGS = {  # sizes
    "even": [256] * 8,
    "ragged": [1, 17, 130, 9, 600, 63, 65, 3],
    "odd rows": [1, 17, 130, 9, 601, 63, 65, 3],
    "empty experts": [0, 300, 0, 0, 516, 0],
    "all to one": [0, 0, 1504, 0],
    "one row": [0, 1, 0],
    "one more": [2, 3, 5, 9, 17, 33, 65, 130],
    "more groups than rows": [1, 0] * 40,
    "many": [2500, 3, 1001, 0, 600],
}
WIDTHS = ((64, 64), (128, 256), (448, 320), (1024, 768))  # D, F


def draw(rows: int, groups: int, width: int, out: int):
    """x, the layers' weights and adapters, weight of each row, and the result's gradient."""
    keys = iter(jax.random.split(jax.random.key(rows + width), 12))

    def normal(*shape, scale=1.0, dtype=jnp.bfloat16):
        return (jax.random.normal(next(keys), shape, jnp.float32) * scale).astype(dtype)

    sizes = (out, width), (out, width), (width, out)
    ws = [normal(groups, high, wide, scale=wide**-0.5) for high, wide in sizes]
    adapters = [
        (normal(groups, RANK, wide, scale=wide**-0.5, dtype=jnp.float32), normal(groups, high, RANK, dtype=jnp.float32))
        for high, wide in sizes
    ]
    weight = jax.random.uniform(next(keys), (rows,), jnp.float32)
    return normal(rows, width), ws, adapters, weight, normal(rows, width)


def block(x, ws, adapters, weight, sizes, implementation: Implementation | None, apart: bool = False):
    """The block, with gating in the products or apart."""
    factor = jnp.full(len(sizes), 0.25)
    gate, up, down = (GroupedLayer(w, a, b, factor) for w, (a, b) in zip(ws, adapters, strict=True))
    if not apart:
        return grouped_mlp(x, gate, up, down, weight, sizes, implementation=implementation)
    g, u = grouped_layers(x, (gate, up), sizes, implementation=implementation)
    hidden = jax.nn.silu(g.astype(jnp.float32)) * u.astype(jnp.float32) * weight[:, None]
    return grouped_layers(hidden.astype(x.dtype), (down,), sizes, implementation=implementation)[0]


@functools.partial(jax.jit, static_argnames=("implementation", "apart", "whole"))
def run(x, ws, adapters, weight, sizes, dy, implementation: Implementation | None, apart=False, whole=True):
    """The result and gradients of x, weight, adapters and, of the whole, ws."""

    def of(x, weight, adapters, trained=None):
        return block(x, ws if trained is None else trained, adapters, weight, sizes, implementation, apart)

    y, back = jax.vjp(of, x, weight, adapters, *([ws] if whole else []))
    return y, back(dy)


def oracle(x, ws, adapters, weight, sizes, dy):
    """Result and the same gradients in float64."""
    x, ws, adapters, weight, dy = jax.tree.map(
        lambda a: np.asarray(a.astype(jnp.float32), np.float64), (x, ws, adapters, weight, dy)
    )
    y, dx, dweight, dws = np.zeros_like(dy), np.zeros_like(x), np.zeros_like(weight), [np.zeros_like(w) for w in ws]
    start = 0
    for e, size in enumerate(sizes):
        rows, start = slice(start, start + size), start + size
        gate_w, up_w, down_w = (w[e] + 0.25 * b[e] @ a[e] for w, (a, b) in zip(ws, adapters, strict=True))
        gate, up, scale = x[rows] @ gate_w.T, x[rows] @ up_w.T, weight[rows, None]
        sigmoid = 1 / (1 + np.exp(-gate))
        hidden = gate * sigmoid * up
        y[rows], d = (hidden * scale) @ down_w.T, dy[rows] @ down_w
        dweight[rows] = np.sum(d * hidden, axis=1)
        d *= scale
        dgate, dup = d * up * sigmoid * (1 + gate * (1 - sigmoid)), d * gate * sigmoid
        dx[rows] = dgate @ gate_w + dup @ up_w
        for dw, over, below in zip(dws, (dgate, dup, dy[rows]), (x[rows], x[rows], hidden * scale), strict=True):
            dw[e] = over.T @ below
    of_adapters = [
        (0.25 * b.swapaxes(1, 2) @ dw, 0.25 * dw @ a.swapaxes(1, 2)) for dw, (a, b) in zip(dws, adapters, strict=True)
    ]
    return y, (dx, dweight, of_adapters, dws)


def check(name: str, sizes, width: int, out: int) -> bool:
    """Prints and judges the errors of one case."""
    args = draw(sum(sizes), len(sizes), width, out)
    on_device = jnp.asarray(sizes, jnp.int32)
    ours, again, plain = (
        run(*args[:4], on_device, args[4], implementation=kind) for kind in ("mosaic_gpu", "mosaic_gpu", "xla")
    )
    truth = oracle(*args[:4], sizes, args[4])
    words, good = [], True
    for (path, got), second, its, exact in zip(
        jax.tree.leaves_with_path(ours), *(jax.tree.leaves(tree) for tree in (again, plain, truth)), strict=True
    ):
        mine, other = (error(value.astype(jnp.float32), exact) for value in (got, its))
        fine = mine <= max(1.5 * other, 2e-6) and bool(jnp.array_equal(got, second)) and bool(jnp.isfinite(got).all())
        good &= fine
        words.append(f"{jax.tree_util.keystr(path)} {mine:.1e}/{other:.1e}{'' if fine else ' ERROR'}")
    print(f"{'ok  ' if good else 'FAIL'} {name} E{len(sizes)} D{width} F{out} " + " ".join(words), flush=True)
    return good


def time_blocks(names: list[str]) -> None:
    """Prints milliseconds of each named shape, gated in the products and apart."""
    for name in names:
        rows, groups, width, out = SHAPES[name]
        x, ws, adapters, weight, dy = draw(rows, groups, width, out)
        owner = np.random.default_rng(0).integers(0, groups, rows)
        sizes = jnp.asarray(np.bincount(owner, minlength=groups), jnp.int32)
        words = []
        for apart in (False, True):
            forward = jax.jit(functools.partial(block, implementation=None, apart=apart))
            seconds = median_seconds(forward, x, ws, adapters, weight, sizes)
            both = functools.partial(run, implementation=None, apart=apart, whole=False)
            more = median_seconds(both, x, ws, adapters, weight, sizes, dy)
            words.append(f"{'apart' if apart else 'gated'} {1e3 * seconds:.2f} and {1e3 * more:.2f} ms")
        print(f"{name} M{rows} E{groups} D{width} F{out}, forward and with gradients: " + ", ".join(words), flush=True)


def main() -> int:
    """Runs every case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--time", nargs="+", choices=SHAPES, default=[], help="time real models' blocks instead")
    if names := parser.parse_args().time:
        time_blocks(names)
        return 0
    good = [
        check(name, sizes, *widths) for i, (name, sizes) in enumerate(ROUTINGS.items()) for widths in WIDTHS[i % 2 :: 2]
    ]
    print(f"{sum(good)} of {len(good)} cases within the bar")
    return int(not all(good))


if __name__ == "__main__":
    sys.exit(main())
