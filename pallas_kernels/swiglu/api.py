"""Public SwiGLU: argument checks and the gradient's wiring."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import Implementation, _dispatch
from pallas_kernels.swiglu import reference

_REFUSALS: _dispatch.Refusals = {"xla": None}


def swiglu(
    gate: Float[Array, "*B F"],
    up: Float[Array, "*B F"],
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "*B F"]:
    """Gated activation `silu(gate) * up`, computed in f32, returned in the inputs' dtype.

    The backward pass recomputes the sigmoid and keeps gate and up only. Source: arXiv 2002.05202, eq. 6.

    Args:
        gate: f32, bf16 or f16, any shape.
        up: same shape and dtype.
        implementation: "xla", or None for the fastest that accepts the arguments on this device.

    Returns:
        The product, in gate's shape and dtype.

    Raises:
        ValueError: gate and up differ in shape or dtype, or are not floating-point.
        NotImplementedError: the named implementation does not exist for this operation.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"swiglu: gate and up must have the same shape and dtype; "
            f"gate is {gate.dtype}{gate.shape} and up is {up.dtype}{up.shape}"
        )
    if not jnp.issubdtype(gate.dtype, jnp.floating):
        raise ValueError(f"swiglu: gate and up must be floating-point; both are {gate.dtype}")
    _dispatch.choose("swiglu", implementation, _REFUSALS)
    return _swiglu(gate, up)


def explain() -> str:
    """Say which implementation runs."""
    return _dispatch.explain("swiglu", _REFUSALS)


@jax.custom_vjp
def _swiglu(gate: Array, up: Array) -> Array:
    return reference.forward(gate, up)


def _swiglu_fwd(gate: Array, up: Array) -> tuple[Array, tuple[Array, Array]]:
    return reference.forward(gate, up), (gate, up)


def _swiglu_bwd(residuals: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    return reference.backward(*residuals, dy)


_swiglu.defvjp(_swiglu_fwd, _swiglu_bwd)
