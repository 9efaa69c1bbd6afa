"""Public linear cross-entropy: argument checks and the gradient's wiring."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels import Implementation, _dispatch
from pallas_kernels.linear_cross_entropy import reference
from pallas_kernels.nf4_linear import NF4Weight, dense

_REFUSALS: _dispatch.Refusals = {"xla": None}


def linear_cross_entropy(
    x: Float[Array, "*B T D"],
    head: Float[Array, "V D"] | NF4Weight,
    labels: Int[Array, "*B T"],
    *,
    frozen_head: bool = False,
    chunk_tokens: int = 2048,
    ignore_index: int = -100,
    scale: float = 1.0,
    softcap: float | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "*B T"]:
    """Negative log-likelihood of each token under `softmax(scale * x @ head.T)`, never holding (B, T, V).

    `logsumexp(z) - z[label]` with `z = scale * x @ head.T`, or `softcap * tanh(z / softcap)` in its place (arXiv
    2408.00118, section 2), logits and reductions in f32, over chunks of the T axis. With V the
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
        scale: factor on the logits.
        softcap: bound on the logits, after the factor; None for no bound.
        implementation: "xla", or None for the fastest that accepts the arguments on this device.

    Returns:
        The f32 loss of each token, in nats.

    Raises:
        ValueError: shapes or dtypes do not fit together, a concrete label is out of range, chunk_tokens < 1,
            softcap is not above 0, or an NF4 head is not declared frozen.
        NotImplementedError: the named implementation does not exist for this operation.
    """
    _check(x, head, labels, frozen_head, chunk_tokens, softcap)
    _check_labels(labels, head.shape[0], ignore_index)
    _dispatch.choose("linear_cross_entropy", implementation, _REFUSALS)
    if labels.size == 0:
        return jnp.zeros(labels.shape, jnp.float32)
    how = reference.Settings(chunk_tokens, ignore_index, scale, softcap)
    return (_frozen if frozen_head else _trained)(how, x, head, labels)


def explain() -> str:
    """Say which implementation runs."""
    return _dispatch.explain("linear_cross_entropy", _REFUSALS)


def _check(
    x: Array, head: Array | NF4Weight, labels: Array, frozen_head: bool, chunk_tokens: int, softcap: float | None
) -> None:
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
    if softcap is not None and not softcap > 0:
        raise ValueError(f"linear_cross_entropy: softcap must be above 0, or None for no bound; got {softcap}")


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


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _frozen(how: reference.Settings, x: Array, head: Array | NF4Weight, labels: Array) -> Array:
    return reference.forward(x, dense(head, x.dtype), labels, how)[0]


def _frozen_fwd(how: reference.Settings, x: Array, head: Array | NF4Weight, labels: Array) -> tuple[Array, Array]:
    return reference.forward_and_dx(x, dense(head, x.dtype), labels, how)


def _frozen_bwd(how: reference.Settings, dx: Array, dloss: Array) -> tuple[Array, None, None]:
    del how
    return (dx.astype(jnp.float32) * dloss[..., None]).astype(dx.dtype), None, None


_frozen.defvjp(_frozen_fwd, _frozen_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _trained(how: reference.Settings, x: Array, head: Array, labels: Array) -> Array:
    return reference.forward(x, dense(head, x.dtype), labels, how)[0]


def _trained_fwd(
    how: reference.Settings, x: Array, head: Array, labels: Array
) -> tuple[Array, tuple[Array, Array, Array, Array]]:
    loss, lse = reference.forward(x, dense(head, x.dtype), labels, how)
    return loss, (x, head, labels, lse)


def _trained_bwd(
    how: reference.Settings, residuals: tuple[Array, Array, Array, Array], dloss: Array
) -> tuple[Array, Array, None]:
    x, head, labels, lse = residuals
    dx, dhead = reference.backward(x, dense(head, x.dtype), labels, lse, dloss, how)
    return dx, dhead.astype(head.dtype), None


_trained.defvjp(_trained_fwd, _trained_bwd)
