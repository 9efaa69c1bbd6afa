"""Puts a small array at the edge of a large one on Hopper: in place, or into a copy of both.

In place, XLA's own dynamic_update_slice does that too, but not into what a kernel has just made: it then tries to make
the two one operation and fails ("DUS target must be a fusion parameter", seen with jax 0.11.2).
"""

import functools
import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

_LONGEST = 256  # rows or columns of a copied tile, as the copy engine has it
_SHARED_MEMORY = 128 * 1024  # bytes of a tile
_ROWS = 128  # of a tile of a copy: 64 KiB, so that a multiprocessor has three of them under way
_SHORTEST = 64  # rows or columns of a tile that is worth a copy of its own


@functools.partial(jax.jit, static_argnames="axis", inline=True)  # of equal calls one is compiled
def write_edge(whole: Float[Array, "O I"], more: Float[Array, "R C"], axis: int) -> Float[Array, "O I"]:
    """`whole` with `more` as its last rows (axis 0) or columns (axis 1), in place where nothing else reads `whole`.

    Args:
        whole: any 16-bit dtype, rows of a multiple of 8 elements.
        more: same dtype; as wide (axis 0) or as long (axis 1) as whole, the other size a multiple of 8.
        axis: 0 or 1.
    """
    length, across = more.shape[1 - axis], more.shape[axis]
    along = math.gcd(length, _LONGEST)
    thick = next(size for size in range(min(across, _LONGEST), 0, -1) if across % size == 0)
    thick = math.gcd(thick, max(8, _SHARED_MEMORY // (along * more.dtype.itemsize)))
    start = whole.shape[axis] - across
    shape = (thick, along) if axis == 0 else (along, thick)

    def kernel(more_ref, whole_ref):
        def copy(tile, barrier):
            first, layer = lax.axis_index("along") * along, lax.axis_index("across") * thick
            source = (pl.ds(layer, thick), pl.ds(first, along))
            target = (pl.ds(start + layer, thick), pl.ds(first, along))
            if axis == 1:
                source, target = source[::-1], target[::-1]
            plgpu.copy_gmem_to_smem(more_ref.at[source], tile, barrier)
            plgpu.barrier_wait(barrier)
            plgpu.copy_smem_to_gmem(tile, whole_ref.at[target])
            plgpu.wait_smem_to_gmem(0)

        pl.run_scoped(copy, plgpu.SMEM(shape, more.dtype), plgpu.Barrier())

    mesh = plgpu.Mesh(grid=(length // along, across // thick), grid_names=("along", "across"))

    def run(refs):
        pl.kernel(kernel, mesh=mesh)(*refs)

    return pl.run_state(run)((more, whole))[1]


def copies(whole: Array, more: Array, axis: int) -> bool:
    """Whether `copy_with_edge` takes these arrays: of one 16-bit dtype, cut into large tiles without a rest."""
    return (
        whole.dtype == more.dtype
        and whole.dtype.itemsize == 2
        and min(_tile(whole.shape)) >= _SHORTEST
        and more.shape[axis] % 8 == 0
        and more.shape[axis] <= _LONGEST
    )


@functools.partial(jax.jit, static_argnames="axis", inline=True)  # of equal calls one is compiled
def copy_with_edge(whole: Float[Array, "O I"], more: Float[Array, "R C"], axis: int) -> Float[Array, "O_R I_C"]:
    """`concatenate([whole, more], axis)`, for arrays that `copies` takes.

    A tile is a block, of which a multiprocessor has several under way. `whole` may be a layer's slice of stacked
    weights, which XLA hands to a kernel where it lies.
    """
    rows, columns = tile = _tile(whole.shape)
    across = whole.shape[1] // columns
    tiles, behind = whole.shape[0] // rows * across, whole.shape[axis]
    along = tile[1 - axis]  # of the edge's tiles, which are as thick as it
    thick = more.shape[axis]

    def kernel(whole_ref, more_ref, out_ref):
        index = lax.axis_index("tiles")

        def copy(source_ref, source, target, shape):
            def run(smem, barrier):
                plgpu.copy_gmem_to_smem(source_ref.at[source], smem, barrier)
                plgpu.barrier_wait(barrier)
                plgpu.copy_smem_to_gmem(smem, out_ref.at[target])
                plgpu.wait_smem_to_gmem(0)

            pl.run_scoped(run, plgpu.SMEM(shape, more.dtype), plgpu.Barrier())

        @pl.when(index < tiles)
        def _inner():
            row, column = lax.div(index, jnp.int32(across)) * rows, lax.rem(index, jnp.int32(across)) * columns
            at = (pl.ds(row, rows), pl.ds(column, columns))
            copy(whole_ref, at, at, tile)

        @pl.when(index >= tiles)
        def _edge():
            part = pl.ds((index - tiles) * along, along)
            at = [(pl.ds(start, thick), part) for start in (0, behind)]
            source, target = at if axis == 0 else (each[::-1] for each in at)
            copy(more_ref, source, target, (thick, along) if axis == 0 else (along, thick))

    shape = list(whole.shape)
    shape[axis] += thick
    grid = (tiles + whole.shape[1 - axis] // along,)
    out = jax.ShapeDtypeStruct(tuple(shape), whole.dtype)
    return plgpu.kernel(kernel, out_type=out, grid=grid, grid_names=("tiles",))(whole, more)


def _tile(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of a tile of a copy."""
    return math.gcd(shape[0], _ROWS), math.gcd(shape[1], _LONGEST)
