"""Cross-entropy of a linear head in plain jnp, one chunk of tokens at a time.

Chunks are cut from the T axis by dynamic slices inside a scan, so the leading axes keep their sharding. At any time
the logits of one chunk exist in f32, about chunk_tokens * V values, and the gradients by the products of a group of
chunks in x.dtype, about group_tokens * V: matrix products over few tokens are slow, f32 logits of many are large.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import Implementation


@dataclasses.dataclass(frozen=True)
class Settings:
    """What of a call is static: see linear_cross_entropy for the fields."""

    chunk_tokens: int
    group_tokens: int
    ignored: int
    scale: float
    softcap: float | None
    smoothing: float
    z_loss: float
    metrics: bool
    implementation: Implementation = "xla"


class Outcome(NamedTuple):
    """What the forward pass knows of each token; correct and entropy are None where no metrics are asked for."""

    loss: Float[Array, "*B T"]
    lse: Float[Array, "*B T"]
    correct: Bool[Array, "*B T"] | None
    entropy: Float[Array, "*B T"] | None


class Head(NamedTuple):
    """The dense head in x.dtype and its bias, if any."""

    weight: Float[Array, "V D"]
    bias: Float[Array, " V"] | None


class Gradients(NamedTuple):
    """Of x in x.dtype and, of a trained head, of its weight and bias in f32, both summed over tokens in f32."""

    x: Float[Array, "*B T D"]
    weight: Float[Array, "V D"] | None
    bias: Float[Array, " V"] | None


def forward(x: Float[Array, "*B T D"], head: Head, labels: Int[Array, "*B T"], how: Settings) -> Outcome:
    """Return each token's loss (0 where ignored), log-sum-exp and metrics."""

    def group(carry: tuple[None, None], starts: Array, size: int) -> tuple[tuple[None, None], Outcome]:
        def one(carry: tuple[None, None], start: Array) -> tuple[tuple[None, None], Outcome]:
            products_BCV = _products(cut(x, start, size, axis=-2), head)
            return carry, _outcome(products_BCV, cut(labels, start, size), how)

        return jax.lax.scan(one, carry, starts)

    return over_groups(group, None, lambda size, pieces: None, labels.shape, how)[1]


def forward_and_gradients(
    x: Float[Array, "*B T D"],
    head: Head,
    labels: Int[Array, "*B T"],
    weights: Float[Array, "*B T"] | None,
    how: Settings,
    *,
    trained: bool,
) -> tuple[Outcome, Gradients]:
    """Return what `forward` does and the gradients of the sum of weights * losses, from one pass over the logits."""

    def both(room_NBCV: Array, index: Array, x_BCD: Array, labels_BC: Array, weights_BC: Array):
        products_BCV = _products(x_BCD, head)
        outcome = _outcome(products_BCV, labels_BC, how)
        return outcome, gradient_into(room_NBCV, index, products_BCV, labels_BC, weights_BC, outcome.lse, how)

    weights = jnp.ones(labels.shape, jnp.float32) if weights is None else weights
    grads, outcome = _gradients(both, x, head, (labels, weights), how, trained)
    return outcome, grads


def backward(
    x: Float[Array, "*B T D"],
    head: Head,
    labels: Int[Array, "*B T"],
    lse: Float[Array, "*B T"],
    dloss: Float[Array, "*B T"],
    how: Settings,
) -> Gradients:
    """Return all gradients of the sum of dloss * losses, computing each logit again."""

    def gradient(room_NBCV: Array, index: Array, x_BCD: Array, labels_BC: Array, dloss_BC: Array, lse_BC: Array):
        return (), gradient_into(room_NBCV, index, _products(x_BCD, head), labels_BC, dloss_BC, lse_BC, how)

    return _gradients(gradient, x, head, (labels, dloss, lse), how, trained=True)[0]


def _gradients[Kept](
    chunk: Callable[..., tuple[Kept, Array]],
    x: Array,
    head: Head,
    tokens: tuple[Array, ...],
    how: Settings,
    trained: bool,
) -> tuple[Gradients, Kept]:
    """Sum the gradients over groups of chunks; chunk(room, index, x, *tokens) puts one's d(products) into room."""

    def group(carry: tuple[Gradients, Array], starts: Array, size: int) -> tuple[tuple[Gradients, Array], Kept]:
        def one(dproducts_NBCV: Array, index_and_start: tuple[Array, Array]) -> tuple[Array, Kept]:
            index, start = index_and_start
            each = (cut(array, start, size) for array in tokens)
            kept, dproducts_NBCV = chunk(dproducts_NBCV, index, cut(x, start, size, axis=-2), *each)
            return dproducts_NBCV, kept

        grads, dproducts_NBCV = carry
        pieces = starts.shape[0]
        dproducts_NBCV, kept = jax.lax.scan(one, dproducts_NBCV, (jnp.arange(pieces), starts))
        dx_NBCD = jnp.einsum("...v,vd->...d", dproducts_NBCV, head.weight)
        dx = jax.lax.dynamic_update_slice_in_dim(grads.x, _join(dx_NBCD, 1), starts[0], axis=x.ndim - 2)
        dweight, dbias = grads.weight, grads.bias
        if dweight is not None:
            x_BTD = cut(x, starts[0], size * pieces, axis=-2)
            x_NBCD = jnp.moveaxis(x_BTD.reshape(*x.shape[:-2], pieces, size, x.shape[-1]), -3, 0)
            dweight += jnp.einsum("...v,...d->vd", dproducts_NBCV, x_NBCD, preferred_element_type=jnp.float32)
        if dbias is not None:
            dbias += jnp.sum(dproducts_NBCV, axis=range(dproducts_NBCV.ndim - 1), dtype=jnp.float32)
        return (Gradients(dx, dweight, dbias), dproducts_NBCV), kept

    dweight = jnp.zeros(head.weight.shape, jnp.float32) if trained else None
    dbias = jnp.zeros(head.bias.shape, jnp.float32) if trained and head.bias is not None else None
    grads = Gradients(jnp.zeros_like(x), dweight, dbias)
    vocabulary = head.weight.shape[0]

    def room(size: int, pieces: int) -> Array:
        return jnp.zeros((pieces, *x.shape[:-2], size, vocabulary), x.dtype)

    return over_groups(group, grads, room, x.shape[:-1], how)


def over_groups[Carry, Room, Kept](
    group: Callable[[tuple[Carry, Room], Array, int], tuple[tuple[Carry, Room], Kept]],
    carry: Carry,
    room: Callable[[int, int], Room],
    shape: tuple[int, ...],
    how: Settings,
    *,
    apart: bool = False,
) -> tuple[Carry, Kept]:
    """Run `group` over the last axis of `shape`, as even chunks as can be, then over the rest; join what it returns.

    group((carry, room), starts, size) goes through the chunks of that size that begin at starts; its room(size, pieces)
    is made once for all groups, so that nothing clears it for each. With `apart` the first group is no part of a loop,
    so that its carry may lack what it returns.
    """
    tokens, rows = shape[-1], max(1, math.prod(shape[:-1]))
    chunks = -(-tokens * rows // how.chunk_tokens)
    size = -(-tokens // max(1, min(chunks, tokens)))
    whole, rest = divmod(tokens, size)
    pieces = max(1, min(how.group_tokens // (size * rows), whole))
    groups, left = divmod(whole, pieces)
    found, done = [], 0
    for some, n, of_size in ((groups, pieces, size), (min(left, 1), left, size), (min(rest, 1), 1, rest)):
        if some:
            starts = done + (jnp.arange(some * n) * of_size).reshape(some, n)
            body = functools.partial(_of_size, group, of_size)
            carried, kept = (carry, room(of_size, n)), []
            if apart and not found:
                carried, first = body(carried, starts[0])
                kept, starts = [jax.tree.map(lambda leaf: leaf[None], first)], starts[1:]
            if len(starts):
                carried, others = _scan(body, carried, starts, sums=apart)
                kept.append(others)
            carry = carried[0]
            joined = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *kept) if len(kept) > 1 else kept[0]
            found.append(jax.tree.map(lambda leaf: _join(leaf.reshape(-1, *leaf.shape[2:])), joined))
            done += some * n * of_size
    return carry, jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=-1), *found)


def _scan(body: Callable, carry: Any, starts: Array, *, sums: bool) -> tuple[Any, Any]:
    """`lax.scan` over starts; a carry that `sums` up large arrays does so in place even where there is one step.

    XLA makes straight code of such a loop, and then holds the sum three times. It does not of a count it cannot know.
    """
    if not sums or len(starts) > 1:
        return jax.lax.scan(body, carry, starts)
    shapes = jax.eval_shape(body, carry, starts[0])[1]

    def step(_, state):
        carry, found = body(state[0], starts[0])
        return carry, jax.tree.map(lambda leaf: leaf[None], found)

    blank = jax.tree.map(lambda leaf: jnp.zeros((1, *leaf.shape), leaf.dtype), shapes)
    return jax.lax.fori_loop(0, jax.lax.optimization_barrier(jnp.int32(1)), step, (carry, blank))


def _of_size(group: Callable, size: int, carry, starts: Array):
    return group(carry, starts, size)


def _join(stacked: Array, behind: int = 0) -> Array:
    """(N, *B, C, ...) -> (*B, N * C, ...), with so many axes behind C."""
    moved = jnp.moveaxis(stacked, 0, -2 - behind)
    shape = moved.shape
    return moved.reshape(*shape[: -2 - behind], -1, *shape[len(shape) - behind :])


def cut(array: Array, start: Array, size: int, axis: int = -1) -> Array:
    """The `size` elements from `start` on along an axis counted from the end."""
    return jax.lax.dynamic_slice_in_dim(array, start, size, axis=array.ndim + axis)


def _products(x: Float[Array, "*B C D"], head: Head) -> Float[Array, "*B C V"]:
    products = jnp.einsum("...d,vd->...v", x, head.weight, preferred_element_type=jnp.float32)
    return products if head.bias is None else products + head.bias.astype(jnp.float32)


def _bounded(products: Array, how: Settings) -> Array:
    """Logits of products."""
    logits = products * how.scale
    return logits if how.softcap is None else how.softcap * jnp.tanh(logits / how.softcap)


def loss_of(lse: Array, label_logit: Array, mean: Array | None, labels: Array, vocabulary: int, how: Settings) -> Array:
    """Each token's loss from its log-sum-exp, its label's logit and, with smoothing, the mean of its logits."""
    loss = lse - label_logit
    if mean is not None:
        loss += how.smoothing * (label_logit - mean)
    if how.z_loss:
        loss += how.z_loss * lse * lse
    inside = (labels >= 0) & (labels < vocabulary)
    loss = jnp.where(inside, loss, jnp.nan)  # a label outside the vocabulary must not pass unseen
    return jnp.where(labels == how.ignored, 0, loss)


def factor_of(weights: Array, labels: Array, how: Settings) -> Array:
    """What the gradient by the products has as a factor, 0 where ignored."""
    return jnp.where(labels == how.ignored, 0, how.scale * weights)


def _outcome(products: Float[Array, "*B C V"], labels: Int[Array, "*B C"], how: Settings) -> Outcome:
    logits, vocabulary = _bounded(products, how), products.shape[-1]
    lse = _lse(logits)
    index = jnp.where((labels >= 0) & (labels < vocabulary), labels, 0)[..., None]
    label_logit = jnp.take_along_axis(logits, index, axis=-1, mode="promise_in_bounds")[..., 0]
    mean = jnp.mean(logits, axis=-1) if how.smoothing else None
    loss = loss_of(lse, label_logit, mean, labels, vocabulary, how)
    if not how.metrics:
        return Outcome(loss, lse, None, None)
    probs = jnp.exp(logits - lse[..., None])
    entropy = lse - jnp.sum(jnp.where(probs > 0, probs * logits, 0), axis=-1)
    return Outcome(loss, lse, jnp.argmax(logits, axis=-1) == labels, entropy)


def gradient_into(
    room: Float[Array, "N *B C V"],
    index: Array,
    products: Float[Array, "*B C V"],
    labels: Int[Array, "*B C"],
    weights: Float[Array, "*B C"],
    lse: Float[Array, "*B C"],
    how: Settings,
) -> Float[Array, "N *B C V"]:
    """Return room with the gradient of the sum of weights * losses by the products at `index`, in room's dtype."""
    return room.at[index].set(_dproducts(_bounded(products, how), lse, labels, weights, how).astype(room.dtype))


def _lse(logits: Float[Array, "*B C V"]) -> Float[Array, "*B C"]:
    """logsumexp over the last axis."""
    return jax.lax.platform_dependent(
        logits, cuda=one_pass_lse, default=lambda logits: jax.nn.logsumexp(logits, axis=-1)
    )


def one_pass_lse(logits: Float[Array, "*B C V"]) -> Float[Array, "*B C"]:
    """logsumexp that reads the logits once: pairs of a maximum and a sum of exponentials below it are joined.

    A GPU joins them as a tree. A CPU adds one term after another, which loses digits, so that it takes the usual form.
    """

    def join(one: tuple[Array, Array], other: tuple[Array, Array]) -> tuple[Array, Array]:
        (top, total), (other_top, other_total) = one, other
        smaller = jnp.exp(-jnp.abs(top - other_top))
        summed = jnp.where(top >= other_top, total + other_total * smaller, total * smaller + other_total)
        return jnp.maximum(top, other_top), summed

    none = jnp.float32(jnp.finfo(jnp.float32).min), jnp.float32(0)
    top, total = jax.lax.reduce((logits, jnp.ones_like(logits)), none, join, (logits.ndim - 1,))
    return top + jnp.log(total)


def _dproducts(
    logits: Float[Array, "*B C V"], lse: Array, labels: Array, weights: Array, how: Settings
) -> Float[Array, "*B C V"]:
    """Return the gradient of the sum of weights * losses by the products x @ head.T, in f32, 0 where ignored.

    weights * ((1 + 2 * z_loss * lse) * softmax(logits) - (1 - smoothing) * onehot(labels) - smoothing / V) * slope,
    where slope = scale * (1 - (logits / softcap)**2) is the logits' own by the products.
    """
    factor = factor_of(weights, labels, how)[..., None]
    probs = jnp.exp(logits - lse[..., None])
    if how.z_loss:
        probs *= (1 + 2 * how.z_loss * lse)[..., None]
    target = (jnp.arange(logits.shape[-1]) == labels[..., None]).astype(jnp.float32)
    if how.smoothing:
        target = (1 - how.smoothing) * target + how.smoothing / logits.shape[-1]
    dlogits = (probs - target) * factor
    return dlogits if how.softcap is None else dlogits * (1 - (logits / how.softcap) ** 2)
