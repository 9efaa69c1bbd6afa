"""Checks the Hopper kernels of the linear cross-entropy on a GPU against float64.

Usage: python scripts/check_linear_cross_entropy.py     (exit status 1 where a check fails)

The whole loss beside a dense bf16 head's: the loss, with gradients and alone, may be off by 1e-6 of itself, a gradient
by 1.05 times what the dense one's is. The head's product that gives exponentials alone, on vocabularies of real models,
with references far from the logits. The same bits must come twice.
"""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pallas_kernels._tiles import Tiles as ProductTiles
from pallas_kernels.linear_cross_entropy import linear_cross_entropy
from pallas_kernels.linear_cross_entropy.mosaic_gpu_exponentials import exponentials

VOCABULARIES = (128256, 151936, 262144, 32064)


def check_exponentials(vocabulary: int, pair: bool) -> tuple[str, bool]:
    """The head's product that gives exponentials, with references far above and below, beside the exact ones."""
    rng = np.random.default_rng(vocabulary)
    rows, width = 300, 512
    x = jnp.asarray(rng.standard_normal((rows, width)), jnp.bfloat16)
    head = jnp.asarray(2 * width**-0.5 * rng.standard_normal((vocabulary, width)), jnp.bfloat16)
    labels, reference = rng.integers(0, vocabulary, rows).astype(np.int32), np.full(rows, 5, np.float32)
    labels[:4], reference[4:6] = (-100, vocabulary, 0, vocabulary - 1), (-60, 60)
    program = jax.jit(functools.partial(exponentials, scale=0.5, tiles=ProductTiles(pair=pair)))
    first, second = program(x, head, labels, reference), program(x, head, labels, reference)
    same = all(bool((one == other).all()) for one, other in zip(first, second))
    powers, total, label_product = (np.asarray(one, np.float64) for one in first)
    z = np.asarray(x, np.float64) @ np.asarray(head, np.float64).T
    want = np.exp(0.5 * z) * 2.0 ** -reference[:, None].astype(np.float64)
    inside = np.flatnonzero((labels >= 0) & (labels < vocabulary))
    picked = np.zeros(rows)
    picked[inside] = z[inside, labels[inside]]
    zeros = bool((powers[inside, labels[inside]] == 0).all())
    want[inside, labels[inside]] = 0
    off = float(np.max(np.abs(powers[:rows] - want) / np.maximum(want, 1e-300)))
    sums = float(np.max(np.abs(total / want.sum(1) - 1)))
    label = float(np.max(np.abs(label_product - picked)))
    # bf16 rounds by 2^-8 of a value at most; f32 exponents of about 60 are off by 4e-6
    good = off <= 2**-8 * 1.01 and sums <= 5e-6 and label <= 1e-5 and zeros and same
    return f"powers off {off:.1e}, sums {sums:.1e}, labels {label:.1e}, zeros {zeros}, same twice {same}", good


def check_loss(
    vocabulary: int, frozen: bool, reduction: str, huge: bool = False, length: int = 301, chunk: int = 128
) -> tuple[str, bool]:
    """Loss and gradients with ignored tokens and ragged chunks, beside a dense bf16 head's.

    With `huge` one logit is out of the range of exponentials, so that the loss is computed again. A trained head's
    codes of 602 tokens are kept, of 1202 they are not. In chunks of 1024 of these so many are multiplied at a time that
    pairs of blocks do it.
    """
    keys = jax.random.split(jax.random.key(1), 3)
    x = jax.random.normal(keys[0], (2, length, 512), jnp.bfloat16)
    head = jax.random.normal(keys[1], (vocabulary, 512), jnp.bfloat16) * 512**-0.5
    head = head.at[7].multiply(100) if huge else head
    labels = np.array(jax.random.randint(keys[2], (2, length), 0, vocabulary))
    labels[:, ::5] = -100

    def ours(x, head):
        options: dict[str, Any] = {
            "chunk_tokens": chunk,
            "frozen_head": frozen,
            "reduction": reduction,
            "implementation": "mosaic_gpu",
        }
        return linear_cross_entropy(x, head, labels, **options).sum()

    def dense(x, head):
        logits = jnp.einsum("btd,vd->btv", x, head).astype(jnp.float32)
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.maximum(labels, 0)[..., None], -1)[..., 0]
        return -jnp.where(labels == -100, 0, picked).sum()

    wrt = (0,) if frozen else (0, 1)
    program = jax.jit(jax.value_and_grad(ours, wrt))
    (loss, grads), (_, twice) = program(x, head), program(x, head)
    dense_grads = jax.jit(jax.grad(dense, wrt))(x, head)
    x64, head64 = (np.asarray(array, np.float64) for array in (x.reshape(-1, 512), head))
    flat = labels.reshape(-1)
    z = x64 @ head64.T
    lse = np.log(np.exp(z - z.max(-1, keepdims=True)).sum(-1)) + z.max(-1)
    kept, picked = flat != -100, np.maximum(flat, 0)
    want = ((lse - z[np.arange(len(z)), picked]) * kept).sum()
    d = np.exp(z - lse[:, None])
    d[np.arange(len(z)), picked] -= 1
    d *= kept[:, None]
    truths = (d @ head64, d.T @ x64)
    off = max(abs(float(each) - want) / want for each in (loss, jax.jit(ours)(x, head)))
    good, said = True, []
    for got, other, truth in zip(grads, dense_grads, truths):
        mine, theirs = (
            np.linalg.norm(np.asarray(one, np.float64).reshape(truth.shape) - truth) / np.linalg.norm(truth)
            for one in (got, other)
        )
        said.append(f"{mine:.2e} (dense {theirs:.2e})")
        good &= bool(mine <= 1.05 * theirs)
    same = all(bool((one == two).all()) for one, two in zip(grads, twice))
    return f"loss off {off:.1e}, gradients {', '.join(said)}, same twice {same}", off < 1e-6 and good and same


def main() -> int:
    """Runs every check and prints a line for each."""
    checks: dict[str, Callable] = {
        f"loss V32000 {'frozen' if frozen else 'trained'} sum, pairs": functools.partial(
            check_loss, 32000, frozen, "sum", length=601, chunk=1024
        )
        for frozen in (True, False)
    }
    for frozen, reduction in ((True, "sum"), (True, "none"), (False, "sum"), (False, "none")):
        name = f"loss V32000 {'frozen' if frozen else 'trained'} {reduction}"
        checks[name] = functools.partial(check_loss, 32000, frozen, reduction)
    checks |= {
        f"loss V32000 {'frozen' if frozen else 'trained'} sum, again": functools.partial(
            check_loss, 32000, frozen, "sum", huge=True
        )
        for frozen in (True, False)
    }
    checks |= {
        f"loss V32000 trained sum, groups{', again' * huge}": functools.partial(
            check_loss, 32000, False, "sum", huge=huge, length=601
        )
        for huge in (False, True)
    }
    checks |= {
        f"exponentials V{vocabulary}": functools.partial(check_exponentials, vocabulary, False)
        for vocabulary in VOCABULARIES
    }
    checks["exponentials V128256, pair"] = functools.partial(check_exponentials, 128256, True)
    failed = 0
    for name, check in checks.items():
        try:
            text, good = check()
        except Exception as error:  # the others are to be seen too
            traceback.print_exc(limit=3)
            text, good = f"{type(error).__name__}: {str(error)[:300]}", False
        failed += not good
        print(f"{'ok  ' if good else 'FAIL'} {name}: {text}", flush=True)
    print(f"{len(checks) - failed} of {len(checks)} checks passed", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
