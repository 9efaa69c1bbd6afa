"""Public linear cross-entropy: argument checks and the gradient's wiring."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels import Implementation, _dispatch
from pallas_kernels.linear_cross_entropy import reference
from pallas_kernels.nf4_linear import NF4Weight, dequantize

_REFUSALS: _dispatch.Refusals = {"xla": None}


def linear_cross_entropy(
    x: Float[Array, "*B T D"],
    head: Float[Array, "V D"] | NF4Weight,
    labels: Int[Array, "*B T"],
    *,
    frozen_head: bool = False,
    chunk_tokens: int = 2048,
    ignore_index: int = -100,
    implementation: Implementation | None = None,
) -> Float[Array, "*B T"]:
    """Negative log-likelihood of each token under `softmax(x @ head.T)`, never holding (B, T, V).

    `logsumexp(x @ head.T) - (x @ head.T)[label]`, logits and reductions in f32, over chunks of the T axis. With V the
    vocabulary and M = B*T: a frozen head takes 4*M*D*V operations, as dL/dx is computed in the forward pass and kept in
    x.dtype; a trained one takes 8*M*D*V, as the backward pass computes each chunk's logits again and sums the head's
    gradient in f32. So do not put jax.checkpoint around a frozen head's loss: it would do the work twice.
    The gradient multiplies d(logits) in x.dtype, as a dense bf16 head does. Source: arXiv 2410.10989, section 3.2.

    Args:
        x: hidden states, f32, bf16 or f16, any leading axes; they may be sharded over the leading axes.
        head: output weight, cast to x.dtype for the product; its gradient has its own dtype.
        labels: int32 index of the token to predict; a label outside [0, V) that is not ignore_index is an error,
            found here where labels are concrete, and shown as a loss of NaN under jit.
        frozen_head: promise that the head needs no gradient (it gets none). An NF4Weight needs it.
        chunk_tokens: about how many tokens' logits exist at a time (4 * V bytes each); at least one token of each row.
        ignore_index: label of tokens whose loss is 0 and whose gradient is exactly 0.
        implementation: "xla", or None for the fastest that accepts the arguments on this device.

    Returns:
        The f32 loss of each token, in nats.

    Raises:
        ValueError: shapes or dtypes do not fit together, a concrete label is out of range, chunk_tokens < 1, or
            an NF4 head is not declared frozen.
        NotImplementedError: the named implementation does not exist for this operation.
    """
    _check(x, head, labels, frozen_head, chunk_tokens)
    _check_labels(labels, head.shape[0], ignore_index)
    _dispatch.choose("linear_cross_entropy", implementation, _REFUSALS)
    if labels.size == 0:
        return jnp.zeros(labels.shape, jnp.float32)
    if frozen_head:
        return _frozen(chunk_tokens, ignore_index, x, head, labels)
    return _trained(chunk_tokens, ignore_index, x, head, labels)


def explain() -> str:
    """Say which implementation runs."""
    return _dispatch.explain("linear_cross_entropy", _REFUSALS)


def _check(x: Array, head: Array | NF4Weight, labels: Array, frozen_head: bool, chunk_tokens: int) -> None:
    if x.ndim < 2 or len(head.shape) != 2 or x.shape[-1] != head.shape[1]:
        raise ValueError(
            f"linear_cross_entropy: x must be (*B, T, D) and head (V, D) of one width; got {x.shape} and {head.shape}"
        )
    if labels.shape != x.shape[:-1] or not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(
            f"linear_cross_entropy: labels must be integers of shape {x.shape[:-1]}; got {labels.dtype}{labels.shape}"
        )
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"linear_cross_entropy: x must be floating-point; got {x.dtype}")
    if isinstance(head, NF4Weight) and not frozen_head:
        raise ValueError("linear_cross_entropy: an NF4 head has no gradient; got frozen_head=False, pass True")
    if chunk_tokens < 1:
        raise ValueError(f"linear_cross_entropy: chunk_tokens must be at least 1; got {chunk_tokens}")


def _check_labels(labels: Array, vocabulary: int, ignore_index: int) -> None:
    if isinstance(labels, jax.core.Tracer):
        return
    known = np.asarray(labels).reshape(-1)  # numpy, because jnp would trace even constants inside jit
    outside = (known != ignore_index) & ((known < 0) | (known >= vocabulary))
    if outside.any():
        first = int(outside.argmax())
        raise ValueError(
            f"linear_cross_entropy: labels must be in [0, {vocabulary}) or {ignore_index}; "
            f"got {known[first]} at flat position {first}"
        )


def _array(head: Array | NF4Weight, x: Array) -> Array:
    return dequantize(head, x.dtype) if isinstance(head, NF4Weight) else head.astype(x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _frozen(chunk_tokens: int, ignored: int, x: Array, head: Array | NF4Weight, labels: Array) -> Array:
    return reference.forward(x, _array(head, x), labels, chunk_tokens, ignored)[0]


def _frozen_fwd(
    chunk_tokens: int, ignored: int, x: Array, head: Array | NF4Weight, labels: Array
) -> tuple[Array, Array]:
    return reference.forward_and_dx(x, _array(head, x), labels, chunk_tokens, ignored)


def _frozen_bwd(chunk_tokens: int, ignored: int, dx: Array, dloss: Array) -> tuple[Array, None, None]:
    del chunk_tokens, ignored
    return (dx.astype(jnp.float32) * dloss[..., None]).astype(dx.dtype), None, None


_frozen.defvjp(_frozen_fwd, _frozen_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _trained(chunk_tokens: int, ignored: int, x: Array, head: Array, labels: Array) -> Array:
    return reference.forward(x, _array(head, x), labels, chunk_tokens, ignored)[0]


def _trained_fwd(
    chunk_tokens: int, ignored: int, x: Array, head: Array, labels: Array
) -> tuple[Array, tuple[Array, Array, Array, Array]]:
    loss, lse = reference.forward(x, _array(head, x), labels, chunk_tokens, ignored)
    return loss, (x, head, labels, lse)


def _trained_bwd(
    chunk_tokens: int, ignored: int, residuals: tuple[Array, Array, Array, Array], dloss: Array
) -> tuple[Array, Array, None]:
    x, head, labels, lse = residuals
    dx, dhead = reference.backward(x, _array(head, x), labels, lse, dloss, chunk_tokens, ignored)
    return dx, dhead.astype(head.dtype), None


_trained.defvjp(_trained_fwd, _trained_bwd)
