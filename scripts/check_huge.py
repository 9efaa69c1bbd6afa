"""Checks operations on arrays of more than 2^31 elements, and of just fewer, on a GPU.

Usage: python scripts/check_huge.py [NAME ...] [--elements N]     (exit status 1: an error above its bar)

Rows repeat: row r of an input is row r % PERIOD of a small one, so that every row of a result has a row of the small
input's to be equal to, which plain jnp computes in f32. A result may be off by a unit in the last place of its dtype, a
loss by 1e-6 of itself and 1e-5, a token's gradient by 2^-7 of its length (a dense bf16 head's is by 2e-3). What runs is
what `implementation=None` picks; kernels refuse what their indices do not reach.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pallas_kernels.linear_cross_entropy import linear_cross_entropy
from pallas_kernels.rms_norm import rms_norm
from pallas_kernels.rope import rope
from pallas_kernels.swiglu import swiglu

PERIOD, HEAD = 1031, 128  # rows; a head's channels
WIDTH, VOCABULARY = 4096, 128256
NAMES = ("rms_norm", "swiglu", "rope", "loss")


def normal(seed: int, *shape: int, dtype=jnp.bfloat16) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def operations(rows: int, width: int) -> Iterator[tuple[str, Callable, Callable, list[jax.Array]]]:
    """(name, operation, its definition, small inputs) of what takes rows one by one; gradients are by the first."""
    scale = 1 + normal(3, width, dtype=jnp.float32) / 4

    def plain_norm(x):
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * scale

    yield "rms_norm", lambda x: rms_norm(x, scale, eps=1e-5), plain_norm, [normal(0, PERIOD, width)]
    pair = [normal(0, PERIOD, width), normal(1, PERIOD, width)]
    yield "swiglu", swiglu, lambda gate, up: jax.nn.silu(gate) * up, pair
    angles = jnp.linspace(0.0, 6.0, PERIOD * HEAD // 2).reshape(PERIOD, HEAD // 2)

    def turned(q):
        q, turns = q.reshape(1, len(q), -1, HEAD), angles[None, jnp.arange(rows) % PERIOD]
        return rope(q, q[:, :, :1], jnp.cos(turns), jnp.sin(turns))[0].reshape(q.shape[1], -1)

    def plain_rope(q):
        first, second = jnp.split(q.reshape(len(q), -1, HEAD), 2, axis=-1)
        cos, sin = (f(angles)[:, None] for f in (jnp.cos, jnp.sin))
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).reshape(len(q), -1)

    yield "rope", turned, plain_rope, [normal(0, PERIOD, width)]


def off(got: jax.Array, small: jax.Array) -> float:
    """The largest error of any row, in units in the last place of its dtype, against the small result in f32."""

    def of(got, small):
        want = small[jnp.arange(len(got)) % PERIOD]
        unit = jnp.maximum(jnp.abs(want), 1.0) * float(jnp.finfo(got.dtype).eps)
        return jnp.max(jnp.abs(got.astype(jnp.float32) - want) / unit)

    return float(jax.jit(of)(got, small))


def check_rows(elements: int, width: int, names: Sequence[str]) -> bool:
    """Each operation on just fewer elements than that, and on more."""
    good = True
    for rows in (elements // width - 8, elements // width + 8):
        for name, operation, plain, small in operations(rows, width):
            if name not in names:
                continue
            wide = [one.astype(jnp.float32) for one in small]
            want, back = jax.vjp(plain, *wide)
            (want_dx, *_) = back(wide[0])
            big = [jax.jit(lambda one, rows=rows: one[jnp.arange(rows) % PERIOD])(one) for one in small]
            y = off(jax.jit(operation)(*big), want)
            gradient = jax.jit(lambda *big, f=operation: jax.vjp(f, *big)[1](big[0])[0])
            dx = off(gradient(*big), want_dx)
            good &= max(y, dx) <= 1
            print(
                f"{'ok  ' if max(y, dx) <= 1 else 'FAIL'} {name} {rows} x {width}: y {y:.2f}, dx {dx:.2f}", flush=True
            )
    return good


def check_loss(elements: int, vocabulary: int) -> bool:
    """Losses by token, of more logits than that, with gradients and alone."""
    tokens, width = elements // vocabulary + 8, 512
    small, head = normal(0, PERIOD, width), normal(1, vocabulary, width) * width**-0.5
    labels = jax.random.randint(jax.random.key(2), (PERIOD,), 0, vocabulary)

    def plain(x):
        logits = jnp.einsum("md,vd->mv", x, head.astype(jnp.float32), precision="highest")
        found = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]
        return found.sum(), found

    (_, want), want_dx = jax.jit(jax.value_and_grad(plain, has_aux=True))(small.astype(jnp.float32))
    rows = jnp.arange(tokens) % PERIOD
    x, targets = small[rows][None], labels[rows][None]

    def loss(x):
        found = linear_cross_entropy(x, head, targets, frozen_head=True)
        return found.sum(), found[0]

    (_, by_token), dx = jax.jit(jax.value_and_grad(loss, has_aux=True))(x)
    alone = jax.jit(loss)(x)[1]
    worst = max(float(jnp.max(jnp.abs(each - want[rows]) / (1e-6 * want[rows] + 1e-5))) for each in (by_token, alone))
    length = jnp.linalg.norm(want_dx[rows], axis=-1)
    relative = float(jnp.max(jnp.linalg.norm(dx[0].astype(jnp.float32) - want_dx[rows], axis=-1) / length))
    good = worst <= 1 and relative <= 2**-7
    print(f"{'ok  ' if good else 'FAIL'} loss {tokens} x {vocabulary}: {worst:.2f}, dx {relative:.1e}", flush=True)
    return good


def main() -> int:
    """Runs every check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=NAMES, metavar="NAME", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--elements", type=int, default=2**31)
    options = parser.parse_args()
    if unknown := set(options.names) - set(NAMES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(NAMES)}")
    tiny = options.elements < 2**31  # to see that the script runs
    good = check_rows(options.elements, 4 * HEAD if tiny else WIDTH, options.names)
    if "loss" in options.names:
        good &= check_loss(options.elements, 1024 if tiny else VOCABULARY)
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
