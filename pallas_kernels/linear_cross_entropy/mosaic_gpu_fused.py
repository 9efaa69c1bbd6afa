"""Loss and gradients from exponentials that the head's product gives, without any pass over f32 logits.

With e_v the exponential of logit v above the row's reference, 0 at the label, and Z their sum with the label's, the
gradient by the products is factor * e_v / Z, at the label factor * (p_label - 1), where 1 - p_label is the sum of the
others over Z, exact however sure the model is.

Of a frozen head dL/dx = factor * (sum over v of e_v * head_v / Z + (p_label - 1) * head_label): the product with the
head runs on the stored exponentials, and what depends on Z multiplies its f32 results. A trained head's own gradient
needs the rows' factors within the sum over rows, so that codes of exponentials become gradients in a pass over 16 bits,
in place.

The reference must be known before the logits are: it is the largest of the label's logit and of those of a sample of
the vocabulary, so that the row's largest exponential is at least 1. Should one be too large for that, more than 34 nats
above its reference, or 55 of a frozen head, the whole loss is computed again by plain jnp.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels._hopper import padded
from pallas_kernels.linear_cross_entropy.mosaic_gpu import LOG2E, Form
from pallas_kernels.linear_cross_entropy.mosaic_gpu_codes import PIECE, gradients
from pallas_kernels.linear_cross_entropy.mosaic_gpu_exponentials import exponentials, refuses_shapes
from pallas_kernels.linear_cross_entropy.reference import (
    PASSES,
    Gradients,
    Head,
    Outcome,
    Settings,
    cut,
    factor_of,
    forward_and_gradients,
    loss_of,
    over_groups,
)

SAMPLE = 256  # rows of the head
# Sum of a row's exponentials: times a weight of the head, and over 1, far from the ends of f32; or within the codes.
LARGEST, LARGEST_CODED = 2.0**80, 2.0**50


def takes(
    width: int, vocabulary: int, dtype: Any, form: Form, *, trained: bool, bias: bool = False, metrics: bool = False
) -> bool:
    """Whether loss and gradients can be computed in this way; what it cannot do goes over f32 logits."""
    plain = form.softcap is None and not form.smoothing and form.scale > 0 and not bias and not metrics
    wide = not trained or vocabulary >= PIECE
    return plain and wide and refuses_shapes(width, vocabulary, dtype) is None


def tokens_at_a_time(chunk_tokens: int, group_tokens: int, vocabulary: int, *, trained: bool) -> int:
    """About how many tokens' exponentials, 2 bytes each, take the room of these f32 logits and their gradients."""
    tokens = max(group_tokens, 2 * chunk_tokens) * (2 if trained else 1)
    return min(tokens, 2**30 // vocabulary)  # so that 32 bits index them


def loss_and_gradients(
    x: Float[Array, "*B T D"],
    head: Head,
    labels: Int[Array, "*B T"],
    weights: Float[Array, "*B T"] | None,
    how: Settings,
    *,
    trained: bool,
) -> tuple[Outcome, Gradients]:
    """Return what `reference.forward_and_gradients` does, of what `takes` does.

    As many tokens are multiplied at a time as their exponentials take the room of `how`'s f32 logits, or for a trained
    head of logits and gradients; of those that are computed again, so many fewer that they fit there too.
    """
    weights = jnp.ones(labels.shape, jnp.float32) if weights is None else weights
    top = _reference(x, head.weight, labels, how)
    tokens = tokens_at_a_time(how.chunk_tokens, how.group_tokens, head.weight.shape[0], trained=trained)
    wide, narrow = (
        dataclasses.replace(how, chunk_tokens=size, group_tokens=size) for size in (tokens, max(1, tokens // 4))
    )

    def group(carry: tuple[Gradients, None], starts: Array, size: int):
        (grads, _), start = carry, starts[0]
        x_BCD = cut(x, start, size, axis=-2)
        each = (cut(array, start, size) for array in (labels, weights, top))
        outcome, safe, parts = _chunk(x_BCD, head.weight, *each, how=how, trained=trained)
        dx = jax.lax.dynamic_update_slice_in_dim(grads.x, parts.x, start, axis=x.ndim - 2)
        dweight = parts.weight if grads.weight is None or parts.weight is None else grads.weight + parts.weight
        return (Gradients(dx, dweight, None), None), jax.tree.map(lambda one: one[None], (outcome, safe))

    none = Gradients(jnp.zeros_like(x), None, None)  # the first chunk's product is the head's gradient so far
    grads, (outcome, safe) = over_groups(group, none, lambda size, pieces: None, labels.shape, wide, apart=trained)
    return jax.lax.cond(
        jnp.all(safe),
        lambda: (outcome, grads),
        lambda: forward_and_gradients(x, head, labels, weights, narrow, PASSES, trained=trained),
    )


def _reference(x: Array, weight: Array, labels: Array, how: Settings) -> Float[Array, "*B T"]:
    """The largest logit of a sample of the vocabulary and of the label."""
    vocabulary = weight.shape[0]
    sample = weight[:: -(-vocabulary // SAMPLE)]
    products = jnp.einsum("...d,vd->...v", x, sample, preferred_element_type=jnp.float32)
    label = jnp.sum(x.astype(jnp.float32) * _label_rows(weight, labels), axis=-1)
    return how.scale * jnp.maximum(jnp.max(products, axis=-1), label)


def _label_rows(weight: Array, labels: Array) -> Float[Array, "*B T D"]:
    """Each label's row of the head; of a label outside the vocabulary, some row."""
    inside = jnp.clip(labels, 0, weight.shape[0] - 1)
    return weight.at[inside].get(mode="promise_in_bounds").astype(jnp.float32)


def _loss(others: Array, label_octaves: Array, lse: Array, labels: Array, vocabulary: int, how: Settings) -> Array:
    """Each token's loss; without a difference of large numbers, of which little is left where the label is likely."""
    label_power = jnp.exp2(label_octaves)
    likely = others <= 2.0**20 * label_power
    near = jnp.log1p(others / jnp.where(likely, label_power, 1))
    far = jnp.log(others + label_power) - label_octaves / LOG2E
    without = dataclasses.replace(how, z_loss=0.0)
    loss = loss_of(jnp.where(likely, near, far), jnp.zeros_like(lse), None, labels, vocabulary, without)
    return loss + jnp.where(labels == how.ignored, 0, how.z_loss * lse * lse) if how.z_loss else loss


def _chunk(
    x: Array, weight: Array, labels: Array, weights: Array, top: Array, *, how: Settings, trained: bool
) -> tuple[Outcome, Array, Gradients]:
    """Loss, whether the exponentials are in their range, and gradients of one chunk of tokens."""
    shape, rows = labels.shape, math.prod(labels.shape)
    x_MD, labels_M = x.reshape(rows, -1), labels.reshape(rows)
    above = top * LOG2E
    powers, others, label_product = exponentials(
        x_MD, weight, labels_M, above.reshape(rows), scale=how.scale, coded=trained
    )
    others, label_product = others.reshape(shape), label_product.reshape(shape)
    label_octaves = label_product * (how.scale * LOG2E) - above
    label_power = jnp.exp2(label_octaves)
    total = others + label_power
    lse = top + jnp.log(total)
    loss = _loss(others, label_octaves, lse, labels, weight.shape[0], how)
    safe = (labels == how.ignored) | (total <= (LARGEST_CODED if trained else LARGEST))
    factor = factor_of(weights, labels, how)
    more = 2 * how.z_loss * lse  # of the softmax, by the squared log-sum-exp
    of_all = jnp.where(factor == 0, 0, factor / total * (1 + more))
    of_label = jnp.where(factor == 0, 0, factor / total * (more * label_power - others))
    if trained:
        dproducts = gradients(powers, labels_M, of_all.reshape(rows), of_label.reshape(rows))
        dx = jnp.einsum("mv,vd->md", dproducts, weight)[:rows].reshape(x.shape)
        x_MD = padded(x_MD, len(dproducts), 1)
        dweight = jnp.einsum("mv,md->vd", dproducts, x_MD, preferred_element_type=jnp.float32)
        return Outcome(loss, lse, None, None), safe, Gradients(dx, dweight, None)
    sums = jnp.einsum("mv,vd->md", powers, weight, preferred_element_type=jnp.float32)[:rows].reshape(x.shape)
    dx = of_all[..., None] * sums + of_label[..., None] * _label_rows(weight, labels)
    dx = jnp.where((factor == 0)[..., None], 0, dx)  # a row's exponentials may be infinite if it does not count
    return Outcome(loss, lse, None, None), safe, Gradients(dx.astype(x.dtype), None, None)
