"""A tile's weights for Hopper kernels: powers of two in 16 bits, and what each thread's add up to.

Each of the four threads that hold a row keeps sums of its own until the row ends, as asking each other in every tile
delays its product with values.

The interpreter runs no inline assembly: with `staged`, plain array operations do the same.
"""

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from pallas_kernels._hopper import number, packed

LANES = 8  # columns of which a row's four threads hold two each: sums of a row stay apart for them


def weigh(score, factor: float, reference, dtype, *, staged: bool):
    """`2**(score * factor - reference)` in 16 bits, and sums of it by threads.

    Args:
        score: (block_q, block_kv) f32, in the layout of tensor-core results.
        factor: see there.
        reference: (block_q,) f32, in base 2.
        dtype: of the weights.
        staged: as that of tanh.

    Returns:
        (weights, their sums (block_q, LANES) f32).
    """
    if staged:
        weight = jnp.exp2(score * factor - lax.broadcast_in_dim(reference, score.shape, [0]))
        return weight.astype(dtype), sums_by_thread(weight, staged=True)
    rows, columns = score.shape
    tile = plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(
        arg_types=(tile, plgpu.Layout.WGMMA.reduce(1)),
        return_type=(
            plgpu.ShapeDtypeStruct((rows, columns), dtype, tile),
            plgpu.ShapeDtypeStruct((rows, LANES), jnp.float32, tile),
        ),
    )
    def raise_all(_, score, below):
        below = below.broadcast_in_dim(score.shape, (0,), score.layout)
        raised, short = np.empty_like(score.registers), np.empty_like(score.registers)
        for i, register in enumerate(score.registers.flat):
            raised.flat[i], short.flat[i] = _pair(factor, register, below.registers.flat[i], dtype)
        parts = fragment_sums(mgpu.FragmentedArray(_registers=raised, _layout=score.layout, _is_signed=None))
        return mgpu.FragmentedArray(_registers=short, _layout=score.layout, _is_signed=None), parts

    return raise_all(score, -reference)


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


def _pair(factor: float, register, below, dtype):
    """Two powers in f32 and 16 bits, of products and minus the reference, packed by assembly.

    LLVM moves its own packing behind the branch of settle.
    """
    ptx = f"{{ .reg .f32 x; fma.rn.f32 x, $1, {number(factor)}, $2; ex2.approx.ftz.f32 $0, x; }}"
    f32, below = ir.F32Type.get(), vector.extract(below, [], [0])
    low, high = (utils.inline_ptx(ptx, vector.extract(register, [], [i]), below, result_types=f32) for i in range(2))
    raised = vector.from_elements(register.type, [low, high])
    return raised, packed(raised, dtype)
