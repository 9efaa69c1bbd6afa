"""A tanh for Hopper kernels, right to 5e-7 where the hardware's own is right to 5e-4.

A score capped at c is off by c times what its tanh is off, and a weight by as much again. Of the two accurate ways, two
more special-function instructions (an exponential and a reciprocal, beside the softmax's own exponential) would make
those units the bottleneck of a kernel, so that most of the work is done by multiply-adds: an odd rational
approximation, whose one reciprocal takes the place of the hardware's tanh.

The interpreter runs no inline assembly: with `staged`, plain array operations do the same.
"""

import struct

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector

# tanh(x) = x * top(x * x) / bottom(x * x) to 1.6e-7 where |x| <= LIMIT (least maximum of the error by Lawson's
# iteration); beyond, tanh is 1 to 1.5e-7. Rounding in f32 makes it 4.5e-7.
LIMIT = 8.2
TOP = (9.999992177e-01, 1.289536983e-01, 2.919356283e-03, 1.110279754e-05)
BOTTOM = (1.0, 4.622841965e-01, 2.368377427e-02, 2.342942976e-04, 2.358114049e-07)


def tanh(product, scale: float, *, staged: bool):
    """`tanh(product * scale)` of f32 tensor-core results; a NaN stays one."""
    if staged:
        x = jnp.clip(product * scale, -LIMIT, LIMIT)
        square = x * x
        return x * _polynomial(TOP, square) / _polynomial(BOTTOM, square)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA,),
        return_type=plgpu.ShapeDtypeStruct(product.shape, jnp.float32, plgpu.Layout.WGMMA),
    )
    def each(_, array):
        ptx, f32 = _assembly(scale), ir.F32Type.get()
        registers = np.empty_like(array.registers)
        for at, register in np.ndenumerate(array.registers):
            (length,) = register.type.shape
            elements = (vector.extract(register, [], [i]) for i in range(length))
            results = [utils.inline_ptx(ptx, element, result_types=f32) for element in elements]
            registers[at] = vector.from_elements(register.type, results)
        return mgpu.FragmentedArray(_registers=registers, _layout=array.layout, _is_signed=None)

    return each(product)


def _polynomial(coefficients: tuple[float, ...], x):
    value = coefficients[-1]
    for coefficient in coefficients[-2::-1]:
        value = value * x + coefficient
    return value


def _assembly(scale: float) -> str:
    """PTX of one element: $0 from $1."""

    def polynomial(name: str, coefficients: tuple[float, ...]) -> list[str]:
        *rest, last = coefficients
        steps = [f"fma.rn.f32 {name}, {name}, t, {_number(value)};" for value in rest[::-1]]
        return [f"mov.f32 {name}, {_number(last)};", *steps]

    steps = [
        ".reg .f32 x, t, p, q;",
        f"mul.rn.f32 x, $1, {_number(scale)};",
        f"min.NaN.f32 x, x, {_number(LIMIT)};",
        f"max.NaN.f32 x, x, {_number(-LIMIT)};",
        "mul.rn.f32 t, x, x;",
        *polynomial("p", TOP),
        *polynomial("q", BOTTOM),
        "rcp.approx.ftz.f32 q, q;",
        "mul.rn.f32 p, p, x;",
        "mul.rn.f32 $0, p, q;",
    ]
    return "{ " + " ".join(steps) + " }"


def _number(value: float) -> str:
    """A constant of PTX, by its bits."""
    return f"0f{struct.unpack('>I', struct.pack('>f', value))[0]:08X}"
