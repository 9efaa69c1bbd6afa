"""Writes a small array into the edge of a large one in place, on Hopper.

XLA's own dynamic_update_slice does that too, but not into what a kernel has just made: it then tries to make the two
one operation and fails ("DUS target must be a fusion parameter", seen with jax 0.11.2).
"""

import functools
import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax
from jaxtyping import Array, Float

_LONGEST = 256  # rows or columns of a copied tile, as the copy engine has it
_SHARED_MEMORY = 128 * 1024  # bytes of a tile


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
