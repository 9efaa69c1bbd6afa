"""Puts a small array at the edge of a large one on Hopper, in place.

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

_LONGEST = 256  # rows or columns of a tile, as the copy engine has it
_SHARED_MEMORY = 128 * 1024  # bytes of a tile


@functools.partial(jax.jit, inline=True)  # of equal calls one is compiled
def write_edge(whole: Float[Array, "O I"], more: Float[Array, "O C"]) -> Float[Array, "O I"]:
    """`whole` with `more` as its last columns, in place where nothing else reads `whole`.

    Args:
        whole: any 16-bit dtype, rows of a multiple of 8 elements.
        more: same dtype, C a multiple of 8.
    """
    rows, columns = more.shape
    along = math.gcd(rows, _LONGEST)
    thick = next(size for size in range(min(columns, _LONGEST), 0, -1) if columns % size == 0)
    thick = math.gcd(thick, max(8, _SHARED_MEMORY // (along * more.dtype.itemsize)))
    start = whole.shape[1] - columns

    def kernel(more_ref, whole_ref):
        def copy(tile, barrier):
            rows, column = pl.ds(lax.axis_index("along") * along, along), lax.axis_index("across") * thick
            plgpu.copy_gmem_to_smem(more_ref.at[rows, pl.ds(column, thick)], tile, barrier)
            plgpu.barrier_wait(barrier)
            plgpu.copy_smem_to_gmem(tile, whole_ref.at[rows, pl.ds(start + column, thick)])
            plgpu.wait_smem_to_gmem(0)

        pl.run_scoped(copy, plgpu.SMEM((along, thick), more.dtype), plgpu.Barrier())

    mesh = plgpu.Mesh(grid=(rows // along, columns // thick), grid_names=("along", "across"))

    def run(refs):
        pl.kernel(kernel, mesh=mesh)(*refs)

    return pl.run_state(run)((more, whole))[1]
