"""Public RMSNorm: argument checks and the gradient's wiring."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import Implementation, _dispatch
from pallas_kernels.rms_norm import reference

_REFUSALS: _dispatch.Refusals = {"xla": None}


def rms_norm(
    x: Float[Array, "*B D"],
    scale: Float[Array, " D"],
    *,
    eps: float = 1e-6,
    implementation: Implementation | None = None,
) -> Float[Array, "*B D"]:
    """Root-mean-square normalisation over the last axis.

    `x * rsqrt(mean(x**2) + eps) * scale`, computed in f32, returned in x.dtype. The backward pass keeps x and one
    f32 number a row, and sums scale's gradient in f32. Source: arXiv 1910.07467, eq. 4.

    Args:
        x: f32, bf16 or f16, any leading axes.
        scale: same width as x; any float dtype.
        eps: added to the mean square.
        implementation: "xla", or None for the fastest that accepts x on this device.

    Returns:
        The normalised x, in x's shape and dtype.

    Raises:
        ValueError: scale's width differs from x's, or one of them is not floating-point.
        NotImplementedError: the named implementation does not exist for this operation.
    """
    if x.ndim < 1 or scale.shape != x.shape[-1:]:
        raise ValueError(f"rms_norm: scale must have the width of x; scale is {scale.shape} and x is {x.shape}")
    if not (jnp.issubdtype(x.dtype, jnp.floating) and jnp.issubdtype(scale.dtype, jnp.floating)):
        raise ValueError(f"rms_norm: x and scale must be floating-point; x is {x.dtype} and scale is {scale.dtype}")
    _dispatch.choose("rms_norm", implementation, _REFUSALS)
    return _rms_norm(eps, x, scale)


def explain() -> str:
    """Say which implementation runs."""
    return _dispatch.explain("rms_norm", _REFUSALS)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rms_norm(eps: float, x: Array, scale: Array) -> Array:
    return reference.forward(x, scale, eps)[0]


def _rms_norm_fwd(eps: float, x: Array, scale: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    y, rrms = reference.forward(x, scale, eps)
    return y, (x, scale, rrms)


def _rms_norm_bwd(eps: float, residuals: tuple[Array, Array, Array], dy: Array) -> tuple[Array, Array]:
    del eps
    return reference.backward(*residuals, dy)


_rms_norm.defvjp(_rms_norm_fwd, _rms_norm_bwd)
