"""Cross-entropy of a linear head in plain jnp, one chunk of tokens at a time.

Chunks are cut from the T axis by dynamic slices inside a scan, so the leading axes keep their sharding. At any time
the logits of one chunk exist, in f32: about chunk_tokens * V values.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class Settings:
    """What of a call is static: see linear_cross_entropy for the fields."""

    chunk_tokens: int
    ignored: int
    scale: float
    softcap: float | None


def forward(
    x: Float[Array, "*B T D"], head: Float[Array, "V D"], labels: Int[Array, "*B T"], how: Settings
) -> tuple[Float[Array, "*B T"], Float[Array, "*B T"]]:
    """Return each token's negative log-likelihood (0 where ignored) and log-sum-exp."""

    def body(carry: None, start: Int[Array, ""], size: int) -> tuple[None, tuple[Array, Array]]:
        labels_BC = _cut(labels, start, size)
        return carry, _loss(_logits(_cut(x, start, size, axis=-2), head, how), labels_BC, how.ignored)

    _, (loss, lse) = _scan(body, None, labels.shape, how.chunk_tokens)
    return loss, lse


def forward_and_dx(
    x: Float[Array, "*B T D"], head: Float[Array, "V D"], labels: Int[Array, "*B T"], how: Settings
) -> tuple[Float[Array, "*B T"], Float[Array, "*B T D"]]:
    """Return each token's negative log-likelihood and its gradient by x, in x.dtype, from one pass over the logits."""

    def body(dx: Array, start: Int[Array, ""], size: int) -> tuple[Array, tuple[Array]]:
        labels_BC = _cut(labels, start, size)
        logits_BCV = _logits(_cut(x, start, size, axis=-2), head, how)
        loss, lse = _loss(logits_BCV, labels_BC, how.ignored)
        dproducts_BCV = _dproducts(logits_BCV, lse, labels_BC, labels_BC != how.ignored, how).astype(x.dtype)
        dx_BCD = jnp.einsum("...v,vd->...d", dproducts_BCV, head)
        return jax.lax.dynamic_update_slice_in_dim(dx, dx_BCD, start, axis=x.ndim - 2), (loss,)

    dx, (loss,) = _scan(body, jnp.zeros_like(x), labels.shape, how.chunk_tokens)
    return loss, dx


def backward(
    x: Float[Array, "*B T D"],
    head: Float[Array, "V D"],
    labels: Int[Array, "*B T"],
    lse: Float[Array, "*B T"],
    dloss: Float[Array, "*B T"],
    how: Settings,
) -> tuple[Float[Array, "*B T D"], Float[Array, "V D"]]:
    """Return the gradients of x (x.dtype) and head (f32, summed over chunks in f32), recomputing each logit."""
    dloss = jnp.where(labels == how.ignored, 0, dloss)

    def body(carry: tuple[Array, Array], start: Int[Array, ""], size: int) -> tuple[tuple[Array, Array], tuple[()]]:
        dx, dhead = carry
        x_BCD = _cut(x, start, size, axis=-2)
        weight_BC, lse_BC = _cut(dloss, start, size), _cut(lse, start, size)
        logits_BCV, labels_BC = _logits(x_BCD, head, how), _cut(labels, start, size)
        dproducts_BCV = _dproducts(logits_BCV, lse_BC, labels_BC, weight_BC, how).astype(x.dtype)
        dx_BCD = jnp.einsum("...v,vd->...d", dproducts_BCV, head)
        dhead += jnp.einsum("...v,...d->vd", dproducts_BCV, x_BCD, preferred_element_type=jnp.float32)
        return (jax.lax.dynamic_update_slice_in_dim(dx, dx_BCD, start, axis=x.ndim - 2), dhead), ()

    start = jnp.zeros_like(x), jnp.zeros(head.shape, jnp.float32)
    (dx, dhead), _ = _scan(body, start, labels.shape, how.chunk_tokens)
    return dx, dhead


def _scan[Carry](
    body: Callable, carry: Carry, shape: tuple[int, ...], chunk_tokens: int
) -> tuple[Carry, tuple[Array, ...]]:
    """Run body over equal chunks of the last axis of `shape`, then over the rest of it; join what it returns."""
    tokens, rows = shape[-1], max(1, math.prod(shape[:-1]))
    chunks = -(-tokens * rows // chunk_tokens)
    size = -(-tokens // max(1, min(chunks, tokens)))  # as even as can be, so that the rest is small
    whole = tokens // size
    starts = jnp.arange(whole) * size
    carry, pieces = jax.lax.scan(lambda c, start: body(c, start, size), carry, starts)
    joined = tuple(jnp.moveaxis(p, 0, -2).reshape(*p.shape[1:-1], whole * size) for p in pieces)
    rest = tokens - whole * size
    if rest:
        carry, tail = body(carry, jnp.int32(whole * size), rest)
        joined = tuple(jnp.concatenate([j, t], axis=-1) for j, t in zip(joined, tail, strict=True))
    return carry, joined


def _cut(array: Array, start: Int[Array, ""], size: int, axis: int = -1) -> Array:
    return jax.lax.dynamic_slice_in_dim(array, start, size, axis=array.ndim + axis)


def _logits(x: Float[Array, "*B C D"], head: Float[Array, "V D"], how: Settings) -> Float[Array, "*B C V"]:
    logits = how.scale * jnp.einsum("...d,vd->...v", x, head, preferred_element_type=jnp.float32)
    return logits if how.softcap is None else how.softcap * jnp.tanh(logits / how.softcap)


def _loss(logits: Float[Array, "*B C V"], labels: Int[Array, "*B C"], ignored: int) -> tuple[Array, Array]:
    vocabulary = logits.shape[-1]
    lse = jax.nn.logsumexp(logits, axis=-1)
    inside = (labels >= 0) & (labels < vocabulary)
    index = jnp.where(inside, labels, 0)[..., None]
    label_logit = jnp.take_along_axis(logits, index, axis=-1, mode="promise_in_bounds")[..., 0]
    loss = jnp.where(inside, lse - label_logit, jnp.nan)  # a label outside the vocabulary must not pass unseen
    return jnp.where(labels == ignored, 0, loss), lse


def _dproducts(
    logits: Float[Array, "*B C V"], lse: Array, labels: Array, weight: Array, how: Settings
) -> Float[Array, "*B C V"]:
    """Return the gradient by the products x @ head.T, in f32.

    `weight * (softmax(logits) - onehot(labels)) * slope`, where slope = scale * (1 - (logits / softcap)**2) is the
    logits' own by the products.
    """
    probs = jnp.exp(logits - lse[..., None])
    is_label = jnp.arange(logits.shape[-1]) == labels[..., None]
    dlogits = (probs - is_label) * (how.scale * weight)[..., None]
    return dlogits if how.softcap is None else dlogits * (1 - (logits / how.softcap) ** 2)
