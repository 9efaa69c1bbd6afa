"""Low-rank adapted linear layers of one input in plain jnp: forward and backward.

Products with adapters are bracketed so that every intermediate has rank width. A base's product and its adapter's are
summed in one of two ways, whichever moves fewer bytes: as one matrix product over joined operands, [x, low] @ [w, b].T,
which copies x (unless whatever makes it leaves room behind) and w (unless it is being unpacked anyway), or as two, the
second of which is added to the first.
Where a kernel unpacks a weight inside the product, it adds the adapter's there. Products of a wide array with a factor
of few rows, `x @ a.T`, and such a factor's gradient, are `narrow_products`: here two products of XLA's, in
mosaic_gpu.py one pass.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Key

from pallas_kernels import Implementation
from pallas_kernels.nf4_linear import NF4Weight, decodes_inside, join, product

ALIGNMENT = 16  # elements; joined widths stay multiples of it, as the tensor cores' loads want them
ROOM = (
    64  # elements; what is joined to x is padded to a multiple, so that the copy engine takes whole tiles of the rest
)
LOW_NAME = "lora_low"  # of what the backward needs and is small, for rematerialisation policies that keep it


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


class Narrow(Protocol):
    """`narrow_products` of an implementation."""

    def __call__(
        self, x: Array, factor: Array | None, low: Array | None, *, width: int | None = None, rank_first: bool = False
    ) -> Any:
        """As reference.narrow_products."""
        ...


def narrow_products(
    x: Float[Array, "*B N"],
    factor: Float[Array, "R N"] | None,
    low: Float[Array, "*B R"] | None,
    *,
    width: int | None = None,
    rank_first: bool = False,
) -> tuple[Float[Array, "*B R"] | None, Float[Array, "N R"] | Float[Array, "R N"] | None]:
    """Return `x @ factor.T` and `x.T @ low`, summed in f32 and left so; each None where its argument is.

    Args:
        x: the wide array, or one whose first `width` columns are it.
        factor: few rows as wide as x.
        low: few columns as long as x.
        width: N, None for all columns of x.
        rank_first: ask for the second as (R, N), made so: XLA for CPUs has no bf16 product whose result it transposes.
    """
    x = x[..., :width]
    product = None if factor is None else _f32_product("...n,rn->...r", x, factor)
    if low is None:
        return product, None
    return product, _f32_product(*(("...r,...n->rn", low, x) if rank_first else ("...n,...r->nr", x, low)))


def put_last(whole: Float[Array, "*B I+C"], more: Float[Array, "*B C"]) -> Float[Array, "*B I+C"]:
    """Return `whole` with `more` as its last columns, in place where nothing else reads `whole`."""
    return jax.lax.dynamic_update_slice_in_dim(whole, more, whole.shape[-1] - more.shape[-1], axis=-1)


class Kernels(NamedTuple):
    """What runs.

    Attributes:
        narrow: `narrow_products` of an implementation.
        put_last: likewise.
        weights: the implementation that unpacks packed weights; None for the fastest that accepts them.
    """

    narrow: Narrow
    put_last: Callable[[Array, Array], Array]
    weights: Implementation | None


XLA = Kernels(narrow_products, put_last, "xla")


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


class Kept(NamedTuple):
    """What the backward needs of the forward.

    Attributes:
        x: (*B, I or more), the input in its first columns.
        low: (*B, P), see `forward`.
    """

    x: Float[Array, "*B I+"]
    low: Float[Array, "*B P"]


def room(x: Array, layers: Sequence[Projection], weights: Implementation | None, *, ready: bool) -> int:
    """Return how many columns behind x (*B, I or more) its joined products fill, 0 where operands are not joined.

    `ready` says that whatever makes x leaves them there; else a copy of x counts.
    """
    rows, width = math.prod(x.shape[:-1]), layers[0].w.shape[1]
    adapted = sum(layer.w.shape[0] for layer in layers if layer.a is not None)
    if (not ready) * rows * width + sum(_copied(layer.w) for layer in layers) >= rows * adapted:
        return 0
    if any(decodes_inside(x, layer.w, weights) for layer in layers):
        return 0
    ranks = sum(one.a.shape[0] for one in _adapters(layers))
    return ranks + -ranks % ROOM


def forward(
    x: Float[Array, "*B I"] | Float[Array, "*B I+"],
    layers: Sequence[Projection],
    rate: float,
    keys: Keys,
    kernels: Kernels = XLA,
) -> tuple[tuple[Array, ...], Kept]:
    """Return each layer's product, and what the backward needs.

    That is every `scale * drop(x) @ a.T` side by side in x.dtype, padded to ALIGNMENT, and x. Where operands are
    joined, the low products go behind x: into the columns that it has there already, whatever they hold, or x is
    written with `room` for them first, which costs nothing where whatever makes x can do so.
    """
    adapters, width = _adapters(layers), layers[0].w.shape[1]
    ups = {one.layer: one for one in adapters}
    more = room(x, layers, kernels.weights, ready=x.shape[-1] > width)
    wide = _pad_last(x, width + more - x.shape[-1])
    low = checkpoint_name(_low_products(wide, width, adapters, rate, keys, kernels.narrow), LOW_NAME)
    if more:
        wide = kernels.put_last(wide, _pad_last(low, more - low.shape[-1]))
        ws = (_join_up(layer.w, ups.get(i), wide, kernels) for i, layer in enumerate(layers))
        return tuple(jnp.einsum("...i,oi->...o", wide, w) for w in ws), Kept(wide, low)
    ys = []
    for i, layer in enumerate(layers):
        one = ups.get(i)
        extra = None if one is None else (low[..., one.columns], one.b.astype(x.dtype))
        ys.append(product(x, layer.w, extra=extra, implementation=kernels.weights))
    return tuple(ys), Kept(wide, low)


def backward(
    kept: Kept,
    layers: Sequence[Projection],
    rate: float,
    keys: Keys,
    dys: Sequence[Float[Array, "*B O"]],
    kernels: Kernels = XLA,
) -> tuple[Array, list[tuple[Array, Array] | None]]:
    """Return the gradient of x, and those of each layer's a and b, summed in f32, or None."""
    (x, low), adapters, width = kept, _adapters(layers), layers[0].w.shape[1]
    dlows, dbs = [], []
    for one in adapters:
        dlow, db = kernels.narrow(dys[one.layer], one.b.T.astype(x.dtype), low[..., one.columns])
        dlows.append((one.scale * dlow).astype(x.dtype))
        dbs.append(db)
    if keys is None:
        dlow = jnp.concatenate(dlows, axis=-1)
        da = kernels.narrow(x, None, dlow, width=width, rank_first=True)[1]
        das = [da[one.columns] for one in adapters]
        dx = _gradient_of_x(dlow, adapters, layers, dys, kernels.weights)
    else:
        dx, das = sum(_bases(layers, dys, kernels.weights), start=jnp.zeros((), x.dtype)), []
        for one, dlow in zip(adapters, dlows):
            key = keys[one.layer]
            das.append(kernels.narrow(drop(x[..., :width], rate, key), None, dlow, rank_first=True)[1])
            dx += drop(jnp.einsum("...r,ri->...i", dlow, one.a.astype(x.dtype)), rate, key)
    found = {one.layer: (da.astype(one.a.dtype), db.astype(one.b.dtype)) for one, da, db in zip(adapters, das, dbs)}
    return dx, [found.get(i) for i in range(len(layers))]


def _gradient_of_x(
    dlow: Array,
    adapters: Sequence[Adapter],
    layers: Sequence[Projection],
    dys: Sequence[Array],
    weights: Implementation | None,
) -> Array:
    """Sum over layers and adapters; the adapters' part joins the narrowest layer's product, or is added."""
    a = jnp.concatenate([one.a.astype(dlow.dtype) for one in adapters])
    rows, width = math.prod(dlow.shape[:-1]), a.shape[1]
    inside = [i for i, (layer, dy) in enumerate(zip(layers, dys)) if decodes_inside(dy, layer.w, weights)]
    if inside:
        extra = {inside[0]: (dlow, a)}
        parts = [
            product(dy, layer.w, transpose=True, extra=extra.get(i), implementation=weights)
            for i, (layer, dy) in enumerate(zip(layers, dys))
        ]
        return _chained(parts)
    copied = [rows * layer.w.shape[0] + _copied(layer.w) for layer in layers]
    if min(copied) >= rows * width:
        return _chained([jnp.einsum("...r,ri->...i", dlow, a), *_bases(layers, dys, weights)])
    at, spare = copied.index(min(copied)), -dlow.shape[-1] % ALIGNMENT
    dy = jnp.concatenate([dys[at], _pad_last(dlow, spare)], axis=-1)
    w = join(layers[at].w, jnp.pad(a, ((0, spare), (0, 0))), 0, implementation=weights)
    others = [i for i in range(len(layers)) if i != at]
    rest = _bases([layers[i] for i in others], [dys[i] for i in others], weights)
    return _chained([jnp.einsum("...o,oi->...i", dy, w), *rest])


def _chained(products: Sequence[Array]) -> Array:
    """Sum of products, written so that cuBLAS starts each from the sum of those before it.

    XLA looks at a sum's left side first, and gives up where that is a product that has a start already.
    """
    total = products[0]
    for one in products[1:]:
        total = one + total
    return total


def _bases(layers: Sequence[Projection], dys: Sequence[Array], weights: Implementation | None) -> list[Array]:
    pairs = zip(layers, dys, strict=True)
    return [product(dy, layer.w, transpose=True, implementation=weights) for layer, dy in pairs]


def _adapters(layers: Sequence[Projection]) -> list[Adapter]:
    found, start = [], 0
    for i, (_, a, b, scale) in enumerate(layers):
        if a is not None and b is not None:
            found.append(Adapter(i, a, b, scale, slice(start, start + a.shape[0])))
            start += a.shape[0]
    return found


def _low_products(
    wide: Array, width: int, adapters: Sequence[Adapter], rate: float, keys: Keys, narrow: Narrow
) -> Float[Array, "*B P"]:
    """`scale * drop(x) @ a.T` of all adapters; x is the first `width` columns of `wide`."""
    x = wide[..., :width]
    downs = [one.a.astype(x.dtype) for one in adapters]
    scales = jnp.concatenate([jnp.full(one.a.shape[0], one.scale) for one in adapters])
    if keys is None:
        low = narrow(wide, jnp.concatenate(downs), None, width=width)[0]
    else:
        inputs = [drop(x, rate, keys[one.layer]) for one in adapters]
        low = jnp.concatenate([narrow(*each, None)[0] for each in zip(inputs, downs)], axis=-1)
    low = (low * scales).astype(x.dtype)
    return _pad_last(low, -low.shape[-1] % ALIGNMENT)


def _join_up(w: Array | NF4Weight, one: Adapter | None, wide: Array, kernels: Kernels) -> Float[Array, "O I+"]:
    """[w, b] as wide as the joined input, with b in its columns of it and zeros in the other layers'."""
    behind = wide.shape[-1] - w.shape[1]
    if one is None:
        columns = jnp.zeros((w.shape[0], behind), wide.dtype)
    else:
        columns = jnp.pad(one.b.astype(wide.dtype), ((0, 0), (one.columns.start, behind - one.columns.stop)))
    return join(w, columns, 1, implementation=kernels.weights)


def _copied(w: Array | NF4Weight) -> int:
    """Elements that joining something to a weight copies; a packed one is written anyway."""
    return 0 if isinstance(w, NF4Weight) else math.prod(w.shape)


def _pad_last(x: Array, more: int) -> Array:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, more)]) if more else x


def _f32_product(dims: str, left: Array, right: Array) -> Array:
    return jnp.einsum(dims, left, right, preferred_element_type=jnp.float32)
