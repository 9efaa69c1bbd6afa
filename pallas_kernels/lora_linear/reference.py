"""Low-rank adapted linear layers of one input: forward, backward, and in plain jnp what kernels may do instead.

Products with adapters are bracketed so that every intermediate has rank width. A base's product and its adapter's are
summed in f32 and rounded once, in one of three ways. Where a kernel unpacks a weight inside the product, it adds the
adapter's there. Where x comes with room behind it, and weights are unpacked anyway, one matrix product has joined
operands, [x, low] @ [w, b].T, which nothing is copied for. Else `adapted_product` does it: in mosaic_gpu_product.py a
kernel that copies nothing either; here joined operands, where copying them moves fewer bytes than a sum of two
products, or that sum, which is rounded twice.
Products of a wide array with a factor of few rows, `x @ a.T`, and such a factor's gradient, are `narrow_products`: here
two products of XLA's, in mosaic_gpu.py one pass.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Key

from pallas_kernels import Implementation
from pallas_kernels.nf4_linear import NF4Weight, decodes_inside, dense, join, product

ALIGNMENT = 16  # columns; low products are padded to a multiple, as the tensor cores' loads want it
ROOM = 64  # columns; room behind x is a multiple, so that the copy engine takes whole tiles of the rest
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


class Adapted(Protocol):
    """`adapted_product` of an implementation."""

    def __call__(
        self, x: Array, w: Array, up: Array, low: Array, *, first: int = 0, transpose: bool = False
    ) -> Float[Array, "*B O"]:
        """As reference.adapted_product."""
        ...


class AdaptedAndLow(Protocol):
    """`adapted_product_and_low` of an implementation."""

    def __call__(
        self, x: Array, w: Array, up: Array, down: Array, *, first: int = 0
    ) -> tuple[Float[Array, "*B O"], Float[Array, "*B P"]]:
        """As reference.adapted_product_and_low."""
        ...


def adapted_product(
    x: Float[Array, "*B I"],
    w: Float[Array, "O I"],
    up: Float[Array, "O R"],
    low: Float[Array, "*B P"],
    *,
    first: int = 0,
    transpose: bool = False,
) -> Float[Array, "*B O"]:
    """Return `x @ w.T + low[..., first : first + R] @ up.T`, or transposed `x @ w + low[...] @ up`.

    Args:
        x: any leading axes.
        w: x.dtype; (I, O) with `transpose`.
        up: x.dtype; (R, O) with `transpose`.
        low: x.dtype.
        first: column of low.
        transpose: see there.
    """
    axis, ranks = (0, up.shape[0]) if transpose else (1, up.shape[1])
    dims = "...i,io->...o" if transpose else "...i,oi->...o"
    low = low[..., first : first + ranks]
    rows, (height, width) = math.prod(x.shape[:-1]), w.shape
    if rows * x.shape[-1] + height * width < rows * w.shape[1 - axis]:
        return jnp.einsum(dims, jnp.concatenate([x, low], axis=-1), jnp.concatenate([w, up], axis=axis))
    return jnp.einsum(dims, x, w) + jnp.einsum(dims, low, up)


def adapted_product_and_low(
    x: Float[Array, "*B I"],
    w: Float[Array, "O I"],
    up: Float[Array, "O R"],
    down: Float[Array, "P I"],
    *,
    first: int = 0,
) -> tuple[Float[Array, "*B O"], Float[Array, "*B P"]]:
    """As `adapted_product` of `low = x @ down.T` in x.dtype, and low."""
    low = _f32_product("...i,ri->...r", x, down).astype(x.dtype)
    return adapted_product(x, w, up, low, first=first), low


class Kernels(NamedTuple):
    """What runs.

    Attributes:
        narrow: `narrow_products` of an implementation.
        adapted: `adapted_product`, likewise.
        part: columns; those of low products that it reads are a multiple.
        adapted_and_low: likewise.
        put_last: likewise.
        weights: the implementation that unpacks packed weights; None for the fastest that accepts them.
    """

    narrow: Narrow
    adapted: Adapted
    part: int
    adapted_and_low: AdaptedAndLow
    put_last: Callable[[Array, Array], Array]
    weights: Implementation | None


XLA = Kernels(narrow_products, adapted_product, ALIGNMENT, adapted_product_and_low, put_last, "xla")


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


def room(x: Array, layers: Sequence[Projection], weights: Implementation | None) -> int:
    """Return how many columns behind x (*B, I or more) its joined products fill, 0 where operands are not joined."""
    if any(not isinstance(layer.w, NF4Weight) or decodes_inside(x, layer.w, weights) for layer in layers):
        return 0
    ranks = _adapters(layers)[-1].columns.stop
    return ranks + -ranks % ROOM


def forward(
    x: Float[Array, "*B I"] | Float[Array, "*B I+"],
    layers: Sequence[Projection],
    rate: float,
    keys: Keys,
    kernels: Kernels = XLA,
) -> tuple[tuple[Array, ...], Kept]:
    """Return each layer's product, and what the backward needs.

    That is x, and every `scale * drop(x) @ a.T` side by side in x.dtype, padded to ALIGNMENT. Where x has `room` behind
    it, whatever it holds, they are put there. Else the largest product comes first, in whose kernel they may be made.
    """
    adapters, width = _adapters(layers), layers[0].w.shape[1]
    ups, ranks, ys = {one.layer: one for one in adapters}, adapters[-1].columns.stop, {}
    if more := x.shape[-1] - width:
        low = _low_products(x, width, adapters, rate, keys, kernels.narrow)
        x = kernels.put_last(x, _padded(low, -1, more))
        for i, layer in enumerate(layers):
            ys[i] = jnp.einsum("...i,oi->...o", x, _join_up(layer.w, ups.get(i), x, kernels))
    elif keys is None and not any(decodes_inside(x, layer.w, kernels.weights) for layer in layers):
        one = max(adapters, key=lambda one: layers[one.layer].w.shape[0])
        down = _padded(jnp.concatenate([one.scale * one.a for one in adapters]).astype(x.dtype), 0, kernels.part)
        up, first = _up(one, x.dtype, kernels.part)
        w = dense(layers[one.layer].w, x.dtype, implementation=kernels.weights)
        ys[one.layer], low = kernels.adapted_and_low(x, w, up, down, first=first)
    else:
        low = _padded(_low_products(x, width, adapters, rate, keys, kernels.narrow), -1, kernels.part)
    for i, layer in enumerate(layers):
        if i not in ys:
            ys[i] = _product(x, layer.w, ups.get(i), low, kernels)
    kept = low[..., : ranks + -ranks % ALIGNMENT]
    return tuple(ys[i] for i in range(len(layers))), Kept(x, checkpoint_name(kept, LOW_NAME))


def _join_up(w: Any, one: Adapter | None, wide: Array, kernels: Kernels) -> Float[Array, "O I+"]:
    """[w, b] as wide as the joined input, with b in its columns of it and zeros in the other layers'."""
    behind = wide.shape[-1] - w.shape[1]
    if one is None:
        columns = jnp.zeros((w.shape[0], behind), wide.dtype)
    else:
        columns = jnp.pad(one.b.astype(wide.dtype), ((0, 0), (one.columns.start, behind - one.columns.stop)))
    return join(w, columns, implementation=kernels.weights)


def _product(x: Array, w: Array | NF4Weight, one: Adapter | None, low: Array, kernels: Kernels) -> Array:
    """A layer's product, with its adapter's if it has one."""
    if one is None:
        return product(x, w, implementation=kernels.weights)
    if decodes_inside(x, w, kernels.weights):
        extra = low[..., one.columns], one.b.astype(x.dtype)
        return product(x, w, extra=extra, implementation=kernels.weights)
    up, first = _up(one, x.dtype, kernels.part)
    return kernels.adapted(x, dense(w, x.dtype, implementation=kernels.weights), up, low, first=first)


def _up(one: Adapter, dtype: Any, part: int) -> tuple[Float[Array, "O R"], int]:
    """b in its place among the columns of those parts of the low products in which its own lie, and their first."""
    first = one.columns.start // part * part
    return _padded(jnp.pad(one.b.astype(dtype), ((0, 0), (one.columns.start - first, 0))), 1, part), first


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
        dx = _gradient_of_x(dlow, adapters, layers, dys, kernels)
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
    kernels: Kernels,
) -> Array:
    """Sum over layers and adapters; the adapters' part is summed in one product with the narrowest layer's."""
    a = jnp.concatenate([one.a.astype(dlow.dtype) for one in adapters])
    inside = [i for i, (layer, dy) in enumerate(zip(layers, dys)) if decodes_inside(dy, layer.w, kernels.weights)]
    at = inside[0] if inside else min(range(len(layers)), key=lambda i: layers[i].w.shape[0])
    if inside:
        extra = dlow, a
        first = product(dys[at], layers[at].w, transpose=True, extra=extra, implementation=kernels.weights)
    else:
        w = dense(layers[at].w, dlow.dtype, implementation=kernels.weights)
        up, low = _padded(a, 0, kernels.part), _padded(dlow, -1, kernels.part)
        first = kernels.adapted(dys[at], w, up, low, transpose=True)
    rest = [i for i in range(len(layers)) if i != at]
    return _chained([first, *_bases([layers[i] for i in rest], [dys[i] for i in rest], kernels.weights)])


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
    return (low * scales).astype(x.dtype)


def _padded(x: Array, axis: int, part: int) -> Array:
    """Zeros behind x up to a multiple of `part`."""
    more = [(0, 0)] * x.ndim
    more[axis] = (0, -x.shape[axis] % part)
    return jnp.pad(x, more) if any(after for _, after in more) else x


def _f32_product(dims: str, left: Array, right: Array) -> Array:
    return jnp.einsum(dims, left, right, preferred_element_type=jnp.float32)
