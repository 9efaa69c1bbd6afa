"""Checks the Hopper kernels of NF4 weights on a GPU: dequantized bits against XLA's, products against float64.

Usage: python scripts/check_nf4.py [NAME ...] [--out FILE]     (of CHECKS, default all; exit status 1 where one fails)

Dequantization must give the bits of plain jnp on the CPU: all codes, scales of all sizes, shapes of Llama-3.1-8B and
70B, stacked layers, a result with an adapter's columns behind it, more than 2^31 elements. Products that
decode the weight inside, and add an adapter's, may be off by 1.5 times what the dense bf16 product is, against XLA's
product in float64, and must give the same bits twice.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pallas_kernels.nf4_linear import NF4Weight, dequantize, join, mosaic_gpu
from pallas_kernels.nf4_linear.mosaic_gpu_turned_tiles import TurnedTiles

LLAMA_8B = ((14336, 4096), (4096, 14336), (4096, 4096), (1024, 4096))
LLAMA_70B = ((28672, 8192), (8192, 28672), (8192, 8192), (1024, 8192))
ODD = ((32, 1024), (64, 896), (128, 64), (18944, 3584), (3584, 18944), (2048, 2048))
BAR = 1.5


def random_packed(shape: tuple[int, int], leading: tuple[int, ...] = (), *, double: bool = True) -> NF4Weight:
    """A weight of random codes whose scales span many powers of two."""
    rng = np.random.default_rng(shape[0] + shape[1])
    size = math.prod(shape)
    blocks = size // 64
    codes = jnp.asarray(rng.integers(0, 256, (*leading, size // 2), dtype=np.uint8))

    def scales(mean: float, *own: int) -> jax.Array:
        return jnp.asarray(rng.lognormal(mean, 2, (*leading, *own)), jnp.float32)

    if not double:
        return NF4Weight(codes, scales(-4, blocks), None, None, shape)
    absmax = jnp.asarray(rng.integers(0, 256, (*leading, blocks), dtype=np.uint8))
    return NF4Weight(codes, absmax, scales(-4, -(-blocks // 256)), scales(-4), shape)


def on_cpu(w: NF4Weight, dtype: str) -> np.ndarray:
    """The weight by plain jnp on the host."""
    with jax.default_device(jax.devices("cpu")[0]):
        return np.asarray(dequantize(jax.tree.map(np.asarray, w), dtype, implementation="xla"))


def check_bits(shape: tuple[int, int], dtype: str, leading: tuple[int, ...], double: bool) -> tuple[str, bool]:
    """The dequantized weight, alone and with other columns behind it, bit for bit."""
    w = random_packed(shape, leading, double=double)
    want = on_cpu(w, dtype).view(np.uint16)
    got = jax.jit(lambda w: dequantize(w, dtype, implementation="mosaic_gpu"))(w)
    wrong = int((np.asarray(got).view(np.uint16) != want).sum())
    if not leading:
        more = jnp.ones((shape[0], 32), dtype)
        joined = jax.jit(lambda w, more: join(w, more, implementation="mosaic_gpu"))(w, more)
        expected = np.concatenate([want, np.asarray(more).view(np.uint16)], 1)
        wrong += int((np.asarray(joined).view(np.uint16) != expected).sum())
    form = f"{leading} " if leading else ""
    kind = "" if double else ", f32 scales"
    return f"bits {form}{shape} {dtype}{kind}: {wrong} differ", wrong == 0


def check_many() -> tuple[str, bool]:
    """More than 2^31 elements, compared on the GPU with plain jnp, layer by layer."""
    w = random_packed((14336, 4096), (38,))
    got = jax.jit(lambda w: dequantize(w, implementation="mosaic_gpu"))(w)

    @jax.jit
    def differing(got, w, i):
        layer = jax.tree.map(lambda leaf: leaf[i], w)
        bits = (jax.lax.bitcast_convert_type(x, jnp.uint16) for x in (got[i], dequantize(layer, implementation="xla")))
        return jnp.sum(next(bits) != next(bits))

    wrong = sum(int(differing(got, w, i)) for i in range(38))
    return f"bits of {got.size / 2**31:.2f} * 2^31 elements: {wrong} differ", wrong == 0


def error(value: Any, truth: np.ndarray) -> float:
    """Relative error in the Frobenius norm."""
    return float(np.linalg.norm(np.asarray(value, np.float64) - truth) / np.linalg.norm(truth))


def exact_sum(*operands: jax.Array) -> np.ndarray:
    """x @ matrix + low @ up in float64."""
    with jax.enable_x64(True):
        x, matrix, low, up = (operand.astype(jnp.float64) for operand in operands)
        return np.asarray(x @ matrix + low @ up)


def check_products(
    shape: tuple[int, int],
    rows: int,
    rank: int,
    tiles: TurnedTiles | None,
    double: bool = True,
) -> tuple[str, bool]:
    """x @ W.T and dy @ W, decoded inside the product, with an adapter's product where rank is not 0.

    Tiles None are those that suit the shapes.
    """
    w = random_packed(shape, double=double)
    packed = w.codes, w.absmax, w.nested_absmax, w.offset
    dense = dequantize(w, implementation="xla")
    words, good = [], True
    for transpose, name in ((False, "y"), (True, "dx")):
        matrix = dense if transpose else dense.T
        draws = jax.random.split(jax.random.key(rows + rank), 3)
        x = jax.random.normal(draws[0], (rows, matrix.shape[0]), jnp.bfloat16)
        low = jax.random.normal(draws[1], (rows, rank), jnp.bfloat16)
        up = 0.1 * jax.random.normal(draws[2], (rank, matrix.shape[1]), jnp.bfloat16)
        extra = (low, up if transpose else up.T) if rank else None

        def fused(x, packed, extra, transpose=transpose):
            return mosaic_gpu.fused(x, packed, shape, transpose=transpose, extra=extra, tiles=tiles)

        truth = exact_sum(x, matrix, low, up)
        bar = error(jax.jit(lambda x, matrix, low, up: x @ matrix + low @ up)(x, matrix, low, up), truth)
        got, again = (np.asarray(jax.jit(fused)(x, packed, extra)) for _ in range(2))
        mine, same = error(got, truth), bool((got == again).all())
        within = mine <= BAR * bar and same
        good &= within
        words.append(f"{name} {mine:.1e}/{bar:.1e}{'' if within else ' FAIL'}{'' if same else ' NOT THE SAME TWICE'}")
    size = "" if tiles is None else f" {tiles}"
    return f"product {shape} M{rows} R{rank}{size}: " + "  ".join(words), good


def bits() -> Iterator[tuple[Any, tuple]]:
    """Checks of dequantized bits, and their arguments."""
    for shape in (*ODD, *LLAMA_8B, *LLAMA_70B):
        yield check_bits, (shape, "bfloat16", (), True)
    for shape, dtype, leading, double in (
        ((64, 896), "float16", (), True),
        ((4096, 4096), "float16", (), True),
        ((4096, 4096), "bfloat16", (), False),
        ((256, 1024), "bfloat16", (3,), True),
        ((1024, 4096), "bfloat16", (2, 3), True),
        ((128, 896), "bfloat16", (4,), False),
    ):
        yield check_bits, (shape, dtype, leading, double)
    yield check_many, ()


def products() -> Iterator[tuple[Any, tuple]]:
    """Likewise of products, which decode the weight in registers, first those in parts of a cluster."""
    for rows, pair in itertools.product((1, 300), (False, True)):
        for size, parts in ((64, 2), (128, 2), (128, 4), (256, 2), (256, 4)):  # clusters of two, four and eight blocks
            sizes = TurnedTiles(size, 4 if size == 256 else 8, None, parts, pair)
            yield check_products, ((512, 1024), rows, 80 if rows == 300 else 0, sizes)
    for sizes in (TurnedTiles(unit=None, parts=2), TurnedTiles(unit=None, parts=4, pair=False)):
        yield check_products, ((4096, 14336), 512, 16, sizes)
        yield check_products, ((8192, 1024), 700, 16, sizes)  # forward, more clusters than there is room for at once
    for shape, rows, rank in itertools.product(((256, 256), (512, 1024), (4096, 1024)), (1, 100, 512), (0, 16)):
        for unit, pair in itertools.product((2, None), (False, True)):
            yield check_products, (shape, rows, rank, TurnedTiles(rows=128, unit=unit, pair=pair))
    yield check_products, ((512, 1024), 300, 80, TurnedTiles(rows=64, stages=2, blocks=4))
    yield check_products, ((512, 1024), 300, 80, TurnedTiles(), False)
    for unit in (2, 4):  # forward, tiles of eight parts and of four
        yield check_products, ((256, 1024), 256, 16, TurnedTiles(unit=unit))
    for shape, rows, rank in itertools.product(LLAMA_8B, (1, 256, 512, 2048), (0, 16)):
        yield check_products, (shape, rows, rank, None)


CHECKS = {"bits": bits, "products": products}


def main() -> int:
    """Runs every check and goes on after one that fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "names", nargs="*", default="all", choices=("all", *CHECKS), metavar="NAME", help=", ".join(CHECKS)
    )
    parser.add_argument("--out", type=Path, help="where every line is written as well")
    options = parser.parse_args()
    lines, failed = [], 0
    names = CHECKS if "all" in options.names else options.names
    for check, arguments in itertools.chain.from_iterable(CHECKS[name]() for name in names):
        try:
            line, good = check(*arguments)
        except Exception:  # whatever one kernel does, the others are checked
            line, good = f"{check.__name__} {arguments}: {traceback.format_exc(limit=-3)[-1500:]}", False
        failed += not good
        lines.append(f"{'ok  ' if good else 'FAIL'} {line}")
        print(lines[-1], flush=True)
    lines.append(f"{len(lines) - failed} of {len(lines)} checks passed")
    print(lines[-1])
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
