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
from jaxlib.mlir.dialects import arith, scf

from pallas_kernels._hopper import number
from pallas_kernels.flash_attention.mosaic_gpu_powers import fragment_sums, sums_by_thread
from pallas_kernels.flash_attention.mosaic_gpu_tanh import any_beyond, elements

LOWEST = -1e30  # the reference of a row that has seen no key: finite, so that it makes no NaN
NEAR = 2.0**-40  # of the total


def far(dtype) -> float:
    """What a tile's weights may add up to: sums and products with values have the room of f32, f16 ends at 2**16."""
    return 2.0**12 if dtype == jnp.float16 else 2.0**40


def settle(score, factor: float, sums, weight16, part, *, whole: bool, staged: bool):
    """Sums with a tile added, and the tile's weights, by a new reference where the old one was not near.

    Args:
        score: (block_q, block_kv) f32, in the layout of tensor-core results; times the factor, in base 2.
        factor: see there.
        sums: of the tiles before: (acc (block_q, H), reference (block_q,) in base 2, total (block_q, LANES)), all f32.
        weight16: the tile's weights by that reference, in 16 bits.
        part: as total, their sums by threads.
        whole: whether every row sees the whole tile, so that each thread's part of a total tells whether that is near.
        staged: as that of tanh.

    Returns:
        ((acc, reference, total), weight16); acc is without the tile.
    """
    most = far(weight16.dtype)
    if staged:
        acc, reference, total = sums
        top, low = score.max(axis=1) * factor, (total + part).sum(axis=1) < NEAR
        new = jnp.where(low, jnp.maximum(top, LOWEST), jnp.maximum(top, reference))
        stays = (part.sum(axis=1) <= most) & ~low
        new = jnp.where(stays, reference, new)
        shrink = jnp.exp2(jnp.minimum(reference - new, 0.0))  # a row whose total is not near has seen nothing before
        weight = jnp.exp2(score * factor - lax.broadcast_in_dim(new, score.shape, [0]))
        weight16 = jnp.where(lax.broadcast_in_dim(stays, weight.shape, [0]), weight16, weight.astype(weight16.dtype))
        again = total * lax.broadcast_in_dim(shrink, total.shape, [0]) + sums_by_thread(weight, staged=True)
        total = jnp.where(lax.broadcast_in_dim(stays, total.shape, [0]), total + part, again)
        return (acc * lax.broadcast_in_dim(shrink, acc.shape, [0]), new, total), weight16
    tile, kept = plgpu.Layout.WGMMA, (*sums, weight16)
    layouts = tile, plgpu.Layout.WGMMA.reduce(1), tile, tile

    @plgpu.inline_mgpu(
        arg_types=(tile, *layouts, tile),
        return_type=tuple(
            plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout) for x, layout in zip(kept, layouts, strict=True)
        ),
    )
    def by_warp(_, score, acc, reference, total, weight16, part):
        found = acc, reference, total + part, weight16
        near = (found[2] if whole else _along(found[2].reduce("add", 1), part)) >= NEAR
        beyond = near.select(part, math.inf)
        choice: Any = scf.IfOp(_any_beyond(beyond.registers, most), _types(found), has_else=True)
        with ir.InsertionPoint(choice.then_block):
            score = score * _anew(factor, score)
            top = score.reduce("max", 1)
            low = found[2].reduce("add", 1) < NEAR
            new = low.select(top.max(LOWEST), top.max(reference))
            shrink = (reference - new).min(0.0).exp2(approx=True)  # what is not near has seen nothing before
            weight = (score - _along(new, score)).exp2(approx=True)
            acc = acc * _along(shrink, acc)
            total = total * _along(shrink, total) + fragment_sums(weight)
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


def _along(of_row, like):
    """A number a row, as often as a tile has columns."""
    return of_row.broadcast_in_dim(like.shape, (0,), like.layout)


def _types(arrays) -> list:
    return [register.type for array in arrays for register in array.registers.flat]


def _like(array, results):
    registers = np.empty_like(array.registers)
    registers.flat = [next(results) for _ in range(registers.size)]
    return mgpu.FragmentedArray(_registers=registers, _layout=array.layout, _is_signed=None)


def _any_beyond(registers, limit: float):
    """Whether a row of the warp has a number beyond the limit, or no number."""
    one, *others = elements(registers)
    for other in others:
        one = arith.maximumf(one, other)
    return any_beyond(one, limit)
