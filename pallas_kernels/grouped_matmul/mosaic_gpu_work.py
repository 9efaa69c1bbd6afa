"""Which tiles of a grouped product there are, in the order in which they are multiplied: group by group, see _tiles."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels._tiles import BAND, HALF, ROWS, walk

GROUP, COLUMN, FIRST, STORED, COUNT = 0, 1, 2, 4, 6  # columns of row_items' table; FIRST and STORED: one a half


def row_items(sizes: Int[Array, " E"], rows: int, columns: int, band: int = BAND) -> Int[Array, "items 8"]:
    """The tiles of a product whose rows are grouped: a table with one line a tile, of which the first COUNT are used.

    A line holds the group (E: the rows that no group owns, which get zeros), the tile's column, for each of the tile's
    two halves its first row and how many rows are stored, from the first on, and in each line the number of used ones.
    Copies have fixed sizes, so a half that would run over its group's end is moved up, and rows twice in a group's
    tiles are stored twice, alike. In groups of fewer than HALF rows both halves store as many rows as the largest power
    of two within the group, one from its first row on and one up to its last. No row of another group is ever written.

    Args:
        sizes: rows of each group.
        rows: of all groups and none, M.
        columns: tiles along the columns.
        band: tiles along the rows of a band.
    """
    sizes = sizes.astype(jnp.int32)
    starts, first_items = sums_before(sizes, -(-sizes // ROWS) * columns)
    ends = jnp.append(starts[1:], rows)
    last_items = jnp.append(first_items[1:], first_items[-1] - (-(ends[-1] - starts[-1]) // ROWS) * columns)
    most = (rows // ROWS + min(len(starts), rows)) * columns
    index = jnp.arange(most, dtype=jnp.int32)
    group = jnp.sum(index[:, None] >= last_items[:-1], axis=1, dtype=jnp.int32)

    start, end = starts[group], jnp.maximum(ends, starts)[group]
    size = end - start
    tiles = jnp.maximum((size + ROWS - 1) // ROWS, 1)
    tile, column = walk(index - first_items[group], tiles, jnp.full_like(index, columns), band)
    first = start + tile * ROWS
    left = end - first
    large = size >= HALF
    stored = 1 << sum(((size >= 1 << bit).astype(jnp.int32) for bit in range(1, 7)), jnp.int32(0))
    both = jnp.where(large, left > HALF, stored < size)
    firsts = jnp.where(large & (left <= HALF), end - HALF, first)
    seconds = jnp.where(large, jnp.minimum(first + HALF, end - HALF), end - stored)
    count = jnp.full_like(index, last_items[-1])
    lines = (group, column, firsts, jnp.where(both, seconds, firsts), stored, jnp.where(both, stored, 0), count, count)
    return jnp.stack(lines, axis=1)


def places_of_rows(
    table: Int[Array, "items 8"], sizes: Int[Array, " E"], rows: int, columns: int, band: int = BAND
) -> tuple[Int[Array, "M columns"], Int[Array, " M"], Int[Array, " M"]]:
    """Where row_items' table has each row: its lines, one a column, and in each the half and the row's place in it."""
    sizes = sizes.astype(jnp.int32)
    starts, first_items = sums_before(sizes, -(-sizes // ROWS) * columns)
    ends = jnp.append(starts[1:], rows)
    row, group = jnp.arange(rows, dtype=jnp.int32), groups_of_rows(starts, rows)
    tile = (row - starts[group]) // ROWS
    above = tile // band * band
    height = jnp.minimum(-(-(ends - starts)[group] // ROWS) - above, band)
    before = first_items[group] + above * columns + tile - above
    lines = before[:, None] + height[:, None] * jnp.arange(columns, dtype=jnp.int32)
    line = table[lines[:, 0]]
    half = ((line[:, STORED + 1] > 0) & (row >= line[:, FIRST + 1])).astype(jnp.int32)
    return lines, half, row - jnp.where(half > 0, line[:, FIRST + 1], line[:, FIRST])


def groups_of_rows(starts: Int[Array, " E+1"], rows: int) -> Int[Array, " M"]:
    """The group of each row; E of rows of no group. Of `starts_of`'s starts."""
    return jnp.sum(jnp.arange(rows, dtype=jnp.int32)[:, None] >= starts[1:], axis=1, dtype=jnp.int32)


def starts_of(sizes: Int[Array, " E"]) -> Int[Array, " E+1"]:
    """First row of each group, and the one behind the last group's last."""
    return sums_before(sizes.astype(jnp.int32))[0]


def sums_before(*values: Int[Array, " E"]) -> tuple[Int[Array, " E+1"], ...]:
    """Sums of the first 0, 1, ... E values: by comparison, which is one kernel where a scan is several."""
    groups = jnp.arange(len(values[0]) + 1)
    before = groups[:, None] > groups[:-1]
    return tuple(jnp.sum(jnp.where(before, value, 0), axis=1, dtype=jnp.int32) for value in values)
