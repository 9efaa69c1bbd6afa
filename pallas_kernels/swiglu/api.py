"""Public gated activation: argument checks and the gradient's wiring."""

from functools import partial
from typing import get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import Implementation, _dispatch
from pallas_kernels.swiglu import mosaic_gpu, reference
from pallas_kernels.swiglu.reference import Activation

_BACKWARD = {"mosaic_gpu": mosaic_gpu.backward, "xla": reference.backward}


def swiglu(
    gate: Float[Array, "*B F"],
    up: Float[Array, "*B F"],
    *,
    activation: Activation = "silu",
    implementation: Implementation | None = None,
) -> Float[Array, "*B F"]:
    """Gated activation `activation(gate) * up`, computed in f32, returned in the inputs' dtype.

    The backward pass recomputes the activation and keeps gate and up only. Source: arXiv 2002.05202, eq. 6; GELU
    and its tanh form: arXiv 1606.08415, section 2.

    Args:
        gate: f32, bf16 or f16, any shape.
        up: same shape and dtype.
        activation: "silu" (SwiGLU), "gelu" (GeGLU with the error function) or "gelu_tanh" (its tanh form).
        implementation: "mosaic_gpu", whose backward pass is one kernel (the forward pass is XLA's in either), "xla", or
            None for the fastest that accepts the arguments on this device.

    Returns:
        The product, in gate's shape and dtype.

    Raises:
        ValueError: gate and up differ in shape or dtype, or are not floating-point; an unknown activation.
        NotImplementedError: the named implementation refuses these arguments or does not exist for this operation.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"swiglu: gate and up must have the same shape and dtype; "
            f"gate is {gate.dtype}{gate.shape} and up is {up.dtype}{up.shape}"
        )
    if not jnp.issubdtype(gate.dtype, jnp.floating):
        raise ValueError(f"swiglu: gate and up must be floating-point; both are {gate.dtype}")
    if activation not in get_args(Activation):
        raise ValueError(f"swiglu: activation must be one of {', '.join(get_args(Activation))}; got {activation!r}")
    chosen = _dispatch.choose("swiglu", implementation, _refusals(gate, activation))
    return _swiglu(activation, chosen, gate, up)


def explain(activation: Activation = "silu") -> str:
    """Say which implementation runs for bf16 inputs of whole tiles."""
    some = jax.ShapeDtypeStruct((mosaic_gpu.TILE,), jnp.bfloat16)
    return _dispatch.explain("swiglu", _refusals(some, activation))


def _refusals(gate: Array | jax.ShapeDtypeStruct, activation: Activation) -> _dispatch.Refusals:
    return {"mosaic_gpu": mosaic_gpu.refuses(gate, activation), "xla": None}


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _swiglu(activation: Activation, chosen: Implementation, gate: Array, up: Array) -> Array:
    return reference.forward(gate, up, activation)


def _swiglu_fwd(
    activation: Activation, chosen: Implementation, gate: Array, up: Array
) -> tuple[Array, tuple[Array, Array]]:
    return reference.forward(gate, up, activation), (gate, up)


def _swiglu_bwd(
    activation: Activation, chosen: Implementation, residuals: tuple[Array, Array], dy: Array
) -> tuple[Array, Array]:
    return _BACKWARD[chosen](*residuals, dy, activation)


_swiglu.defvjp(_swiglu_fwd, _swiglu_bwd)
