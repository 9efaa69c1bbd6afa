"""Loss and dL/dx of a frozen head from exponentials that the head's product gives, without any pass over logits.

With e_v the exponential of logit v above the row's reference, 0 at the label, and Z their sum with the label's,
dL/dx = factor * (sum over v of e_v * head_v / Z + (p_label - 1) * head_label): the product with the head runs on the
stored exponentials, and what depends on Z multiplies its f32 results. 1 - p_label is the sum of the others over Z,
exact however sure the model is.

The reference must be known before the logits are: it is the largest of the label's logit and of those of a sample of
the vocabulary, so that the row's largest exponential is at least 1. Should one be too large for that, 55 nats above
its reference, the whole loss is computed again by plain jnp.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.linear_cross_entropy.mosaic_gpu import LOG2E
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
LARGEST = 2.0**80  # sum of a row's exponentials: times a weight of the head, and over 1, far from the ends of f32


def takes(x: Array, head: Head, how: Settings) -> bool:
    """Whether the loss can be computed in this way; what it cannot do goes over f32 logits."""
    plain = head.bias is None and how.softcap is None and not how.smoothing and not how.metrics and how.scale > 0
    return plain and x.size > 0 and refuses_shapes(x.shape[-1], head.weight.shape[0], x.dtype) is None


def loss_and_gradient(
    x: Float[Array, "*B T D"],
    head: Head,
    labels: Int[Array, "*B T"],
    weights: Float[Array, "*B T"] | None,
    how: Settings,
) -> tuple[Outcome, Gradients]:
    """Return what `reference.forward_and_gradients` does for a frozen head, of what `takes` does.

    As many tokens are multiplied at a time as their exponentials take the room of `how`'s f32 logits; of those that are
    computed again, so many fewer that they fit there too.
    """
    weights = jnp.ones(labels.shape, jnp.float32) if weights is None else weights
    top = _reference(x, head.weight, labels, how)
    tokens = max(how.group_tokens, 2 * how.chunk_tokens)
    wide, narrow = (
        dataclasses.replace(how, chunk_tokens=size, group_tokens=size) for size in (tokens, max(1, tokens // 4))
    )

    def group(carry: tuple[Array, None], starts: Array, size: int):
        start = starts[0]
        x_BCD = cut(x, start, size, axis=-2)
        each = (cut(array, start, size) for array in (labels, weights, top))
        outcome, safe, dx_BCD = _chunk(x_BCD, head.weight, *each, how)
        dx = jax.lax.dynamic_update_slice_in_dim(carry[0], dx_BCD, start, axis=x.ndim - 2)
        return (dx, None), jax.tree.map(lambda one: one[None], (outcome, safe))

    dx, (outcome, safe) = over_groups(group, jnp.zeros_like(x), lambda size, pieces: None, labels.shape, wide)
    return jax.lax.cond(
        jnp.all(safe),
        lambda: (outcome, Gradients(dx, None, None)),
        lambda: forward_and_gradients(x, head, labels, weights, narrow, PASSES, trained=False),
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


def _chunk(
    x: Array, weight: Array, labels: Array, weights: Array, top: Array, how: Settings
) -> tuple[Outcome, Bool[Array, "*B C"], Array]:
    """Loss, whether the exponentials are in their range, and gradient of one chunk of tokens."""
    shape, rows, width = labels.shape, labels.size, x.shape[-1]
    powers, others, label_product = exponentials(
        x.reshape(rows, width), weight, labels.reshape(rows), top.reshape(rows) * LOG2E, scale=how.scale
    )
    others, label_logit = others.reshape(shape), how.scale * label_product.reshape(shape)
    label_power = jnp.exp(label_logit - top)
    total = others + label_power
    lse = top + jnp.log(total)
    loss = loss_of(lse, label_logit, None, labels, weight.shape[0], how)
    factor = factor_of(weights, labels, how)
    safe = (labels == how.ignored) | (total <= LARGEST)
    share = factor / total
    sums = jnp.einsum("mv,vd->md", powers, weight, preferred_element_type=jnp.float32)[:rows].reshape(x.shape)
    more = 2 * how.z_loss * lse  # of the softmax, by the squared log-sum-exp
    dx = (share * (1 + more))[..., None] * sums
    dx += (share * (more * label_power - others))[..., None] * _label_rows(weight, labels)
    dx = jnp.where((factor == 0)[..., None], 0, dx)
    return Outcome(loss, lse, None, None), safe, dx.astype(x.dtype)
