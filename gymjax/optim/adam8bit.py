"""Adam with its two moments in 8 bits (arXiv 2110.02861), as bitsandbytes' AdamW8bit, for optax.

Memory of a weight's state: 2 bytes and 2 f32 in 256 in place of 8 bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PyTree

from gymjax.quant.blockwise import BLOCK, Blockwise, dequantize, quantize, zeros

SMALLEST = 4096
"""Tensors of fewer elements keep f32 moments (bitsandbytes' min_8bit_size)."""

LARGEST = 2**24
"""Weights of more elements are updated piece by piece, in place: moments in f32 exist of one piece only."""


class Adam8bitState(NamedTuple):
    """Updates done, and the first and second moment of every weight: Blockwise, or an f32 array."""

    count: Int[Array, ""]
    mu: PyTree
    nu: PyTree


def scale_by_adam_8bit(b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> optax.GradientTransformation:
    """Adam's direction, `m / c1 / (sqrt(v) / sqrt(c2) + eps)`, c = 1 - b^t, from moments kept in 8 bits.

    `m = b1 * m + (1 - b1) * g` and `v = b2 * v + (1 - b2) * g^2` are computed in f32 from the dequantized moments,
    used, and quantized again: m with the signed map, v with the unsigned one. Embeddings (as transformers has it) and
    tensors of fewer than SMALLEST elements keep f32; stacked layers (a path through "stacks") are tensors each.

    Args:
        b1: decay of the first moment.
        b2: of the second.
        eps: added to the root.
    """

    def init(params: PyTree) -> Adam8bitState:
        moments = [
            jax.tree_util.tree_map_with_path(lambda path, p, kind=kind: _zeros(path, p, kind), params)
            for kind in ("signed", "unsigned")
        ]
        return Adam8bitState(jnp.int32(0), *moments)

    def update(updates: PyTree, state: Any, params: PyTree | None = None, **_: Any) -> tuple[PyTree, Adam8bitState]:
        del params
        count = state.count + 1
        c1, c2 = 1 - jnp.float32(b1) ** count, jnp.sqrt(1 - jnp.float32(b2) ** count)

        def moment(path: Any, grad: Array, mu: Any, nu: Any) -> tuple[Array, Any, Any]:
            def one(grad: Array, mu: Any, nu: Any, leading: int) -> tuple[Array, Any, Any]:
                m, v = b1 * _f32(mu) + (1 - b1) * grad, b2 * _f32(nu) + (1 - b2) * jnp.square(grad)
                return m / c1 / (jnp.sqrt(v) / c2 + eps), _like(mu, m, leading), _like(nu, v, leading)

            leading = _leading(path)
            # A layer each, or a column of blocks: wide weights are split over devices by their rows.
            axis, pieces = (0, grad.shape[0]) if leading else (-1, grad.shape[-1] // BLOCK)
            cut = leading or grad.shape[-1] % BLOCK == 0
            if not isinstance(mu, Blockwise) or grad.size <= LARGEST or not cut:
                return one(grad, mu, nu, leading)
            return _piece_by_piece(lambda grad, mu, nu: one(grad, mu, nu, leading), (grad, mu, nu), axis, pieces)

        found = jax.tree_util.tree_map_with_path(moment, updates, state.mu, state.nu)
        steps, mu, nu = (
            jax.tree.map(lambda leaf, i=i: leaf[i], found, is_leaf=lambda leaf: type(leaf) is tuple) for i in range(3)
        )
        return steps, Adam8bitState(count, mu, nu)

    return optax.GradientTransformation(init, update)


def _piece_by_piece(one: Callable, whole: tuple[Array, Any, Any], axis: int, pieces: int) -> tuple[Array, Any, Any]:
    """What `one` makes of each piece along an axis, over the piece: the gradient's memory becomes the direction's."""

    def start(i: Array, x: Array) -> tuple[Array, int, int]:
        size = x.shape[axis] // pieces
        return i * size, size, axis % x.ndim

    def body(i: Array, whole: tuple[Array, Any, Any]) -> tuple[Array, Any, Any]:
        piece = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, *start(i, x)), whole)

        def place(x: Array, y: Array) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(x, y, start(i, x)[0], axis % x.ndim)

        return jax.tree.map(place, whole, one(*piece))

    return jax.lax.fori_loop(0, pieces, body, whole)


def _leading(path: Any) -> int:
    """Axes of stacked layers."""
    return int("stacks" in jax.tree_util.keystr(path))


def _zeros(path: Any, param: Array, kind: Any) -> Blockwise | Array:
    leading, name = _leading(path), jax.tree_util.keystr(path)
    size = param.size // param.shape[0] if leading else param.size
    if size < SMALLEST or "embed" in name:
        return jnp.zeros_like(param, jnp.float32)
    return zeros(param.shape, kind, leading=leading)


def _f32(moment: Blockwise | Array) -> Float[Array, "..."]:
    return dequantize(moment) if isinstance(moment, Blockwise) else moment


def _like(old: Blockwise | Array, new: Array, leading: int) -> Blockwise | Array:
    return quantize(new, old.map, leading=leading) if isinstance(old, Blockwise) else new
