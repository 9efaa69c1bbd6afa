"""Grouped matrix product in plain jnp: one scan over blocks of rows, each of a single group.

A group of n rows is cut into ceil(n / block) blocks. The last one of a group runs over its end: forward, the next
group's first block overwrites what it wrote there; in the weight's gradient those rows are masked. A peer in cases.py,
`jax.lax.ragged_dot`, multiplies all rows with all weights where XLA has no grouped kernel (CPUs): E times the work, and
an (E, M, D) copy of x.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

_SMALLEST, _LARGEST = 8, 512
narrow = None  # products and gradients of narrow factors are two passes


class _Blocks(NamedTuple):
    """What every block works on: its group, its first row, and the row behind its group's last."""

    group: Int[Array, " blocks"]
    row: Int[Array, " blocks"]
    end: Int[Array, " blocks"]


def forward(x: Float[Array, "M D"], w: Float[Array, "E F D"], sizes: Int[Array, " E"]) -> Float[Array, "M F"]:
    """Return x[m] @ w[e].T for every row m of group e, 0 for rows of no group, in x.dtype."""
    return products((x,), (w,), sizes, transposed=True)


def backward_x(dy: Float[Array, "M F"], w: Float[Array, "E F D"], sizes: Int[Array, " E"]) -> Float[Array, "M D"]:
    """Return the gradient of x, dy[m] @ w[e], in dy.dtype."""
    return products((dy,), (w,), sizes, transposed=False)


def backward_w(
    x: Float[Array, "M D"], dy: Float[Array, "M F"], sizes: Int[Array, " E"], dtype: jnp.dtype
) -> Float[Array, "E F D"]:
    """Return the gradient of w, the sum of dy[m] x[m].T over each group's rows, summed in f32."""
    size = _block_size(*x.shape[:1], *sizes.shape)
    x_pad, dy_pad = _pad(x, size), _pad(dy, size)

    def add(dw: Array, block: _Blocks) -> tuple[Array, None]:
        inside = (block.row + jnp.arange(size) < block.end)[:, None]
        cut = (jnp.where(inside, jax.lax.dynamic_slice_in_dim(array, block.row, size), 0) for array in (dy_pad, x_pad))
        part = jnp.einsum("mf,md->fd", *cut, preferred_element_type=jnp.float32)
        return dw.at[block.group].add(part), None

    zero = jnp.zeros((*sizes.shape, dy.shape[1], x.shape[1]), jnp.float32)
    return jax.lax.scan(add, zero, _blocks(x.shape[0], sizes, size))[0].astype(dtype)


def products(
    xs: Sequence[Array], ws: Sequence[Array], sizes: Int[Array, " E"], *, transposed: bool
) -> Float[Array, "M F"]:
    """Return the sum over i of xs[i][m] @ ws[i][e].T, or @ ws[i][e] if not transposed, rounded once to x's dtype."""
    rows, dtype, axis = xs[0].shape[0], xs[0].dtype, 1 if transposed else 0
    size = _block_size(rows, *sizes.shape)
    pads = [_pad(x, size) for x in xs]
    dims = (((1,), (axis,)), ((), ()))

    def write(y: Array, block: _Blocks) -> tuple[Array, None]:
        part = jnp.float32(0)
        for x_pad, w in zip(pads, ws, strict=True):
            x = jax.lax.dynamic_slice_in_dim(x_pad, block.row, size)
            one = w[block.group].astype(dtype)
            part += jax.lax.dot_general(x, one, dims, preferred_element_type=jnp.float32)
        return jax.lax.dynamic_update_slice_in_dim(y, part.astype(dtype), block.row, 0), None

    zero = jnp.zeros((rows + size, ws[0].shape[2 - axis]), dtype)
    y, _ = jax.lax.scan(write, zero, _blocks(rows, sizes, size))
    return jnp.where(jnp.arange(rows)[:, None] < jnp.sum(sizes), y[:rows], 0)


def gated(
    xs: Sequence[Array], gates: Sequence[Array], ups: Sequence[Array], weight: Float[Array, " M"], sizes
) -> tuple[Array, Array, Array]:
    """Return gate, up and `silu(gate) * up * weight`, (M, F).

    gate[m] is the sum over i of xs[i][m] @ gates[i][e].T, up likewise; both are rounded to x's dtype first.
    """
    gate, up = (products(xs, ws, sizes, transposed=True) for ws in (gates, ups))
    return gate, up, _gate(gate, up, weight).astype(gate.dtype)


def gated_backward(
    xs: Sequence[Array], ws: Sequence[Array], gate: Array, up: Array, weight: Float[Array, " M"], sizes
) -> tuple[Array, Array, Array, Float[Array, " M"]]:
    """Return gradients of gate and up, `silu(gate) * up * weight`, and the gradient of weight.

    That product's gradient is the sum over i of xs[i][m] @ ws[i][e], rounded to x's dtype.
    """
    d = products(xs, ws, sizes, transposed=False)
    product, pull_back = jax.vjp(_gate, gate, up, weight)
    dgate, dup, dweight = pull_back(d.astype(jnp.float32))
    return dgate, dup, product.astype(gate.dtype), dweight


def _gate(gate: Array, up: Array, weight: Array) -> Float[Array, "M F"]:
    return jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32) * weight[:, None]


def _block_size(rows: int, groups: int) -> int:
    """About the rows of an average group, a power of two."""
    mean = -(-rows // groups)
    return min(max(1 << (mean - 1).bit_length(), _SMALLEST), _LARGEST)


def _blocks(rows: int, sizes: Int[Array, " E"], size: int) -> _Blocks:
    """Every block in the order of rows; as many as any sizes need, the superfluous ones in the padding behind x."""
    count = rows // size + min(rows, sizes.shape[0])
    per_group = -(-sizes // size)
    last = jnp.cumsum(per_group)
    index = jnp.arange(count, dtype=sizes.dtype)
    group = jnp.minimum(jnp.searchsorted(last, index, side="right"), sizes.shape[0] - 1)
    end = jnp.cumsum(sizes)[group]
    row = end - sizes[group] + (index - (last - per_group)[group]) * size
    used = index < last[-1]
    return _Blocks(group, jnp.where(used, row, rows), jnp.where(used, end, 0))


def _pad(x: Array, size: int) -> Array:
    """Room for a block that starts at the last row, so that no slice is moved."""
    return jnp.pad(x, ((0, size), (0, 0)))
