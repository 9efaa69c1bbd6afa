"""Low-rank adapted linear layers of one input in plain jnp: forward and backward.

Products with adapters are bracketed so that every intermediate has rank width. A base's product and its adapter's are
summed in one of two ways, whichever moves fewer bytes: as one matrix product over joined operands, [x, low] @ [w, b].T,
which copies x (and w, unless it is being unpacked anyway), or as two, the second of which is added to the first. Where
a kernel unpacks a weight inside the product, it adds the adapter's there.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from pallas_kernels import Implementation
from pallas_kernels.nf4_linear import NF4Weight, decodes_inside, join, product

ALIGNMENT = 16  # elements; joined widths stay multiples of it, as the tensor cores' loads want them


class Projection(NamedTuple):
    """One of several linear layers of the same input.

    Attributes:
        w: (O, I) frozen base weight, an array or packed.
        a: (R, I) down-projection, or None for a layer without an adapter.
        b: (O, R) up-projection, or None.
        scale: scalar factor of the adapter's product, f32.
    """

    w: Float[Array, "O I"] | NF4Weight
    a: Float[Array, "R I"] | None
    b: Float[Array, "O R"] | None
    scale: Float[Array, ""]


Keys = tuple[Key[Array, ""], ...] | None


def drop(x: Float[Array, "*B I"], rate: float, key: Key[Array, ""] | None) -> Float[Array, "*B I"]:
    """Zero each element with probability rate, divide the others by 1 - rate; a linear map that is its own adjoint."""
    if key is None:  # as the caller has it where rate is 0
        return x
    keep = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate), 0).astype(x.dtype)


class Adapter(NamedTuple):
    """A layer's adapter, which layer that is, and where its low product lies among all."""

    layer: int
    a: Array
    b: Array
    scale: Array
    columns: slice


def forward(
    x: Float[Array, "*B I"],
    layers: Sequence[Projection],
    rate: float,
    keys: Keys,
    implementation: Implementation | None = "xla",
) -> tuple[tuple[Array, ...], Float[Array, "*B P"]]:
    """Return each layer's product, and every `scale * drop(x) @ a.T` side by side in x.dtype, padded to ALIGNMENT.

    `implementation` is nf4_linear's, which unpacks packed weights.
    """
    adapters = _adapters(layers)
    low = _low_products(x, adapters, rate, keys)
    rows, outs = math.prod(x.shape[:-1]), sum(layer.w.shape[0] for layer in layers)
    moves_less = rows * x.shape[-1] + sum(_copied(layer.w) for layer in layers) < rows * outs
    ups = {one.layer: one for one in adapters}
    if moves_less and not any(decodes_inside(x, layer.w, implementation) for layer in layers):
        x = jnp.concatenate([x, low], axis=-1)
        ws = (_join_up(layer.w, ups.get(i), low, implementation) for i, layer in enumerate(layers))
        return tuple(jnp.einsum("...i,oi->...o", x, w) for w in ws), low
    ys = []
    for i, layer in enumerate(layers):
        one = ups.get(i)
        extra = None if one is None else (low[..., one.columns], one.b.astype(x.dtype))
        ys.append(product(x, layer.w, extra=extra, implementation=implementation))
    return tuple(ys), low


def backward(
    x: Float[Array, "*B I"],
    low: Float[Array, "*B P"],
    layers: Sequence[Projection],
    rate: float,
    keys: Keys,
    dys: Sequence[Float[Array, "*B O"]],
    implementation: Implementation | None = "xla",
) -> tuple[Array, list[tuple[Array, Array] | None]]:
    """Return the gradient of x, and those of each layer's a and b, summed in f32, or None."""
    adapters = _adapters(layers)
    dlows = [
        (one.scale * _f32_product("...o,or->...r", dys[one.layer], one.b.astype(x.dtype))).astype(x.dtype)
        for one in adapters
    ]
    dbs = [_f32_product("...o,...r->or", dys[one.layer], low[..., one.columns]) for one in adapters]
    if keys is None:
        dlow = jnp.concatenate(dlows, axis=-1)
        da = _f32_product("...r,...i->ri", dlow, x)
        das = [da[one.columns] for one in adapters]
        dx = _gradient_of_x(dlow, adapters, layers, dys, implementation)
    else:
        dx, das = sum(_bases(layers, dys, implementation), start=jnp.zeros((), x.dtype)), []
        for one, dlow in zip(adapters, dlows):
            key = keys[one.layer]
            das.append(_f32_product("...r,...i->ri", dlow, drop(x, rate, key)))
            dx += drop(jnp.einsum("...r,ri->...i", dlow, one.a.astype(x.dtype)), rate, key)
    found = {one.layer: (da.astype(one.a.dtype), db.astype(one.b.dtype)) for one, da, db in zip(adapters, das, dbs)}
    return dx, [found.get(i) for i in range(len(layers))]


def _gradient_of_x(
    dlow: Array,
    adapters: Sequence[Adapter],
    layers: Sequence[Projection],
    dys: Sequence[Array],
    implementation: Implementation | None,
) -> Array:
    """Sum over layers and adapters; the adapters' part joins the narrowest layer's product, or is added."""
    a = jnp.concatenate([one.a.astype(dlow.dtype) for one in adapters])
    rows, width = math.prod(dlow.shape[:-1]), a.shape[1]
    inside = [i for i, (layer, dy) in enumerate(zip(layers, dys)) if decodes_inside(dy, layer.w, implementation)]
    if inside:
        extra = {inside[0]: (dlow, a)}
        parts = [
            product(dy, layer.w, transpose=True, extra=extra.get(i), implementation=implementation)
            for i, (layer, dy) in enumerate(zip(layers, dys))
        ]
        return sum(parts[1:], start=parts[0])
    copied = [rows * layer.w.shape[0] + _copied(layer.w) for layer in layers]
    if min(copied) >= rows * width:
        return sum(_bases(layers, dys, implementation), start=jnp.einsum("...r,ri->...i", dlow, a))
    at, spare = copied.index(min(copied)), -dlow.shape[-1] % ALIGNMENT
    dy = jnp.concatenate([dys[at], _pad_last(dlow, spare)], axis=-1)
    w = join(layers[at].w, jnp.pad(a, ((0, spare), (0, 0))), 0, implementation=implementation)
    others = [i for i in range(len(layers)) if i != at]
    rest = _bases([layers[i] for i in others], [dys[i] for i in others], implementation)
    return sum(rest, start=jnp.einsum("...o,oi->...i", dy, w))


def _bases(layers: Sequence[Projection], dys: Sequence[Array], implementation: Implementation | None) -> list[Array]:
    pairs = zip(layers, dys, strict=True)
    return [product(dy, layer.w, transpose=True, implementation=implementation) for layer, dy in pairs]


def _adapters(layers: Sequence[Projection]) -> list[Adapter]:
    found, start = [], 0
    for i, (_, a, b, scale) in enumerate(layers):
        if a is not None and b is not None:
            found.append(Adapter(i, a, b, scale, slice(start, start + a.shape[0])))
            start += a.shape[0]
    return found


def _low_products(x: Array, adapters: Sequence[Adapter], rate: float, keys: Keys) -> Float[Array, "*B P"]:
    downs = [one.a.astype(x.dtype) for one in adapters]
    scales = jnp.concatenate([jnp.full(one.a.shape[0], one.scale) for one in adapters])
    if keys is None:
        low = _f32_product("...i,ri->...r", x, jnp.concatenate(downs))
    else:
        inputs = [drop(x, rate, keys[one.layer]) for one in adapters]
        low = jnp.concatenate([_f32_product("...i,ri->...r", *each) for each in zip(inputs, downs)], axis=-1)
    low = (low * scales).astype(x.dtype)
    return _pad_last(low, -low.shape[-1] % ALIGNMENT)


def _join_up(
    w: Array | NF4Weight, one: Adapter | None, low: Array, implementation: Implementation | None
) -> Float[Array, "O IP"]:
    """[w, b], with b in its columns of the joined input and zeros in the other layers'."""
    columns = jnp.zeros((w.shape[0], low.shape[-1]), low.dtype)
    if one is not None:
        columns = columns.at[:, one.columns].set(one.b.astype(low.dtype))
    return join(w, columns, 1, implementation=implementation)


def _copied(w: Array | NF4Weight) -> int:
    """Elements that joining something to a weight copies; a packed one is written anyway."""
    return 0 if isinstance(w, NF4Weight) else math.prod(w.shape)


def _pad_last(x: Array, more: int) -> Array:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, more)]) if more else x


def _f32_product(dims: str, left: Array, right: Array) -> Array:
    return jnp.einsum(dims, left, right, preferred_element_type=jnp.float32)
