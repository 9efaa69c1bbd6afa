"""A tile's weights for Hopper kernels: powers of two in 16 bits, and what each thread's add up to.

At width 64 the special-function units need as long for a tile as the tensor cores, so that a share of its weights may
be raised by multiply-adds instead: 2**x is a whole number's power, which is added to the exponent, times a polynomial
of what is left of x (FlashAttention-4's way). Each of the four threads that hold a row keeps sums of its own until the
row ends, as asking each other in every tile delays its product with values.

The interpreter runs no inline assembly: with `staged`, plain array operations do the same.
"""

from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from pallas_kernels.flash_attention.mosaic_gpu_tanh import number

LANES = 8  # columns of which a row's four threads hold two each: sums of a row stay apart for them
PAIRS = 8  # registers of two numbers, of which some may be polynomials

# 2**f = POWER(f) to 2.6e-6 where |f| <= 0.5: least maximum of the relative error by Lawson's iteration.
POWER = (9.999992614e-01, 6.931218147e-01, 2.402474483e-01, 5.591786076e-02, 9.570101968e-03)
# Numbers beyond [TOP - RANGE, TOP] are raised as these: 2**TOP is beyond what a tile's weights may add up to, and as
# many 2**(TOP - RANGE) as memory has keys are nothing beside what they must.
TOP, RANGE = 41, 128
ROUND = 1.5 * 2.0**23 / RANGE  # added to a number below 1, it leaves multiples of 1 / RANGE, in the lowest bits


def weigh(score, factor: float, reference, dtype, *, share: int, staged: bool):
    """`2**(score * factor - reference)` in 16 bits, and sums of it by threads.

    Args:
        score: (block_q, block_kv) f32, in the layout of tensor-core results.
        factor: see there.
        reference: (block_q,) f32, in base 2.
        dtype: of the weights.
        share: how many of each PAIRS are polynomials; they are right to 6e-6, and never 0.
        staged: as that of tanh.

    Returns:
        (weights, their sums (block_q, LANES) f32).
    """
    if staged:
        power = score * factor - lax.broadcast_in_dim(reference, score.shape, [0])
        weight = jnp.exp2(power)
        if share:
            group = lax.div(lax.broadcasted_iota(jnp.int32, score.shape, 1), jnp.int32(LANES))
            weight = jnp.where(lax.rem(group, jnp.int32(PAIRS)) < share, _polynomial(power), weight)
        return weight.astype(dtype), sums_by_thread(weight, staged=True)
    rows, columns = score.shape
    tile, of_row = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1)

    @plgpu.inline_mgpu(
        arg_types=(tile, of_row, of_row),
        return_type=(
            plgpu.ShapeDtypeStruct((rows, columns), dtype, tile),
            plgpu.ShapeDtypeStruct((rows, LANES), jnp.float32, tile),
        ),
    )
    def raise_all(_, score, below, from_top):
        hardware, polynomial = _hardware(factor), _horner(factor)
        below, from_top = (
            x.broadcast_in_dim(score.shape, (0,), score.layout).registers.flat for x in (below, from_top)
        )
        raised, short = np.empty_like(score.registers), np.empty_like(score.registers)
        for i, register in enumerate(score.registers.flat):
            chosen = (i * share) % PAIRS < share  # evenly among the others
            ptx, other = (polynomial, from_top[i]) if chosen else (hardware, below[i])
            raised.flat[i], short.flat[i] = _pair(ptx, register, other, dtype)
        parts = fragment_sums(mgpu.FragmentedArray(_registers=raised, _layout=score.layout, _is_signed=None))
        return mgpu.FragmentedArray(_registers=short, _layout=score.layout, _is_signed=None), parts

    return raise_all(score, -reference, (reference + TOP) * (1.0 / RANGE))


def sums_by_thread(weight, *, staged: bool):
    """(block_q, LANES) f32: sums of a tile's columns that are equal modulo LANES, each within one thread."""
    if staged:
        return weight.reshape(weight.shape[0], -1, LANES).sum(axis=1)
    tile = plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(
        arg_types=(tile,), return_type=plgpu.ShapeDtypeStruct((weight.shape[0], LANES), jnp.float32, tile)
    )
    def added(_, weight):
        return fragment_sums(weight)

    return added(weight)


def fragment_sums(weight):
    """Of a tile's fragments, by columns modulo LANES."""
    columns = [weight.registers[:, i : i + 1] for i in range(weight.registers.shape[1])]
    total = columns[0].copy()
    for column in columns[1:]:
        for at in np.ndindex(*total.shape):
            total[at] = arith.addf(total[at], column[at])
    return mgpu.FragmentedArray(_registers=total, _layout=weight.layout, _is_signed=None)


def _pair(ptx: str, register, other, dtype):
    """Two numbers raised, in f32 and 16 bits; packed by assembly, as LLVM moves its own behind the branch of settle."""
    f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
    other = vector.extract(other, [], [0])
    low, high = (utils.inline_ptx(ptx, vector.extract(register, [], [i]), other, result_types=f32) for i in range(2))
    name, short = ("bf16", ir.BF16Type.get()) if dtype == jnp.bfloat16 else ("f16", ir.F16Type.get())
    packed: Any = utils.inline_ptx(f"cvt.rn.{name}x2.f32 $0, $1, $2;", high, low, result_types=i32)
    return vector.from_elements(register.type, [low, high]), utils.bitcast(packed, ir.VectorType.get((2,), short))


def _hardware(factor: float) -> str:
    """PTX of one element: from a product and minus the reference."""
    return f"{{ .reg .f32 x; fma.rn.f32 x, $1, {number(factor)}, $2; ex2.approx.ftz.f32 $0, x; }}"


def _horner(factor: float) -> str:
    """PTX of one element: from a product and (TOP + reference) / RANGE; t is how far a power is below TOP."""
    *rest, last = (2.0**TOP * value * (-RANGE) ** k for k, value in enumerate(POWER))
    steps = [
        f"fma.rn.sat.f32 t, $1, {number(-factor / RANGE)}, $2;",
        f"add.rn.f32 n, t, {number(ROUND)};",
        f"add.rn.f32 x, n, {number(-ROUND)};",
        "sub.rn.f32 t, t, x;",
        f"mov.f32 p, {number(last)};",
        *(f"fma.rn.f32 p, p, t, {number(value)};" for value in rest[::-1]),
        "mov.b32 i, n;",
        "mov.b32 j, p;",
        "mad.lo.s32 j, i, -8388608, j;",
        "mov.b32 $0, j;",
    ]
    return "{ .reg .f32 t, n, x, p; .reg .b32 i, j; " + " ".join(steps) + " }"


def _polynomial(power):
    """As `_horner` makes it, of powers."""
    t = jnp.clip((TOP - power) * (1.0 / RANGE), 0.0, 1.0)
    whole = jnp.round(t * RANGE)
    rest = whole - t * RANGE
    value = jnp.full_like(power, POWER[-1])
    for coefficient in POWER[-2::-1]:
        value = value * rest + coefficient
    return value * jnp.exp2(TOP - whole)
