"""A softmax whose weights refer to what is near their maximum, for Hopper kernels.

A softmax may refer its weights to any number, as their sums of the same reference are what they are divided by, and
numbers of 16 bits are as exact whatever their size. So a tile's exponentials need not wait for its maximum, nor is that
formed, as long as no row's weights of a tile add up to more than `far`, and those of all tiles to at least NEAR. Where
some do not, their warp forms the maximum, and the tile's weights again.
"""

import math
from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf, vector

from pallas_kernels.flash_attention.mosaic_gpu_tanh import any_beyond, number

LOWEST = -1e30  # the reference of a row that has seen no key: finite, so that it makes no NaN
NEAR = 2.0**-40  # of the total


def far(dtype) -> float:
    """What a tile's weights may add up to: sums and products with values have the room of f32, f16 ends at 2**16."""
    return 2.0**12 if dtype == jnp.float16 else 2.0**40


def settle(score, factor: float, sums, weight16, part, *, staged: bool):
    """Sums with a tile added, and the tile's weights, by a new reference where the old one was not near.

    Args:
        score: (block_q, block_kv) f32, in the layout of tensor-core results; times the factor, in base 2.
        factor: see there.
        sums: (acc (block_q, H) f32, reference (block_q,) f32 in base 2, total (block_q,) f32) of the tiles before.
        weight16: the tile's weights by that reference, in 16 bits.
        part: (block_q,) f32, their sums.
        staged: as that of tanh.

    Returns:
        ((acc, reference, total), weight16); acc is without the tile.
    """
    most = far(weight16.dtype)
    if staged:
        acc, reference, total = sums
        top, low = score.max(axis=1) * factor, total + part < NEAR
        new = jnp.where(low, jnp.maximum(top, LOWEST), jnp.maximum(top, reference))
        new = jnp.where((part <= most) & ~low, reference, new)
        shrink = jnp.exp2(jnp.minimum(reference - new, 0.0))  # a row whose total is not near has seen nothing before
        weight = jnp.exp2(score * factor - lax.broadcast_in_dim(new, score.shape, [0]))
        acc *= lax.broadcast_in_dim(shrink, acc.shape, [0])
        return (acc, new, total * shrink + weight.sum(axis=1)), weight.astype(weight16.dtype)
    of_row, kept = plgpu.Layout.WGMMA.reduce(1), (*sums, weight16)
    layouts = plgpu.Layout.WGMMA, of_row, of_row, plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA, *layouts, of_row),
        return_type=tuple(
            plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout) for x, layout in zip(kept, layouts, strict=True)
        ),
    )
    def by_warp(_, score, acc, reference, total, weight16, part):
        found = acc, reference, total + part, weight16
        low = found[2] < NEAR
        beyond = (found[2] >= NEAR).select(part, math.inf)
        choice: Any = scf.IfOp(_any_beyond(beyond.registers, most), _types(found), has_else=True)
        with ir.InsertionPoint(choice.then_block):
            score = score * _anew(factor, score)
            top = score.reduce("max", 1)
            new = low.select(top.max(LOWEST), top.max(reference))
            shrink = (reference - new).min(0.0).exp2(approx=True)  # what is not near has seen nothing before
            weight = (score - new.broadcast_in_dim(score.shape, (0,), score.layout)).exp2(approx=True)
            acc = acc * shrink.broadcast_in_dim(acc.shape, (0,), acc.layout)
            total = total * shrink + weight.reduce("add", 1)
            again = acc, new, total, weight.astype(weight16.mlir_dtype)
            scf.yield_([register for array in again for register in array.registers.flat])
        with ir.InsertionPoint(choice.else_block):
            scf.yield_([register for array in found for register in array.registers.flat])
        results = iter(choice.results)
        return tuple(_like(array, results) for array in found)

    *sums, weight16 = by_warp(score, *kept, part)
    return tuple(sums), weight16


def _anew(factor: float, like):
    """The factor, such that LLVM does not form its products for both ways at once, where they would not be fused."""
    value = utils.inline_ptx(f"mov.f32 $0, {number(factor)};", result_types=ir.F32Type.get())
    return mgpu.FragmentedArray.splat(value, like.shape, like.layout)


def _types(arrays) -> list:
    return [register.type for array in arrays for register in array.registers.flat]


def _like(array, results):
    registers = np.empty_like(array.registers)
    registers.flat = [next(results) for _ in range(registers.size)]
    return mgpu.FragmentedArray(_registers=registers, _layout=array.layout, _is_signed=None)


def _any_beyond(registers, limit: float):
    """Whether a row of the warp has a number beyond the limit, or no number."""
    largest: Any = None
    for register in registers.flat:
        one = vector.extract(register, [], [0]) if isinstance(register.type, ir.VectorType) else register
        largest = one if largest is None else arith.maximumf(largest, one)
    return any_beyond(largest, limit)
