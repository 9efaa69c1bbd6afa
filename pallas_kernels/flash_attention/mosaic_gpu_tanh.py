"""A tanh for Hopper kernels, right to 5e-7 where the hardware's own is right to 5e-4, and powers of two of it.

A score capped at c is off by c times what its tanh is off, and a weight by as much again. An exponential and a
reciprocal, beside the softmax's own exponential, would make the special-function units the bottleneck of a kernel, so
that multiply-adds do it: an odd polynomial where all numbers of a warp are small, as scores mostly are beside their
cap, a longer one where they are not so small, else an odd rational approximation with one reciprocal.

The interpreter runs no inline assembly: with `staged`, plain array operations do the same.
"""

from collections.abc import Callable
from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf, vector

from pallas_kernels._hopper import elementwise, number

# tanh(x) = x * SMALL(x * x) to 8e-8 where |x| <= SMALL_LIMIT, x * MIDDLE(x * x) to 1.4e-7 where |x| <= MIDDLE_LIMIT,
# and x * TOP(x * x) / BOTTOM(x * x) to 1.6e-7 where |x| <= LIMIT: least maxima of the error by Lawson's iteration.
# Beyond, tanh is 1 to 1.5e-7. In f32 it makes 4.5e-7.
SMALL_LIMIT = 0.25
SMALL = (1.0, -3.332291499e-01, 1.284604272e-01)
MIDDLE_LIMIT = 0.7
MIDDLE = (1.0, -3.333006489e-01, 1.327691528e-01, -5.067462770e-02, 1.359964885e-02)
LIMIT = 8.2
TOP = (9.999992177e-01, 1.289536983e-01, 2.919356283e-03, 1.110279754e-05)
BOTTOM = (1.0, 4.622841965e-01, 2.368377427e-02, 2.342942976e-04, 2.358114049e-07)

GROUP = 8  # numbers whose sum of squares is below a limit's square only if each is below the limit


def tanh(product, scale: float, *, staged: bool):
    """`tanh(product * scale)` of f32 tensor-core results; a NaN stays one."""
    if staged:
        x = product * scale
        square, size = x * x, jnp.abs(x)
        small, middle = (x * _polynomial(coefficients, square) for coefficients in (SMALL, MIDDLE))
        x = jnp.clip(x, -LIMIT, LIMIT)
        square = x * x
        large = x * _polynomial(TOP, square) / _polynomial(BOTTOM, square)
        return jnp.where(size <= SMALL_LIMIT, small, jnp.where(size <= MIDDLE_LIMIT, middle, large))
    return _by_size(product, scale, [way(scale) for way in (_small, _middle, _rational)])


def power_of_tanh(product, scale: float, factor: float, *, staged: bool):
    """`2**(factor * tanh(product * scale))`: on each way, so that both kinds of units have work at a time."""
    if staged:
        return jnp.exp2(factor * tanh(product, scale, staged=True))
    return _by_size(product, scale, [_power(way(scale, factor)) for way in (_small, _middle, _rational)])


def _polynomial(coefficients: tuple[float, ...], x):
    value = coefficients[-1]
    for coefficient in coefficients[-2::-1]:
        value = value * x + coefficient
    return value


def _by_size(product, scale: float, ways: list[str]):
    """Makes of each element what one of three PTX blocks does, the first that serves all of the warp's."""
    small, middle, rational = ways

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA,),
        return_type=plgpu.ShapeDtypeStruct(product.shape, jnp.float32, plgpu.Layout.WGMMA),
    )
    def choose(_, array):
        squares = _largest_sum_of_squares(list(elements(array.registers)))

        def each(ptx: str) -> list:
            return [elementwise(ptx, register) for register in array.registers.flat]

        def within(limit: float, then: Callable[[], list], otherwise: Callable[[], list]) -> list:
            types = [register.type for register in array.registers.flat]
            largest = min((limit / scale) ** 2, 3e38)  # a number of f32
            choice: Any = scf.IfOp(any_beyond(squares, largest), types, has_else=True)
            for block, values in ((choice.then_block, otherwise), (choice.else_block, then)):
                with ir.InsertionPoint(block):
                    scf.yield_(values())
            return list(choice.results)

        registers = np.empty_like(array.registers)
        registers.flat = within(
            SMALL_LIMIT,
            lambda: each(small),
            lambda: within(MIDDLE_LIMIT, lambda: each(middle), lambda: each(rational)),
        )
        return mgpu.FragmentedArray(_registers=registers, _layout=array.layout, _is_signed=None)

    return choose(product)


def _largest_sum_of_squares(elements: list):
    """The largest of a thread's sums of squares, each of GROUP elements: multiply-adds are faster than maxima."""
    f32 = ir.F32Type.get()
    groups = -(-len(elements) // GROUP)
    sums = [utils.inline_ptx("mul.rn.f32 $0, $1, $1;", x, result_types=f32) for x in elements[:groups]]
    for i, x in enumerate(elements[groups:]):
        sums[i % groups] = utils.inline_ptx("fma.rn.f32 $0, $1, $1, $2;", x, sums[i % groups], result_types=f32)
    first, *others = sums
    for other in others:
        first = utils.inline_ptx("max.NaN.f32 $0, $1, $2;", first, other, result_types=f32)
    return first


def any_beyond(value, limit: float):
    """Whether a thread of the warp has a value that is not within the limit, which a NaN is not."""
    i32 = ir.IntegerType.get_signless(32)
    ptx = (
        f"{{ .reg .pred p, q; setp.gtu.f32 p, $1, {number(limit)}; "
        "vote.sync.any.pred q, p, 0xffffffff; selp.b32 $0, 1, 0, q; }"
    )
    voted = utils.inline_ptx(ptx, value, result_types=i32, convergent=True)
    return arith.cmpi(arith.CmpIPredicate.ne, voted, arith.constant(i32, 0))


def elements(registers):
    """The numbers that fragments of vectors hold."""
    for register in registers.flat:
        (length,) = register.type.shape
        for i in range(length):
            yield vector.extract(register, [], [i])


def _small(scale: float, factor: float = 1.0) -> str:
    """PTX of one small element: $0, the factor times the tanh, from $1."""
    return _odd(SMALL, scale, factor)


def _middle(scale: float, factor: float = 1.0) -> str:
    """As `_small`, of one within MIDDLE_LIMIT."""
    return _odd(MIDDLE, scale, factor)


def _odd(coefficients: tuple[float, ...], scale: float, factor: float) -> str:
    first, steps = _scaled("$1", scale)
    coefficients = tuple(factor * value * first ** (2 * k + 1) for k, value in enumerate(coefficients))
    return _block([*steps, "mul.rn.f32 t, x, x;", *_horner("p", coefficients), "mul.rn.f32 $0, p, x;"])


def _rational(scale: float, factor: float = 1.0) -> str:
    """As `_small`, of one of any size."""
    first, steps = _scaled("$1", scale)
    limit = LIMIT / first
    top = tuple(factor * value * first ** (2 * k + 1) for k, value in enumerate(TOP))
    bottom = tuple(value * first ** (2 * k) for k, value in enumerate(BOTTOM))
    steps += [
        f"min.NaN.f32 x, x, {number(limit)};",
        f"max.NaN.f32 x, x, {number(-limit)};",
        "mul.rn.f32 t, x, x;",
        *_horner("p", top),
        *_horner("q", bottom),
        "rcp.approx.ftz.f32 q, q;",
        "mul.rn.f32 p, p, x;",
        "mul.rn.f32 $0, p, q;",
    ]
    return _block(steps)


def _power(ptx: str) -> str:
    """PTX of two to the power of what a block makes."""
    return _block([ptx.replace("$0", "y"), "ex2.approx.ftz.f32 $0, y;"], "y")


def _scaled(source: str, scale: float) -> tuple[float, list[str]]:
    """x from a product, and what of the scale is left for the coefficients: all, unless its powers leave f32."""
    if 2e-4 < scale < 1e3:
        return scale, [f"mov.f32 x, {source};"]
    return 1.0, [f"mul.rn.f32 x, {source}, {number(scale)};"]


def _horner(name: str, coefficients: tuple[float, ...]) -> list[str]:
    *rest, last = coefficients
    steps = [f"fma.rn.f32 {name}, {name}, t, {number(value)};" for value in rest[::-1]]
    return [f"mov.f32 {name}, {number(last)};", *steps]


def _block(steps: list[str], names: str = "x, t, p, q") -> str:
    return f"{{ .reg .f32 {names}; " + " ".join(steps) + " }"
