"""The Hopper kernel for adapters of grouped rows: a low product and a factor's gradient by one pass over a wide array.

Such products move bytes and hardly compute. A block owns some columns of x and a run of tiles of 64 rows, each of one
group, which stream by; per tile one compute warpgroup, in turn, multiplies the tile by its group's factor, and both add
to the gradient of their columns, which they store where the group changes. A tile begins at a multiple of 8 rows, as
the copy engine wants it: what it has of other groups' rows meets zeros in the gradient, and its products are not used.
"""

import dataclasses

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels import _platform
from pallas_kernels._hopper import WARPGROUPS, add_product, drain, filled, launch, store_through, swizzled
from pallas_kernels.grouped_matmul.mosaic_gpu_work import groups_of_rows, starts_of, sums_before

ROWS = 64  # of a tile
ALIGNED = 8
_SHARED_MEMORY = 226 * 1024  # bytes of a block's that tiles may fill
MAX_RANK = 32  # beyond, there is no room for two slots, each with its group's factor


@dataclasses.dataclass(frozen=True)
class NarrowTiles:
    """How the work is cut.

    Attributes:
        columns: that a warpgroup owns.
        blocks: to spread over, at most; None for one a multiprocessor.
        staged: whether accumulators are read after every product, as the CPU interpreter wants it.
    """

    columns: int = 256
    blocks: int | None = None
    staged: bool = False


def tiles_of_groups(
    sizes: Int[Array, " E"], rows: int
) -> tuple[Int[Array, " tiles"], Int[Array, " tiles"], Int[Array, " E+1"]]:
    """Of each tile its group and first row, and of each group its first tile; behind the last group's last one more.

    Tiles behind the last one have the group E.
    """
    groups, starts = len(sizes), starts_of(sizes)
    start, end = starts[:-1], starts[1:]
    base = start // ALIGNED * ALIGNED
    (first_tile,) = sums_before(jnp.where(end > start, -(-(end - base) // ROWS), 0))
    tile = jnp.arange((rows + ALIGNED * groups) // ROWS + groups, dtype=jnp.int32)
    group = jnp.sum(tile[:, None] >= first_tile[1:], axis=1, dtype=jnp.int32)
    known = jnp.minimum(group, groups - 1)
    return group, base[known] + (tile - first_tile[known]) * ROWS, first_tile


def narrow_products(
    x: Float[Array, "M N"],
    factor: Float[Array, "E R N"],
    low: Float[Array, "M R"],
    sizes: Int[Array, " E"],
    tiles: NarrowTiles,
) -> tuple[Float[Array, "M R"], Float[Array, "E N R"]]:
    """`x[m] @ factor[e].T` and the sum over each group's rows of `x[m].T low[m]`, in f32, in one pass over x.

    Args:
        x: bf16 or f16, M a multiple of 8, N of 2 * tiles.columns; finite, rows of no group too.
        factor: x.dtype, R at most MAX_RANK and a multiple of 8.
        low: x.dtype.
        sizes: rows of each group.
        tiles: how the work is cut.
    """
    (rows, width), rank, groups = x.shape, low.shape[1], len(sizes)
    if rows % ALIGNED or width % (WARPGROUPS * tiles.columns) or rank % ALIGNED or rank > MAX_RANK:
        raise ValueError(
            f"M={rows} and R={rank} must be multiples of {ALIGNED}, R at most {MAX_RANK}, "
            f"N={width} a multiple of {WARPGROUPS * tiles.columns}"
        )
    group, first_row, first_tile = tiles_of_groups(sizes, rows)
    count = len(group)
    across = width // (WARPGROUPS * tiles.columns)
    down = max(1, min(count, (tiles.blocks or _platform.multiprocessors()) // across))
    used = first_tile[-1]
    share = jnp.maximum(-(-used // down), 1)  # tiles of a block
    table = jnp.stack([group, first_row, jnp.full_like(group, used), jnp.full_like(group, share)], axis=1)

    starts = starts_of(sizes)
    row = first_row[:, None] + jnp.arange(ROWS, dtype=jnp.int32)
    known = jnp.minimum(group, groups - 1)[:, None]
    inside = (group[:, None] < groups) & (row >= starts[known]) & (row < starts[known + 1])
    low_tiles = jnp.where(inside[..., None], low[jnp.minimum(row, rows - 1)], 0).swapaxes(1, 2)

    products, parts = _one_pass(x, factor, low_tiles, table, across, down, tiles)
    # Of each row the tile and its place there.
    index, of_row = jnp.arange(rows, dtype=jnp.int32), groups_of_rows(starts, rows)
    owner = jnp.minimum(of_row, groups - 1)
    place = first_tile[owner] * ROWS + index - starts[owner] // ALIGNED * ALIGNED
    product = jnp.sum(products[:, jnp.minimum(place, count * ROWS - 1)], axis=0)
    product = jnp.where((of_row < groups)[:, None], product, 0)
    return product, _sum_parts(parts, first_tile, share, down)


def _sum_parts(parts: Float[Array, "P N R"], first_tile: Array, share: Array, down: int) -> Float[Array, "E N R"]:
    """Each group's gradient. A block's part of it is number `block + group`, as both only grow from part to part."""
    groups = len(first_tile) - 1
    block, group = jnp.arange(down, dtype=jnp.int32)[:, None], jnp.arange(groups, dtype=jnp.int32)
    first, last = jnp.maximum(block * share, first_tile[:-1]), jnp.minimum((block + 1) * share, first_tile[1:])
    number = jnp.arange(len(parts), dtype=jnp.int32)
    owned = ((first < last) & (block + group == number[:, None, None])).any(axis=1)  # (P, E)
    written = jnp.where(owned.any(axis=1)[:, None, None], parts, 0)  # the others hold anything
    return jnp.einsum("pe,pnr->enr", owned.astype(jnp.float32), written, precision="highest")


def _one_pass(x, factor, low_tiles, table, across: int, down: int, tiles: NarrowTiles):
    """The kernel: products of every tile, a part for each share of columns, and parts of gradients."""
    (count, rank, _), width, groups, owned = low_tiles.shape, x.shape[1], factor.shape[0], tiles.columns
    slot_bytes = x.dtype.itemsize * (WARPGROUPS * owned * (ROWS + rank) + rank * ROWS)
    stages = min(4, (_SHARED_MEMORY - WARPGROUPS * ROWS * rank * 4) // slot_bytes)

    def kernel(refs, scratch):
        x_ref, factor_ref, low_ref, table_ref, product_ref, gradient_ref = refs
        x_smem, factor_smem, low_smem, sum_smem, ready, free = scratch
        column, block = lax.axis_index("across"), lax.axis_index("down")
        warpgroup = lax.axis_index("warpgroup")
        used, share = table_ref[0, 2], table_ref[0, 3]
        first = jnp.minimum(block * share, used)
        visits = jnp.minimum(share, used - first)

        def line(visit):
            return jnp.minimum(first + visit, count - 1)

        @pl.when(warpgroup < WARPGROUPS)
        def _compute():
            plgpu.set_max_registers(232, action="increase")
            my_sum = sum_smem.at[warpgroup]

            def multiply(visit, slot):
                def product(acc):
                    for half in range(WARPGROUPS):
                        plgpu.wgmma(acc, x_smem.at[slot, half], factor_smem.at[slot, half].transpose((1, 0)))
                    return acc[...]

                total = pl.run_scoped(product, plgpu.ACC((ROWS, rank), jnp.float32))
                store_through(my_sum, total, product_ref.at[column, pl.ds((first + visit) * ROWS, ROWS)])

            def step(visit, carry):
                gradient, group = carry
                slot, following = lax.rem(visit, jnp.int32(stages)), table_ref[line(visit + 1), 0]
                plgpu.barrier_wait(ready.at[slot])
                gradient = add_product(
                    gradient,
                    x_smem.at[slot, warpgroup].transpose((1, 0)),
                    low_smem.at[slot].transpose((1, 0)),
                    tiles.staged,
                )
                pl.when(lax.rem(visit, jnp.int32(WARPGROUPS)) == warpgroup)(lambda: multiply(visit, slot))
                plgpu.barrier_arrive(free.at[slot])
                ends = (visit + 1 == visits) | (following != group)

                @pl.when(ends)
                def _store():
                    for part in range(owned // ROWS):
                        at = (column * WARPGROUPS + warpgroup) * owned + part * ROWS
                        value = gradient[part * ROWS : (part + 1) * ROWS]
                        store_through(my_sum, value, gradient_ref.at[block + group, pl.ds(at, ROWS)])

                return lax.cond(ends, lambda: filled((owned, rank), 0.0), lambda: gradient), following

            lax.fori_loop(0, visits, step, (filled((owned, rank), 0.0), table_ref[line(0), 0]))
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == WARPGROUPS)
        def _feed():
            plgpu.set_max_registers(40, action="decrease")

            def load(visit, following):
                group, row = following
                slot, at = lax.rem(visit, jnp.int32(stages)), pl.ds(pl.multiple_of(row, ALIGNED), ROWS)
                following = table_ref[line(visit + 1), 0], table_ref[line(visit + 1), 1]
                pl.when(visit >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))
                for half in range(WARPGROUPS):
                    columns = pl.ds((column * WARPGROUPS + half) * owned, owned)
                    plgpu.copy_gmem_to_smem(x_ref.at[at, columns], x_smem.at[slot, half], ready.at[slot])
                    plgpu.copy_gmem_to_smem(
                        factor_ref.at[group, :, columns], factor_smem.at[slot, half], ready.at[slot]
                    )
                plgpu.copy_gmem_to_smem(low_ref.at[first + visit], low_smem.at[slot], ready.at[slot])
                return following

            lax.fori_loop(0, visits, load, (table_ref[line(0), 0], table_ref[line(0), 1]))
            drain(visits, stages, free)

    def tile(*shape):
        return plgpu.SMEM(shape, x.dtype, transforms=swizzled(shape[-1]))

    return launch(
        kernel,
        (
            tile(stages, WARPGROUPS, ROWS, owned),
            tile(stages, WARPGROUPS, rank, owned),
            tile(stages, rank, ROWS),
            plgpu.SMEM((WARPGROUPS, ROWS, rank), jnp.float32, transforms=swizzled(rank, jnp.float32)),
            plgpu.Barrier(num_arrivals=2 * WARPGROUPS + 1, num_barriers=stages),
            plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
        ),
        *(x, factor, low_tiles, table),
        out_type=[
            jax.ShapeDtypeStruct((across, count * ROWS, rank), jnp.float32),
            jax.ShapeDtypeStruct((down + groups, width, rank), jnp.float32),
        ],
        grid={"across": across, "down": down},
    )
