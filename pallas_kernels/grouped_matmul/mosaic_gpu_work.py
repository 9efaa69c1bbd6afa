"""Which tiles of a grouped product there are, in the order in which they are multiplied.

The tiles of a group are walked in bands of BAND tiles along the rows, down each column of a band: what the
multiprocessors read at a time is then about square and stays in the L2 cache, and the weights are read once.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

BAND = 16
HALF = 64  # rows of a tile that one warpgroup owns
ROWS = 2 * HALF
GROUP, COLUMN, FIRST, STORED, FIELDS = 0, 1, 2, 4, 8  # columns of row_items' table; FIRST and STORED: one a half


def walk(index, rows, columns, *, divide=lax.div, remainder=lax.rem, smaller=lax.min):
    """The place (row, column) of the `index`-th of rows * columns tiles."""
    band = divide(index, BAND * columns)
    height = smaller(rows - band * BAND, 0 * rows + BAND)
    within = index - band * BAND * columns
    return band * BAND + remainder(within, height), divide(within, height)


def row_items(sizes: Int[Array, " E"], rows: int, columns: int) -> tuple[Int[Array, "items 8"], Int[Array, " 1"]]:
    """The tiles of a product whose rows are grouped: a table with one line a tile, and how many lines are used.

    A line holds the group (E: the rows that no group owns, which get zeros), the tile's column, and for each of the
    tile's two halves its first row and how many rows are stored, from the first on. Copies have fixed sizes, so a half
    that would run over its group's end is moved up, and rows twice in a group's tiles are stored twice, alike. In
    groups of fewer than HALF rows both halves store as many rows as the largest power of two within the group, one from
    its first row on and one up to its last. No row of another group is ever written.

    Args:
        sizes: rows of each group.
        rows: of all groups and none, M.
        columns: tiles along the columns.
    """
    sizes = jnp.append(sizes.astype(jnp.int32), 0)
    groups = sizes.shape[0]
    before = jnp.arange(groups)[:, None] > jnp.arange(groups)  # sums by comparison: one kernel, not a scan
    sizes = sizes.at[-1].set(jnp.maximum(rows - jnp.sum(sizes), 0))
    starts = jnp.sum(jnp.where(before, sizes, 0), axis=1)
    tiles = (sizes + ROWS - 1) // ROWS
    first_items = jnp.sum(jnp.where(before, tiles * columns, 0), axis=1)
    most = (rows // ROWS + min(groups, rows)) * columns
    index = jnp.arange(most, dtype=jnp.int32)
    group = jnp.sum(index[:, None] >= (first_items + tiles * columns)[:-1], axis=1, dtype=jnp.int32)

    size, start = sizes[group], starts[group]
    tile, column = walk(
        index - first_items[group], jnp.maximum(tiles[group], 1), jnp.full_like(index, columns), smaller=jnp.minimum
    )
    first, end = start + tile * ROWS, start + size
    left = end - first
    large = size >= HALF
    stored = jnp.int32(1) << jnp.int32(sum((size >= 1 << bit).astype(jnp.int32) for bit in range(1, 7)))
    both = jnp.where(large, left > HALF, stored < size)
    firsts = jnp.where(large & (left <= HALF), end - HALF, first)
    seconds = jnp.where(large, jnp.minimum(first + HALF, end - HALF), end - stored)
    none = jnp.zeros_like(group)
    lines = (group, column, firsts, jnp.where(both, seconds, firsts), stored, jnp.where(both, stored, 0), none, none)
    return jnp.stack(lines, axis=1), jnp.sum(tiles, keepdims=True) * columns


def spans(sizes: Int[Array, " E"], multiple: int) -> Int[Array, "E 4"]:
    """Of each group its first row, rounded down to a `multiple` and as it is, the row behind its last, and its size."""
    sizes = sizes.astype(jnp.int32)
    groups = jnp.arange(sizes.shape[0])
    starts = jnp.sum(jnp.where(groups[:, None] > groups, sizes, 0), axis=1)
    return jnp.stack((starts // multiple * multiple, starts, starts + sizes, sizes), axis=1)
