"""A tanh for Hopper kernels, right to 5e-7 where the hardware's own is right to 5e-4.

A score capped at c is off by c times what its tanh is off, and a weight by as much again. An exponential and a
reciprocal, beside the softmax's own exponential, would make the special-function units the bottleneck of a kernel, so
that multiply-adds do it: where all numbers of a warp are small, as scores mostly are beside their cap, an odd
polynomial, else an odd rational approximation with one reciprocal.

The interpreter runs no inline assembly: with `staged`, plain array operations do the same.
"""

import struct
from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf, vector

# tanh(x) = x * SMALL(x * x) to 8e-8 where |x| <= SMALL_LIMIT, and x * TOP(x * x) / BOTTOM(x * x) to 1.6e-7 where
# |x| <= LIMIT: least maxima of the error by Lawson's iteration. Beyond, tanh is 1 to 1.5e-7. In f32 it makes 4.5e-7.
SMALL_LIMIT = 0.45
SMALL = (1.0, -3.332953155e-01, 1.323312670e-01, -4.587534070e-02)
LIMIT = 8.2
TOP = (9.999992177e-01, 1.289536983e-01, 2.919356283e-03, 1.110279754e-05)
BOTTOM = (1.0, 4.622841965e-01, 2.368377427e-02, 2.342942976e-04, 2.358114049e-07)

PARTS = 4  # partial maxima, so that each does not wait for the one before


def tanh(product, scale: float, *, staged: bool):
    """`tanh(product * scale)` of f32 tensor-core results; a NaN stays one."""
    if staged:
        x = product * scale
        square = x * x
        small = x * _polynomial(SMALL, square)
        x = jnp.clip(x, -LIMIT, LIMIT)
        square = x * x
        large = x * _polynomial(TOP, square) / _polynomial(BOTTOM, square)
        return jnp.where(jnp.abs(x) <= SMALL_LIMIT, small, large)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA,),
        return_type=plgpu.ShapeDtypeStruct(product.shape, jnp.float32, plgpu.Layout.WGMMA),
    )
    def by_size(_, array):
        types = [register.type for register in array.registers.flat]
        choice: Any = scf.IfOp(_any_beyond(array.registers, SMALL_LIMIT / scale), types, has_else=True)
        for block, ptx in ((choice.then_block, _rational(scale)), (choice.else_block, _small(scale))):
            with ir.InsertionPoint(block):
                scf.yield_([_elementwise(ptx, register) for register in array.registers.flat])
        registers = np.empty_like(array.registers)
        registers.flat = list(choice.results)
        return mgpu.FragmentedArray(_registers=registers, _layout=array.layout, _is_signed=None)

    return by_size(product)


def _polynomial(coefficients: tuple[float, ...], x):
    value = coefficients[-1]
    for coefficient in coefficients[-2::-1]:
        value = value * x + coefficient
    return value


def _any_beyond(registers, limit: float):
    """Whether the warp has a number whose size is not within the limit."""
    f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
    largest: list = [None] * PARTS
    for i, element in enumerate(_elements(registers)):
        part = i % PARTS
        if largest[part] is None:
            largest[part] = utils.inline_ptx("abs.f32 $0, $1;", element, result_types=f32)
        else:
            largest[part] = _max_of_size(largest[part], element)
    first, *others = largest
    for other in others:
        first = _max_of_size(first, other)
    ptx = (
        f"{{ .reg .pred p, q; setp.gtu.f32 p, $1, {_number(limit)}; "
        "vote.sync.any.pred q, p, 0xffffffff; selp.b32 $0, 1, 0, q; }"
    )
    voted = utils.inline_ptx(ptx, first, result_types=i32, convergent=True)
    return arith.cmpi(arith.CmpIPredicate.ne, voted, arith.constant(i32, 0))


def _max_of_size(largest, element):
    ptx = "{ .reg .f32 a; abs.f32 a, $2; max.NaN.f32 $0, $1, a; }"
    return utils.inline_ptx(ptx, largest, element, result_types=ir.F32Type.get())


def _elements(registers):
    for register in registers.flat:
        (length,) = register.type.shape
        for i in range(length):
            yield vector.extract(register, [], [i])


def _elementwise(ptx: str, register):
    f32 = ir.F32Type.get()
    (length,) = register.type.shape
    elements = (vector.extract(register, [], [i]) for i in range(length))
    return vector.from_elements(register.type, [utils.inline_ptx(ptx, x, result_types=f32) for x in elements])


def _small(scale: float) -> str:
    """PTX of one small element: $0 from $1."""
    first, steps = _scaled("$1", scale)
    coefficients = [value * first ** (2 * k + 1) for k, value in enumerate(SMALL)]
    steps += ["mul.rn.f32 t, x, x;", *_horner("p", coefficients), "mul.rn.f32 $0, p, x;"]
    return _block(steps)


def _rational(scale: float) -> str:
    """PTX of one element of any size."""
    first, steps = _scaled("$1", scale)
    limit = LIMIT / first
    top = [value * first ** (2 * k + 1) for k, value in enumerate(TOP)]
    bottom = [value * first ** (2 * k) for k, value in enumerate(BOTTOM)]
    steps += [
        f"min.NaN.f32 x, x, {_number(limit)};",
        f"max.NaN.f32 x, x, {_number(-limit)};",
        "mul.rn.f32 t, x, x;",
        *_horner("p", top),
        *_horner("q", bottom),
        "rcp.approx.ftz.f32 q, q;",
        "mul.rn.f32 p, p, x;",
        "mul.rn.f32 $0, p, q;",
    ]
    return _block(steps)


def _scaled(source: str, scale: float) -> tuple[float, list[str]]:
    """x from a product, and what of the scale is left for the coefficients: all, unless its powers leave f32."""
    if 2e-4 < scale < 1e3:
        return scale, [f"mov.f32 x, {source};"]
    return 1.0, [f"mul.rn.f32 x, {source}, {_number(scale)};"]


def _horner(name: str, coefficients: list[float]) -> list[str]:
    *rest, last = coefficients
    steps = [f"fma.rn.f32 {name}, {name}, t, {_number(value)};" for value in rest[::-1]]
    return [f"mov.f32 {name}, {_number(last)};", *steps]


def _block(steps: list[str]) -> str:
    return "{ .reg .f32 x, t, p, q; " + " ".join(steps) + " }"


def _number(value: float) -> str:
    """A constant of PTX, by its bits."""
    return f"0f{struct.unpack('>I', struct.pack('>f', value))[0]:08X}"
