"""A softmax whose weights refer to a maximum of before, for Hopper kernels.

A softmax may refer its weights to any number, as their sums of the same reference are what they are divided by. So a
tile's exponentials need not wait for its maximum, nor is that formed: where no row's weights of a tile add up to more
than FAR, they are as exact in 16 bits as those up to 1, and the accumulator keeps its place. Where some do, as in a
row's first tile, its warp forms the maximum, and the tile's weights again.
"""

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

FAR = 2.0**12  # far from the largest number of f16, and below it a tile whose reference is near adds up to its keys


def settle(score, factor: float, sums, weight16, part, *, staged: bool):
    """Sums with a tile added, and the tile's weights, by a new reference where the old one was too far below.

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
    if staged:
        acc, reference, total = sums
        top = jnp.maximum(reference, score.max(axis=1) * factor)
        new = jnp.where(part <= FAR, reference, top)
        shrink = jnp.exp2(reference - new)
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
        choice: Any = scf.IfOp(_any_far(part.registers), _types(found), has_else=True)
        with ir.InsertionPoint(choice.then_block):
            score = score * _anew(factor, score)
            new = reference.max(score.reduce("max", 1))
            shrink = (reference - new).exp2(approx=True)
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


def _any_far(registers):
    """Whether a row of the warp has weights that add up to more than FAR, or to no number."""
    farthest: Any = None
    for register in registers.flat:
        one = vector.extract(register, [], [0]) if isinstance(register.type, ir.VectorType) else register
        farthest = one if farthest is None else arith.maximumf(farthest, one)
    return any_beyond(farthest, FAR)
