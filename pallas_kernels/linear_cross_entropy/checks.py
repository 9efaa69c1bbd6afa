"""What linear_cross_entropy asks of its arguments; every refusal names the values."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pallas_kernels._int8 import Int8Weight
from pallas_kernels.nf4_linear import NF4Weight


def arrays(
    x: Array,
    head: Array | NF4Weight | Int8Weight,
    labels: Array | np.ndarray,
    bias: Array | None,
    weights: Array | None,
) -> None:
    """Shapes and dtypes."""
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
    if not isinstance(head, NF4Weight | Int8Weight) and not jnp.issubdtype(head.dtype, jnp.floating):
        raise ValueError(
            "linear_cross_entropy: head must be floating-point, or packed as NF4Weight or Int8Weight; got "
            f"{head.dtype}{head.shape}"
        )
    if bias is not None and bias.shape != head.shape[:1]:
        raise ValueError(
            f"linear_cross_entropy: bias must be {head.shape[:1]}, a number a row of head; got {bias.shape}"
        )
    if weights is not None and weights.shape != labels.shape:
        raise ValueError(f"linear_cross_entropy: weights must have labels' shape {labels.shape}; got {weights.shape}")


def packed(head: Array | NF4Weight | Int8Weight, frozen_head: bool) -> None:
    """A packed head cannot be trained."""
    for kind, name in ((NF4Weight, "NF4"), (Int8Weight, "int8")):
        if isinstance(head, kind) and not frozen_head:
            raise ValueError(f"linear_cross_entropy: an {name} head has no gradient; got frozen_head=False, pass True")


def numbers(
    chunk_tokens: int,
    group_tokens: int | None,
    softcap: float | None,
    label_smoothing: float,
    z_loss: float,
    reduction: str,
) -> None:
    """Ranges."""
    if chunk_tokens < 1:
        raise ValueError(f"linear_cross_entropy: chunk_tokens must be at least 1; got {chunk_tokens}")
    if group_tokens is not None and group_tokens < 1:
        raise ValueError(f"linear_cross_entropy: group_tokens must be at least 1, or None; got {group_tokens}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"linear_cross_entropy: softcap must be above 0, or None for no bound; got {softcap}")
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"linear_cross_entropy: label_smoothing must be in [0, 1); got {label_smoothing}")
    if not z_loss >= 0:
        raise ValueError(f"linear_cross_entropy: z_loss must not be negative; got {z_loss}")
    if reduction not in ("none", "sum"):
        raise ValueError(f"linear_cross_entropy: reduction must be none or sum; got {reduction!r}")


def known_labels(labels: Array | np.ndarray, vocabulary: int, ignore_index: int) -> None:
    """Range of labels that are concrete."""
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
