"""Masks as intervals: which keys each query sees, and which tiles of keys (or queries) a kernel visits.

Causality, windows and packed documents all let query i see the keys lo[i] <= j <= hi[i], with lo and hi non-decreasing.
Two integers a row hold any such mask in O(T) memory, and four integers a tile say where work begins and ends and
between which tiles no element needs masking.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

_CONSTANT = 4096  # tokens, up to which the compiler's evaluation of constants takes no time to speak of


def row_bounds(
    tokens: int, keys: int, *, causal: bool, window: int | None, segment_ids: Int[Array, "B T"] | None
) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """First and last key that each query sees; hi < lo where it sees none.

    Args:
        tokens: T, queries.
        keys: S; the last query lines up with the last key.
        causal: whether later keys are hidden.
        window: keys that a query sees at most, itself included.
        segment_ids: int32 document of each token (then T = S), 0 for padding; a document is a run of equal ids.

    Returns:
        (lo, hi), int32, non-decreasing along T; B is 1 without segments.
    """
    # As constants of the program, where they depend on nothing, the compiler works out all that follows from them.
    xp: Any = np if segment_ids is None and tokens <= _CONSTANT else jnp
    position = xp.arange(tokens, dtype=xp.int32)[None] + (keys - tokens)
    hi = position if causal else xp.full_like(position, keys - 1)
    lo = xp.zeros_like(position) if window is None else xp.maximum(position - window + 1, 0)
    if segment_ids is not None:
        first, last = document_ends(segment_ids)
        padding = segment_ids == 0
        lo = jnp.where(padding, position + 1, jnp.maximum(lo, first))
        hi = jnp.where(padding, position, jnp.minimum(hi, last))
    return lo, xp.maximum(hi, -1)


def number_documents(segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Ids 1, 2, ... of the runs of equal ids in each row; 0 stays 0."""
    first, _ = document_ends(segment_ids)
    starts = first == jnp.arange(segment_ids.shape[1])
    return jnp.where(segment_ids == 0, 0, jnp.cumsum(starts, axis=1, dtype=jnp.int32))


def document_ends(segment_ids: Int[Array, "B T"]) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """Index of the first and of the last token of each token's run of equal ids."""
    index = jnp.broadcast_to(jnp.arange(segment_ids.shape[1], dtype=jnp.int32), segment_ids.shape)
    new = segment_ids[:, 1:] != segment_ids[:, :-1]
    edge = jnp.ones_like(new[:, :1]) if segment_ids.shape[1] > 1 else jnp.ones(segment_ids.shape, bool)
    starts = jnp.concatenate([edge, new], axis=1)
    ends = jnp.concatenate([new, edge], axis=1)
    first = jax.lax.cummax(jnp.where(starts, index, 0), axis=1)
    last = jax.lax.cummin(jnp.where(ends, index, segment_ids.shape[1]), axis=1, reverse=True)
    return first, last


def pad_bounds(lo: Array, hi: Array, rows: int, keys: int) -> tuple[Array, Array]:
    """Bounds with more rows, which see nothing."""
    more = rows - lo.shape[1]
    pad = ((0, 0), (0, more))
    return jnp.pad(lo, pad, constant_values=keys), jnp.pad(hi, pad, constant_values=keys - 1)


def key_tiles(lo: Array, hi: Array, block_q: int, block_kv: int) -> Int[Array, "B Q 4"]:
    """For each tile of queries the tiles of keys to visit.

    Returns:
        int32 (begin, clear_begin, clear_end, end): tiles [begin, end) are visited, and every query of the tile sees the
        whole of those in [clear_begin, clear_end).
    """
    lo_first, lo_last = lo[:, ::block_q], lo[:, block_q - 1 :: block_q]
    hi_first, hi_last = hi[:, ::block_q], hi[:, block_q - 1 :: block_q]
    begin = lo_first // block_kv
    end = jnp.maximum((hi_last + block_kv) // block_kv, begin)
    return _ranges(begin, (lo_last + block_kv - 1) // block_kv, (hi_first + 1) // block_kv, end)


def query_tiles(lo: Array, hi: Array, keys: int, block_q: int, block_kv: int) -> Int[Array, "B K 4"]:
    """For each tile of keys the tiles of queries to visit; as `key_tiles` otherwise."""
    first = jnp.arange(0, keys, block_kv, dtype=jnp.int32)
    last = first + block_kv - 1
    # By counting: a thousandth of a tile's work and one kernel, where a binary search is a loop of many.
    search = functools.partial(jnp.searchsorted, method="compare_all")

    def of_row(lo: Array, hi: Array) -> Array:
        begin = search(hi, first, side="left")  # the first query whose last key reaches this tile
        end = search(lo, last, side="right")  # the first query that begins after this tile
        clear_begin = search(hi, last, side="left")
        clear_end = search(lo, first, side="right")
        return _ranges(
            begin // block_q,
            (clear_begin + block_q - 1) // block_q,
            clear_end // block_q,
            jnp.maximum((end + block_q - 1) // block_q, begin // block_q),
        )

    return jax.vmap(of_row)(lo, hi)


def at_least_one(ranges: Int[Array, "B Q 4"], tiles: int) -> Int[Array, "B Q 4"]:
    """Ranges in which every tile of queries visits one of the `tiles` of keys, if need be one that it does not see."""
    begin = jnp.minimum(ranges[..., 0], tiles - 1)
    end = jnp.maximum(ranges[..., 3], begin + 1)
    clear = (jnp.clip(ranges[..., i], begin, end) for i in (1, 2))
    return jnp.stack([begin, *clear, end], axis=-1)


def longest_first(ranges: Int[Array, "B Q 4"], batch: int) -> Int[Array, " BQ"]:
    """Every tile of every row as row * Q + tile, those with most to visit first; `ranges` may serve all rows."""
    visits = jnp.broadcast_to(ranges[..., 3] - ranges[..., 0], (batch, ranges.shape[1]))
    return jnp.argsort(-visits.reshape(-1), stable=True).astype(jnp.int32)


def _ranges(begin: Array, clear_begin: Array, clear_end: Array, end: Array) -> Array:
    clear_begin = jnp.clip(clear_begin, begin, end)
    clear_end = jnp.clip(clear_end, clear_begin, end)
    return jnp.stack([begin, clear_begin, clear_end, end], axis=-1).astype(jnp.int32)
