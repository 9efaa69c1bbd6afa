"""Sums of a softmax that follow their maximum only when it has moved far, for Hopper kernels.

A softmax may refer its weights to any number, as sums of the same reference are what they are divided by. As long as
no maximum of a warp's rows has grown by more than a factor of 2**FAR, weights stay below that and keep the old
reference, and the accumulator its place: a multiplication for each of its numbers is spared in most tiles.
"""

from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf, vector

from pallas_kernels.flash_attention.mosaic_gpu_tanh import any_beyond

FAR = 8.0  # in base 2: weights up to 256 are as exact in 16 bits as those up to 1


def follow(acc, reference, top, *, staged: bool):
    """`acc` with its rows' new reference: `top` where a row of the warp has gone beyond reference + FAR, else the old.

    Args:
        acc: (block_q, H) f32, sums of weights by `reference`, in the layout of tensor-core results.
        reference: (block_q,) f32, in base 2.
        top: the maxima so far.
        staged: as that of tanh.

    Returns:
        (acc, reference), acc multiplied by 2 to the old reference less the new one.
    """
    if staged:
        new = jnp.where(top - reference > FAR, top, reference)
        return acc * lax.broadcast_in_dim(jnp.exp2(reference - new), acc.shape, [0]), new
    of_row = plgpu.Layout.WGMMA.reduce(1)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA, of_row, of_row),
        return_type=(
            plgpu.ShapeDtypeStruct(acc.shape, jnp.float32, plgpu.Layout.WGMMA),
            plgpu.ShapeDtypeStruct(top.shape, jnp.float32, of_row),
        ),
    )
    def by_warp(_, acc, reference, top):
        kept = acc, reference
        choice: Any = scf.IfOp(_any_far((top - reference).registers), _types(kept), has_else=True)
        with ir.InsertionPoint(choice.then_block):
            shrink = (reference - top).exp2(approx=True)
            moved = acc * shrink.broadcast_in_dim(acc.shape, (0,), acc.layout), top
            scf.yield_([register for array in moved for register in array.registers.flat])
        with ir.InsertionPoint(choice.else_block):
            scf.yield_([register for array in kept for register in array.registers.flat])
        results = iter(choice.results)
        return tuple(_like(array, results) for array in kept)

    return by_warp(acc, reference, top)


def _types(arrays) -> list:
    return [register.type for array in arrays for register in array.registers.flat]


def _like(array, results):
    registers = np.empty_like(array.registers)
    registers.flat = [next(results) for _ in range(registers.size)]
    return mgpu.FragmentedArray(_registers=registers, _layout=array.layout, _is_signed=None)


def _any_far(registers):
    """Whether a row of the warp has gone beyond FAR."""
    farthest: Any = None
    for register in registers.flat:
        one = vector.extract(register, [], [0]) if isinstance(register.type, ir.VectorType) else register
        farthest = one if farthest is None else arith.maximumf(farthest, one)
    return any_beyond(farthest, FAR)
