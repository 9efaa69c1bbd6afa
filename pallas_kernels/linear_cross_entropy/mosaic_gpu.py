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

Of few tokens all codes take less room than the sum of a trained head's gradient in f32. Then they stay until the
backward pass, which knows each token's weight and needs no such sum: one product over all tokens gives the gradient.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int16

from pallas_kernels import _platform
from pallas_kernels._hopper import padded
from pallas_kernels.linear_cross_entropy.mosaic_gpu_codes import PIECE, gradients
from pallas_kernels.linear_cross_entropy.mosaic_gpu_exponentials import LOG2E, exponentials, refuses_shapes
from pallas_kernels.linear_cross_entropy.reference import (
    Gradients,
    Head,
    Outcome,
    Settings,
    cut,
    factor_of,
    forward,
    forward_and_gradients,
    gradient_into,
    loss_of,
    over_groups,
)

SAMPLE = 256  # rows of the head
AGAIN = 128  # tokens whose logits are computed again at a time
# Sum of a row's exponentials: times a weight of the head, and over 1, far from the ends of f32; or within the codes.
LARGEST, LARGEST_CODED = 2.0**80, 2.0**50


def refuses(
    width: int,
    vocabulary: int,
    dtype: Any,
    *,
    trained: bool,
    scale: float = 1.0,
    late_weights: bool = False,
    **options: bool,
) -> str | None:
    """Return why loss and gradients cannot be computed in this way, or None.

    Args:
        width: D.
        vocabulary: V.
        dtype: of x.
        trained: whether the head has a gradient.
        scale: factor on the logits.
        late_weights: whether a trained head's gradient is to wait for tokens' weights though no codes are kept.
        options: names of what the loss has else, such as a bound on its logits, and whether it does.
    """
    if asked := [name for name, wanted in options.items() if wanted]:
        return f"it gives the loss of plain logits, without {', '.join(asked)}"
    if not scale > 0:
        return f"the scale must be above 0, and is {scale}"
    if trained and vocabulary < PIECE:
        return f"a trained head's vocabulary must be at least {PIECE}, and is {vocabulary}"
    if late_weights:
        return "loss by token of a trained head must be of at most 2 * D tokens, with a head of 16 bits"
    return refuses_shapes(width, vocabulary, dtype) or _platform.why_not_hopper(one_device=True)


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
    """Return what `reference.forward_and_gradients` does, of what is not refused.

    As many tokens are multiplied at a time as their exponentials take the room of `how`'s f32 logits, or for a trained
    head of logits and gradients; of those that are computed again, so many fewer that they fit there too.
    """
    weights = jnp.ones(labels.shape, jnp.float32) if weights is None else weights
    top = _reference(x, head.weight, labels, how)
    wide, narrow = _sizes(how, head.weight.shape[0], trained=trained)

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
        lambda: forward_and_gradients(x, head, labels, weights, narrow, trained=trained),
    )


def loss_of_tokens(x: Float[Array, "*B T D"], head: Head, labels: Int[Array, "*B T"], how: Settings) -> Outcome:
    """Return what `reference.forward` does, of what is not refused."""
    top, vocabulary = _reference(x, head.weight, labels, how), head.weight.shape[0]
    wide, narrow = _sizes(how, vocabulary, trained=False)

    def group(carry: tuple[None, None], starts: Array, size: int):
        labels_BC, top_BC = (cut(array, starts[0], size) for array in (labels, top))
        x_BCD = cut(x, starts[0], size, axis=-2)
        _, rows = _multiply(x_BCD, head.weight, labels_BC, top_BC, how, coded=False)
        found = _outcome(rows, labels_BC, vocabulary, how), rows.safe(labels_BC, how, LARGEST)
        return carry, jax.tree.map(lambda one: one[None], found)

    _, (outcome, safe) = over_groups(group, None, lambda size, pieces: None, labels.shape, wide)
    return jax.lax.cond(jnp.all(safe), lambda: outcome, lambda: forward(x, head, labels, narrow))


def _sizes(how: Settings, vocabulary: int, *, trained: bool) -> tuple[Settings, Settings]:
    """With as many tokens as are multiplied at a time, and with those of which all logits are computed again."""
    tokens = tokens_at_a_time(how.chunk_tokens, how.group_tokens, vocabulary, trained=trained)
    wide, narrow = (
        dataclasses.replace(how, chunk_tokens=size, group_tokens=size) for size in (tokens, max(1, tokens // 4))
    )
    return wide, narrow


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


class Rows(NamedTuple):
    """What is known of each token beside its exponentials, which are relative to exp(top)."""

    top: Float[Array, "*B T"]
    others: Float[Array, "*B T"]  # the exponentials' sum but for the label's
    label_octaves: Float[Array, "*B T"]  # the label's exponential is 2 to them

    @property
    def total(self) -> Float[Array, "*B T"]:
        """The sum of all exponentials."""
        return self.others + jnp.exp2(self.label_octaves)

    @property
    def lse(self) -> Float[Array, "*B T"]:
        """The log-sum-exp."""
        return self.top + jnp.log(self.total)

    def safe(self, labels: Array, how: Settings, largest: float) -> Array:
        """Whether each token's exponentials are in their range, or do not count."""
        return (labels == how.ignored) | (self.total <= largest)


class Kept(NamedTuple):
    """What the backward pass of few tokens needs beside its arguments."""

    codes: Int16[Array, "tiled V"]
    rows: Rows
    lse: Float[Array, "*B T"]
    safe: Bool[Array, ""]


def keeps_codes(tokens: int, head: Any) -> bool:
    """Whether so many tokens' codes take no more room than the f32 sum that a head of 16 bits has no other use for."""
    vocabulary, width = head.shape
    return head.dtype.itemsize == 2 and tokens <= min(2 * width, 2**30 // vocabulary)


def keep_codes(
    x: Float[Array, "*B T D"], head: Head, labels: Int[Array, "*B T"], how: Settings
) -> tuple[Outcome, Kept]:
    """Return what `reference.forward` does, and what `gradients_of` needs."""
    codes, rows = _multiply(x, head.weight, labels, _reference(x, head.weight, labels, how), how, coded=True)
    safe = jnp.all(rows.safe(labels, how, LARGEST_CODED))
    outcome = jax.lax.cond(
        safe,
        lambda: _outcome(rows, labels, head.weight.shape[0], how),
        lambda: forward(x, head, labels, how),
    )
    return outcome, Kept(codes, rows, outcome.lse, safe)


def gradients_of(
    kept: Kept,
    x: Float[Array, "*B T D"],
    head: Head,
    labels: Int[Array, "*B T"],
    dloss: Float[Array, "*B T"],
    how: Settings,
) -> tuple[Float[Array, "*B T D"], Float[Array, "V D"]]:
    """Return the gradients of the sum of dloss * losses by x and the head, in their dtypes."""
    rows, vocabulary = math.prod(labels.shape), head.weight.shape[0]
    of_all, of_label = (one.reshape(rows) for one in _factors(kept.rows, dloss, labels, how))
    dproducts = gradients(kept.codes, labels.reshape(rows), of_all, of_label)
    x_ND = padded(x.reshape(rows, -1), AGAIN, 1)
    lse_N, dloss_N = (padded(one.reshape(rows), AGAIN) for one in (kept.lse, dloss))
    labels_N = jnp.pad(labels.reshape(rows), (0, len(x_ND) - rows), constant_values=how.ignored)

    def again(index: Array, room_NCV: Array) -> Array:
        x_CD = cut(x_ND, index * AGAIN, AGAIN, axis=-2)
        labels_C, dloss_C, lse_C = (cut(one, index * AGAIN, AGAIN) for one in (labels_N, dloss_N, lse_N))
        products_CV = jnp.einsum("cd,vd->cv", x_CD, head.weight, preferred_element_type=jnp.float32)
        return gradient_into(room_NCV, index, products_CV, labels_C, dloss_C, lse_C, how)

    pieces = jnp.where(kept.safe, 0, len(x_ND) // AGAIN)  # a loop, not a branch, so that it has the gradients' room
    room_NCV = dproducts.reshape(-1, AGAIN, vocabulary)
    dproducts = jax.lax.fori_loop(0, pieces, again, room_NCV).reshape(dproducts.shape)
    dx = jnp.einsum("mv,vd->md", dproducts, head.weight)[:rows].reshape(x.shape)
    x_MD = padded(x_ND, len(dproducts), 1)
    return dx, jnp.einsum("mv,md->vd", dproducts, x_MD)


def _multiply(x: Array, weight: Array, labels: Array, top: Array, how: Settings, *, coded: bool) -> tuple[Array, Rows]:
    """Exponentials or their codes, and what else is known of these tokens."""
    shape, rows, above = labels.shape, math.prod(labels.shape), top * LOG2E
    flat = x.reshape(rows, -1), weight, labels.reshape(rows), above.reshape(rows)
    powers, others, label_product = exponentials(*flat, scale=how.scale, coded=coded)
    return powers, Rows(top, others.reshape(shape), label_product.reshape(shape) * (how.scale * LOG2E) - above)


def _outcome(rows: Rows, labels: Array, vocabulary: int, how: Settings) -> Outcome:
    """Each token's loss, without a difference of large numbers, of which little is left where the label is likely."""
    label_power, lse = jnp.exp2(rows.label_octaves), rows.lse
    likely = rows.others <= 2.0**20 * label_power
    near = jnp.log1p(rows.others / jnp.where(likely, label_power, 1))
    far = jnp.log(rows.total) - rows.label_octaves / LOG2E
    without = dataclasses.replace(how, z_loss=0.0)
    loss = loss_of(jnp.where(likely, near, far), jnp.zeros_like(lse), None, labels, vocabulary, without)
    squared = jnp.where(labels == how.ignored, 0, how.z_loss * lse * lse)
    return Outcome(loss + squared if how.z_loss else loss, lse, None, None)


def _factors(rows: Rows, weights: Array, labels: Array, how: Settings) -> tuple[Array, Array]:
    """What makes a token's exponentials its gradients by the products, and the label's own gradient."""
    factor, more = factor_of(weights, labels, how), 2 * how.z_loss * rows.lse  # of the softmax, by the squared lse
    of_all = jnp.where(factor == 0, 0, factor / rows.total * (1 + more))
    of_label = factor / rows.total * (more * jnp.exp2(rows.label_octaves) - rows.others)
    return of_all, jnp.where(factor == 0, 0, of_label)


def _chunk(
    x: Array, weight: Array, labels: Array, weights: Array, top: Array, *, how: Settings, trained: bool
) -> tuple[Outcome, Array, Gradients]:
    """Loss, whether the exponentials are in their range, and gradients of one chunk of tokens."""
    count = math.prod(labels.shape)
    powers, rows = _multiply(x, weight, labels, top, how, coded=trained)
    outcome = _outcome(rows, labels, weight.shape[0], how)
    safe = rows.safe(labels, how, LARGEST_CODED if trained else LARGEST)
    of_all, of_label = _factors(rows, weights, labels, how)
    if trained:
        dproducts = gradients(powers, *(one.reshape(count) for one in (labels, of_all, of_label)))
        dx = jnp.einsum("mv,vd->md", dproducts, weight)[:count].reshape(x.shape)
        x_MD = padded(x.reshape(count, -1), len(dproducts), 1)
        dweight = jnp.einsum("mv,md->vd", dproducts, x_MD, preferred_element_type=jnp.float32)
        return outcome, safe, Gradients(dx, dweight, None)
    sums = jnp.einsum("mv,vd->md", powers, weight, preferred_element_type=jnp.float32)[:count].reshape(x.shape)
    dx = of_all[..., None] * sums + of_label[..., None] * _label_rows(weight, labels)
    dx = jnp.where((factor_of(weights, labels, how) == 0)[..., None], 0, dx)  # of infinite exponentials, perhaps
    return outcome, safe, Gradients(dx.astype(x.dtype), None, None)
