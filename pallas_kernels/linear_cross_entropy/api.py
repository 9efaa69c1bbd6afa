"""Public linear cross-entropy: argument checks and the gradient's wiring."""

from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import Implementation, _dispatch
from pallas_kernels._int8 import Int8Weight, unpack_int8
from pallas_kernels.linear_cross_entropy import checks, mosaic_gpu, reference
from pallas_kernels.nf4_linear import NF4Weight, dense


class TokenMetrics(NamedTuple):
    """Of each token, without gradients; ignored tokens have them too.

    Attributes:
        correct: whether the label has the largest logit (the first of equals counts).
        entropy: of softmax(logits), f32, in nats.
    """

    correct: Bool[Array, "*B T"]
    entropy: Float[Array, "*B T"]


def linear_cross_entropy(
    x: Float[Array, "*B T D"],
    head: Float[Array, "V D"] | NF4Weight | Int8Weight,
    labels: Int[Array | np.ndarray, "*B T"],
    *,
    bias: Float[Array, " V"] | None = None,
    weights: Float[Array, "*B T"] | None = None,
    frozen_head: bool = False,
    reduction: Literal["none", "sum"] = "none",
    chunk_tokens: int = 512,
    group_tokens: int | None = None,
    ignore_index: int = -100,
    scale: float = 1.0,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    metrics: bool = False,
    implementation: Implementation | None = None,
) -> Any:  # an array, or with `metrics` a pair
    """Cross-entropy of each token under `softmax(scale * (x @ head.T + bias))`, never holding (B, T, V).

    With logits z, or `softcap * tanh(z / softcap)` in their place (arXiv 2408.00118, section 2), and
    l = logsumexp(z), a token's loss is
    `l - (1 - label_smoothing) * z[label] - label_smoothing * mean(z) + z_loss * l**2`
    (arXiv 1512.00567, section 7; arXiv 2204.02311, section 5), logits and reductions in f32, over chunks of the T axis.

    With M = B*T, a frozen head takes 4*M*D*V operations, as dL/dx is computed in the forward pass and kept in x.dtype.
    A trained one takes 6*M*D*V with reduction="sum", whose gradients are all computed in the forward pass, the head's
    summed and kept in f32; 8*M*D*V with "none", where each token's weight in the gradient is known in the backward
    pass only, which computes the logits again. So do not put jax.checkpoint around it: it would do the work twice.
    Of a 16-bit head and M <= 2*D, kernels that store exponentials keep them all, in the room of the f32 sum, and both
    reductions take 6*M*D*V, with one product over all tokens in the backward pass.
    The gradient multiplies d(logits) in x.dtype, as a dense bf16 head does. No small term of the softmax is left out.
    Source: arXiv 2410.10989, section 3.2.

    Args:
        x: hidden states, f32, bf16 or f16, any leading axes; they may be sharded over the leading axes.
        head: output weight (V, D), as a tied embedding is stored, cast to x.dtype for the product; its gradient has
            its own dtype.
        labels: int32 index of the token to predict; a label outside [0, V) that is not ignore_index is an error,
            found here where labels are concrete, and shown as a loss of NaN under jit.
        bias: added to the products, in f32; trained where the head is.
        weights: f32 factor on each token's loss; a constant, without gradient.
        frozen_head: promise that head and bias need no gradient (they get none). A packed head needs it.
        reduction: "sum" adds the weighted losses up, "none" returns them token by token.
        chunk_tokens: about how many tokens' logits exist at a time (4 * V bytes each); at least one token of each row.
        group_tokens: about how many tokens' d(logits) in x.dtype do, and so the rows of the gradient's products; None
            for chunk_tokens, or where a head is trained twice that, four times where no f32 logits are stored.
        ignore_index: label of tokens whose loss is 0 and whose gradient is exactly 0.
        scale: factor on the logits; one over the temperature.
        softcap: bound on the logits, after the factor; None for no bound.
        label_smoothing: share of the target that is spread over the whole vocabulary.
        z_loss: weight of the squared log-sum-exp.
        metrics: whether to return TokenMetrics too, at the price of two more passes over the logits.
        implementation: "mosaic_gpu" for Hopper kernels, "xla", or None for the fastest that accepts the arguments on
            this device. The kernels take bf16 without bias, softcap, label_smoothing and metrics. They store no f32
            logits, but their exponentials, 2 bytes each, of as many more tokens at a time as the same room holds; below
            2**-40 of a row's reference, which is no more than its largest, they are 0 in a trained head's gradients.

    Returns:
        The f32 loss, in nats: one for each token, or their sum; with `metrics` a pair of it and the TokenMetrics.

    Raises:
        ValueError: shapes or dtypes do not fit together, a concrete label is out of range, a number is out of its
            range, or a packed head is not declared frozen.
        NotImplementedError: the named implementation refuses these arguments or does not exist for this operation.
    """
    checks.arrays(x, head, labels, bias, weights)
    checks.packed(head, frozen_head)
    checks.numbers(chunk_tokens, group_tokens, softcap, label_smoothing, z_loss, reduction)
    checks.known_labels(labels, head.shape[0], ignore_index)
    trained = not frozen_head
    keeps = trained and mosaic_gpu.keeps_codes(labels.size, head)
    refusal = mosaic_gpu.refuses(
        *(x.shape[-1], head.shape[0], x.dtype),
        trained=trained,
        scale=float(scale),
        late_weights=trained and reduction == "none" and not keeps,
        bias=bias is not None,
        softcap=softcap is not None,
        label_smoothing=label_smoothing > 0,
        metrics=metrics,
    )
    chosen = _dispatch.choose("linear_cross_entropy", implementation, _refusals(refusal))
    kernels = chosen == "mosaic_gpu"
    group_tokens = group_tokens or chunk_tokens * (1 if frozen_head else 4 if kernels else 2)
    how = reference.Settings(
        *(chunk_tokens, group_tokens, ignore_index, float(scale), softcap, label_smoothing, z_loss, metrics, chosen)
    )
    if weights is not None:
        weights = jax.lax.stop_gradient(weights.astype(jnp.float32))
    if labels.size == 0:
        nothing = jnp.zeros(labels.shape, jnp.float32)
        loss, found = nothing.sum() if reduction == "sum" else nothing, TokenMetrics(nothing > 0, nothing)
    elif keeps and kernels:
        loss, found = _kept(how, x, (head, bias), labels), None
        loss = loss if weights is None else loss * weights
        loss = jnp.sum(loss) if reduction == "sum" else loss
    elif reduction == "sum":
        loss, found = _summed(how, trained, x, (head, bias), labels, weights)
    else:
        loss, found = (_frozen if frozen_head else _trained)(how, x, (head, bias), labels)
        loss = loss if weights is None else loss * weights
    return (loss, found) if metrics else loss


def logprob(
    x: Float[Array, "*B T D"],
    head: Float[Array, "V D"] | NF4Weight | Int8Weight,
    labels: Int[Array | np.ndarray, "*B T"],
    **options,
) -> Float[Array, "*B T"]:
    """Log-probability of each label under `softmax(scale * x @ head.T)`, for losses of preferences and of rewards.

    Args:
        x: hidden states.
        head: output weight.
        labels: token whose log-probability is wanted; ignore_index gives 0 and no gradient.
        options: bias, frozen_head, chunk_tokens, group_tokens, ignore_index, scale, softcap, implementation: those of
            `linear_cross_entropy`.

    Returns:
        The f32 log-probabilities, differentiable by x and, unless it is frozen, by the head.

    Raises:
        TypeError: an option that would make it something else than a log-probability.
        ValueError, NotImplementedError: as linear_cross_entropy.
    """
    if wrong := {"weights", "reduction", "label_smoothing", "z_loss", "metrics"} & set(options):
        raise TypeError(f"logprob: {', '.join(sorted(wrong))} belong to linear_cross_entropy; leave them out")
    return -linear_cross_entropy(x, head, labels, **options)


def explain(vocabulary: int = 128256, width: int = 4096) -> str:
    """Say which implementation runs for bf16 hidden states of a width and so many logits a token, and why."""
    refusal = mosaic_gpu.refuses(width, vocabulary, jnp.bfloat16, trained=True)
    return _dispatch.explain("linear_cross_entropy", _refusals(refusal))


def stores_exponentials(
    width: int, vocabulary: int, dtype: jax.typing.DTypeLike, *, trained: bool, softcap: float | None = None
) -> bool:
    """Whether by default loss and gradients of such a head come from stored exponentials here, not from f32 logits."""
    return mosaic_gpu.refuses(width, vocabulary, dtype, trained=trained, softcap=softcap is not None) is None


def _refusals(kernels: str | None) -> _dispatch.Refusals:
    return {"mosaic_gpu": kernels, "xla": None}


_Head = tuple[Any, Array | None]


def _dense(x: Array, head: _Head) -> reference.Head:
    weight, bias = head
    return reference.Head(
        unpack_int8(weight, x.dtype) if isinstance(weight, Int8Weight) else dense(weight, x.dtype), bias
    )


def _metrics(outcome: reference.Outcome) -> TokenMetrics | None:
    if outcome.correct is None or outcome.entropy is None:
        return None
    return TokenMetrics(outcome.correct, outcome.entropy)


def _head_gradient(head: _Head, grads: reference.Gradients, factor: Array | float = 1.0) -> _Head:
    """In the dtypes of a trained head and its bias, from the sums in f32."""

    def cast(grad: Any, like: Any) -> Any:
        return None if grad is None else (grad * factor).astype(like.dtype)

    return cast(grads.weight, head[0]), cast(grads.bias, head[1])


def _forward(how: reference.Settings, x: Array, head: _Head, labels: Array) -> tuple[Array, TokenMetrics | None]:
    run = mosaic_gpu.loss_of_tokens if how.implementation == "mosaic_gpu" else reference.forward
    outcome = run(x, _dense(x, head), labels, how)
    return outcome.loss, _metrics(outcome)


def _with_gradients(
    how: reference.Settings, trained: bool, x: Array, head: _Head, labels: Array, weights: Array | None
) -> tuple[reference.Outcome, reference.Gradients]:
    head_in_x = _dense(x, head)
    run = mosaic_gpu.loss_and_gradients if how.implementation == "mosaic_gpu" else reference.forward_and_gradients
    return run(x, head_in_x, labels, weights, how, trained=trained)


_frozen = partial(jax.custom_vjp, nondiff_argnums=(0,))(_forward)


def _frozen_fwd(how: reference.Settings, x: Array, head: _Head, labels: Array):
    outcome, grads = _with_gradients(how, False, x, head, labels, None)
    return (outcome.loss, _metrics(outcome)), grads.x


def _frozen_bwd(how: reference.Settings, dx: Array, cotangents: tuple[Array, Any]):
    del how
    return (dx.astype(jnp.float32) * cotangents[0][..., None]).astype(dx.dtype), None, None


_frozen.defvjp(_frozen_fwd, _frozen_bwd)
_trained = partial(jax.custom_vjp, nondiff_argnums=(0,))(_forward)


def _trained_fwd(how: reference.Settings, x: Array, head: _Head, labels: Array):
    outcome = reference.forward(x, _dense(x, head), labels, how)
    return (outcome.loss, _metrics(outcome)), (x, head, labels, outcome.lse)


def _trained_bwd(how: reference.Settings, residuals: tuple, cotangents: tuple[Array, Any]):
    x, head, labels, lse = residuals
    grads = reference.backward(x, _dense(x, head), labels, lse, cotangents[0], how)
    return grads.x, _head_gradient(head, grads), None


_trained.defvjp(_trained_fwd, _trained_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _kept(how: reference.Settings, x: Array, head: _Head, labels: Array) -> Array:
    return _forward(how, x, head, labels)[0]


def _kept_fwd(how: reference.Settings, x: Array, head: _Head, labels: Array):
    outcome, kept = mosaic_gpu.keep_codes(x, _dense(x, head), labels, how)
    return outcome.loss, (kept, x, head, labels)


def _kept_bwd(how: reference.Settings, residuals: tuple, dloss: Array):
    kept, x, head, labels = residuals
    dx, dweight = mosaic_gpu.gradients_of(kept, x, _dense(x, head), labels, dloss, how)
    return dx, (dweight.astype(head[0].dtype), None), None


_kept.defvjp(_kept_fwd, _kept_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _summed(
    how: reference.Settings, trained: bool, x: Array, head: _Head, labels: Array, weights: Array | None
) -> tuple[Array, TokenMetrics | None]:
    loss, found = _forward(how, x, head, labels)
    return jnp.sum(loss if weights is None else loss * weights), found


def _summed_fwd(how: reference.Settings, trained: bool, x: Array, head: _Head, labels: Array, weights: Array | None):
    outcome, grads = _with_gradients(how, trained, x, head, labels, weights)
    loss = jnp.sum(outcome.loss if weights is None else outcome.loss * weights)
    return (loss, _metrics(outcome)), (grads, head if trained else None)


def _summed_bwd(how: reference.Settings, trained: bool, residuals: tuple, cotangents: tuple[Array, Any]):
    (grads, head), dloss = residuals, cotangents[0]
    dx = (grads.x.astype(jnp.float32) * dloss).astype(grads.x.dtype)
    return dx, _head_gradient(head, grads, dloss) if trained else None, None, None


_summed.defvjp(_summed_fwd, _summed_bwd)
