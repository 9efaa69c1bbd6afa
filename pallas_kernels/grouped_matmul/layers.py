"""Linear layers of all experts over one sorted input, dense or packed, with or without adapters."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from pallas_kernels import Implementation
from pallas_kernels.grouped_matmul.api import choose, product, weights_gradient
from pallas_kernels.lora_linear import LOW_NAME
from pallas_kernels.nf4_linear import NF4Weight, dense

RANKS = 64  # what adapters' ranks are filled up to together for our kernels: their narrowest product


class GroupedLayer(NamedTuple):
    """A projection of every group: `y[m] = x[m] @ w[e].T + factor[e] * (x[m] @ a[e].T) @ b[e].T`.

    Attributes:
        w: (E, O, I), or a packed weight whose arrays have one leading axis, E, which gets no gradient.
        a: (E, R, I), or None without an adapter; then b and factor are None too.
        b: (E, O, R).
        factor: (E,) f32.
    """

    w: Float[Array, "E O I"] | NF4Weight
    a: Float[Array, "E R I"] | None = None
    b: Float[Array, "E O R"] | None = None
    factor: Float[Array, " E"] | None = None


def grouped_layers(
    x: Float[Array, "M I"],
    layers: Sequence[GroupedLayer],
    group_sizes: Int[Array, " E"],
    *,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "M O"], ...]:
    """Apply several layers of one input whose rows are sorted by group; no product b @ a is ever made.

    Base and adapter are summed in f32 before the one rounding; x meets all adapters' down-projections at once, and its
    gradient is one sum over all layers and adapters. The backward pass keeps x, the weights as they are stored and the
    adapters' low products, which bear the name LOW_NAME. Source: arXiv 2106.09685, eq. 3, for each expert.

    Args:
        x: f32, bf16 or f16, sorted by group.
        layers: at least one; their ranks may differ.
        group_sizes: rows of each group, see `grouped_matmul`.
        implementation: as in `grouped_matmul`.

    Returns:
        Each layer's result in x.dtype; gradients of w, a and b have their dtypes and are summed in f32.

    Raises:
        ValueError: shapes do not fit together.
        NotImplementedError: the named implementation refuses these arguments; the message says why.
    """
    for layer in layers:
        check(x, layer, group_sizes)
    name = choose(x, layers[0].w, implementation)
    a, bs = joined(layers, RANKS if name == "mosaic_gpu" else 1)
    return _layers(name, x, tuple(layer.w for layer in layers), a, bs, group_sizes)


def check(x: Array | jax.ShapeDtypeStruct, layer: GroupedLayer, group_sizes: Array) -> None:
    """Raises ValueError where shapes do not fit together."""
    w, a, b, factor = layer
    groups, (out, width) = (w.codes if isinstance(w, NF4Weight) else w).shape[0], w.shape[-2:]
    rank = 0 if a is None else a.shape[1]
    want = {"x": (x.shape[0], width), "group_sizes": (groups,)}
    got = {"x": x.shape, "group_sizes": group_sizes.shape}
    if a is not None:
        want |= {"a": (groups, rank, width), "b": (groups, out, rank), "factor": (groups,)}
        got |= {"a": a.shape, "b": getattr(b, "shape", None), "factor": getattr(factor, "shape", None)}
    if want != got:
        raise ValueError(f"grouped_layers: with w of {groups} groups, {(out, width)}, shapes are {want}; got {got}")


def joined(layers: Sequence[GroupedLayer], multiple: int) -> tuple[Array | None, tuple[Array | None, ...]]:
    """All down-projections one after the other (E, R, I), and the up-projections with zeros where others' ranks are.

    R is their ranks' sum filled up to a multiple.
    """
    ranks = [0 if layer.a is None else layer.a.shape[1] for layer in layers]
    total = -(-sum(ranks) // multiple) * multiple
    if not total:
        return None, (None,) * len(layers)
    downs = [layer.a for layer in layers if layer.a is not None]
    a = jnp.concatenate(downs, axis=1)
    a = jnp.pad(a, ((0, 0), (0, total - a.shape[1]), (0, 0)))
    bs = []
    for i, (layer, rank) in enumerate(zip(layers, ranks, strict=True)):
        if layer.b is None or layer.factor is None:
            bs.append(None)
            continue
        before = sum(ranks[:i])
        b = layer.factor[:, None, None] * layer.b
        bs.append(jnp.pad(b, ((0, 0), (0, 0), (before, total - before - rank))))
    return a, tuple(bs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _layers(name: Implementation, x: Array, ws: tuple, a: Array | None, bs: tuple, sizes: Array) -> tuple[Array, ...]:
    return _forward(name, x, ws, a, bs, sizes)[0]


def _forward(name: Implementation, x: Array, ws: tuple, a: Array | None, bs: tuple, sizes: Array):
    low = low_product(name, x, a, sizes)
    ys = []
    for w, b in zip(ws, bs, strict=True):
        xs, weights = with_adapter(x, w, low, b)
        ys.append(product(name, xs, weights, sizes, transposed=True))
    return tuple(ys), low


def low_product(name: Implementation, x: Array, a: Array | None, sizes: Array) -> Array | None:
    """x with all down-projections."""
    return None if a is None else checkpoint_name(product(name, (x,), (a,), sizes, transposed=True), LOW_NAME)


def with_adapter(x: Array, w, low: Array | None, b: Array | None) -> tuple[list[Array], list[Array]]:
    """What a layer's result is the sum of products of."""
    return ([x], [dense(w, x.dtype)]) if low is None or b is None else ([x, low], [dense(w, x.dtype), b])


def _layers_fwd(name: Implementation, x: Array, ws: tuple, a: Array | None, bs: tuple, sizes: Array):
    ys, low = _forward(name, x, ws, a, bs, sizes)
    return ys, (x, ws, a, bs, sizes, low)


def _layers_bwd(name: Implementation, residuals, dys: tuple[Array, ...]):
    x, ws, a, bs, sizes, low = residuals
    dlow = low_gradient(name, dys, bs, sizes)
    dx = product(name, *over_and_down(x.dtype, dys, ws, a, dlow), sizes, transposed=False)
    dws, da = gradients_below(name, x, ws, a, dys, dlow, sizes)
    return dx, dws, da, gradients_above(name, bs, low, dys, sizes), no_gradient(sizes)


def low_gradient(name: Implementation, dys: Sequence[Array], bs: Sequence[Array | None], sizes: Array) -> Array | None:
    """Of adapters' low products."""
    pairs = [(dy, b) for dy, b in zip(dys, bs, strict=True) if b is not None]
    if not pairs:
        return None
    adapted, ups = zip(*pairs, strict=True)
    return product(name, adapted, ups, sizes, transposed=False)


def over_and_down(
    dtype, dys: Sequence[Array], ws: Sequence, a: Array | None, dlow: Array | None
) -> tuple[list[Array], list[Array]]:
    """What the gradient of layers' input is the sum of products of."""
    over, down = list(dys), [dense(w, dtype) for w in ws]
    return (over, down) if a is None or dlow is None else ([*over, dlow], [*down, a])


def gradients_above(name: Implementation, bs: Sequence, low: Array | None, dys: Sequence[Array], sizes: Array) -> tuple:
    """Of up-projections, which read the low product."""
    if low is None:
        return (None,) * len(bs)
    pairs = zip(bs, dys, strict=True)
    return tuple(None if b is None else weights_gradient(name, low, dy, sizes, b.dtype) for b, dy in pairs)


def gradients_below(name: Implementation, x: Array, ws: Sequence, a, dys: Sequence[Array], dlow, sizes: Array) -> tuple:
    """Of weights and of the joined down-projection, which read x."""
    pairs = zip(ws, dys, strict=True)
    dws = (None if isinstance(w, NF4Weight) else weights_gradient(name, x, dy, sizes, w.dtype) for w, dy in pairs)
    return tuple(dws), None if a is None else weights_gradient(name, x, dlow, sizes, a.dtype)


def no_gradient(sizes: Array) -> np.ndarray:
    """Of integers."""
    return np.zeros(sizes.shape, jax.dtypes.float0)


_layers.defvjp(_layers_fwd, _layers_bwd)
