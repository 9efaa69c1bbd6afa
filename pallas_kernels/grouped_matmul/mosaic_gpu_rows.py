"""The Hopper kernel for products whose rows are grouped: y[m] = x[m] @ w[e].T, and its gradient dx[m] = dy[m] @ w[e].

Several products may be summed, y[m] = x[m] @ w[e].T + low[m] @ up[e].T: one after the other into the same registers.
"""

from collections.abc import Sequence

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu

from pallas_kernels._tiles import DEPTH, Tiles, store_rows
from pallas_kernels.grouped_matmul.mosaic_gpu_schedule import check, run
from pallas_kernels.grouped_matmul.mosaic_gpu_work import row_items


def group_rows(xs: Sequence[jax.Array], ws: Sequence[jax.Array], sizes, *, transposed: bool, tiles: Tiles):
    """Multiplies each row with its group's weight; of several rows and weights the products are summed.

    Args:
        xs: (M, K), M at least 64, K a multiple of 64, which may differ; 16 bit.
        ws: of each, (E, N, K), or (E, K, N) if not transposed; N a multiple of 64; x's dtype.
        sizes: (E,) rows of each group.
        transposed: whether the weights' last axis is the one that is summed over.
        tiles: sizes.

    Returns:
        (M, N) in x's dtype; zeros in rows of no group.
    """
    rows, dtype, columns = xs[0].shape[0], xs[0].dtype, tiles.columns
    width = ws[0].shape[1 if transposed else 2]
    check(xs, width)
    table = row_items(sizes, rows, -(-width // (tiles.team * columns)), tiles.band)

    def load_weights(operand, slot, scratch, group, k, column):
        inner, column = pl.ds(k * DEPTH, DEPTH), pl.ds(column * columns, columns)
        source = operand[0].at[group, column, inner] if transposed else operand[0].at[group, inner, column]
        plgpu.copy_gmem_to_smem(source, scratch.weights.at[slot], scratch.ready.at[slot])

    def finish(sums, scratch, refs, place):
        buffers = scratch.buffers.at[place.warpgroup]
        store_rows(sums, buffers, refs[0], place.first, place.column * columns, place.stored)

    return run(
        xs,
        [(w,) for w in ws],
        (),
        table,
        len(sizes),
        out=jax.ShapeDtypeStruct((rows, width), dtype),
        load_weights=load_weights,
        finish=finish,
        transposed=transposed,
        tiles=tiles,
    )
