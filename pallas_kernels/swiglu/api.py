"""Public gated activation: argument checks and the gradient's wiring."""

from functools import partial
from typing import get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import Implementation, _dispatch
from pallas_kernels.swiglu import mosaic_gpu, reference
from pallas_kernels.swiglu.reference import Activation

_FORWARD = {"mosaic_gpu": lambda gate, up, _: mosaic_gpu.forward(gate, up), "xla": reference.forward}


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
        implementation: "mosaic_gpu" (whose backward pass is XLA's), "xla", or None for the fastest that accepts.

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
    return _swiglu(_dispatch.choose("swiglu", implementation, _refusals(gate, activation)), activation, gate, up)


def explain() -> str:
    """Say which implementation runs."""
    return _dispatch.explain("swiglu", _refusals(jax.ShapeDtypeStruct((8192, 14336), jnp.bfloat16), "silu"))


def _refusals(gate: Array | jax.ShapeDtypeStruct, activation: Activation) -> _dispatch.Refusals:
    return {"mosaic_gpu": mosaic_gpu.refuses(gate, activation), "xla": None}


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _swiglu(implementation: Implementation, activation: Activation, gate: Array, up: Array) -> Array:
    return _FORWARD[implementation](gate, up, activation)


def _swiglu_fwd(
    implementation: Implementation, activation: Activation, gate: Array, up: Array
) -> tuple[Array, tuple[Array, Array]]:
    return _FORWARD[implementation](gate, up, activation), (gate, up)


def _swiglu_bwd(
    implementation: Implementation, activation: Activation, residuals: tuple[Array, Array], dy: Array
) -> tuple[Array, Array]:
    return reference.backward(*residuals, dy, activation)


_swiglu.defvjp(_swiglu_fwd, _swiglu_bwd)
