"""Public RMSNorm: argument checks and the gradient's wiring."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jaxtyping import Array, Float

from pallas_kernels import Implementation, _dispatch
from pallas_kernels._hopper import run_once
from pallas_kernels.rms_norm import mosaic_gpu, reference

# Of a number a row that the backward pass needs: where it is kept, no norm runs again but for its result.
RRMS_NAME = "norm_rrms"

_ADDED = {"mosaic_gpu": mosaic_gpu.forward_added, "xla": reference.forward_added}
_FORWARD = {"mosaic_gpu": mosaic_gpu.forward, "xla": reference.forward}
_BACKWARD = {"mosaic_gpu": mosaic_gpu.backward, "xla": reference.backward}


def rms_norm(
    x: Float[Array, "*B D"],
    scale: Float[Array, " D"],
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    room: int = 0,
    implementation: Implementation | None = None,
) -> Float[Array, "*B D+room"]:
    """Root-mean-square normalisation over the last axis.

    `x * rsqrt(mean(x**2) + eps) * (offset + scale)`, computed in f32, returned in x.dtype. The backward pass
    keeps x and one f32 number a row, and sums scale's gradient in f32. Source: arXiv 1910.07467, eq. 4.

    Args:
        x: f32, bf16 or f16, any leading axes.
        scale: same width as x; any float dtype.
        eps: added to the mean square.
        offset: added to the scale in f32: 1 where scales are stored around 0 (Gemma).
        room: columns to leave behind the result, so that who puts something there need not copy it. What they hold
            is undefined: write them before they are read.
        implementation: "mosaic_gpu", "xla", or None for the fastest that accepts x on this device.

    Returns:
        The normalised x in the first D columns, in x.dtype.

    Raises:
        ValueError: scale's width differs from x's, one of them is not floating-point, or room is negative.
        NotImplementedError: the named implementation refuses these arguments or does not exist for this operation.
    """
    return _rms_norm(_plan(x, scale, eps, room, implementation), x, _shifted(scale, offset))


def rms_norm_residual(
    x: Float[Array, "*B D"],
    scale: Float[Array, " D"],
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    room: int = 0,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "*B D"], Float[Array, "*B D+room"]]:
    """x itself and `rms_norm` of it, for a residual stream: x's gradients by both ways are added in the backward pass.

    Args and Raises as rms_norm.

    Returns:
        x, to be used in its place from here on, and the normalised x.
    """
    return _rms_norm_residual(_plan(x, scale, eps, room, implementation), x, _shifted(scale, offset))


def add_rms_norm(
    x: Float[Array, "*B D"],
    added: Float[Array, "*B D"],
    scale: Float[Array, " D"],
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    room: int = 0,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "*B D"], Float[Array, "*B D+room"]]:
    """The residual stream with a branch's output added, and `rms_norm` of it: forward and backward in one pass each.

    The sum is rounded to x.dtype before it is normalised. Its gradients by both ways are added in the backward pass.

    Args:
        x: residual stream.
        added: of x's shape and dtype.
        scale, eps, offset, room, implementation: as in rms_norm.

    Returns:
        x + added, and the normalised sum.

    Raises:
        ValueError: added differs from x in shape or dtype; and as rms_norm.
        NotImplementedError: as rms_norm.
    """
    if added.shape != x.shape or added.dtype != x.dtype:
        raise ValueError(f"add_rms_norm: added must be {x.dtype}{x.shape}, as x is; got {added.dtype}{added.shape}")
    return _add_rms_norm(_plan(x, scale, eps, room, implementation), x, added, _shifted(scale, offset))


def _shifted(scale: Array, offset: float) -> Array:
    return scale.astype(jnp.float32) + offset if offset else scale


def explain(width: int = 4096, rows: int = 8192) -> str:
    """Say which implementation runs for so many bf16 rows of this width, and why."""
    return _dispatch.explain("rms_norm", _refusals(jax.ShapeDtypeStruct((rows, width), jnp.bfloat16), 0))


class _Plan(NamedTuple):
    """What is not differentiated."""

    eps: float
    room: int
    chosen: Implementation


def _plan(x: Array, scale: Array, eps: float, room: int, implementation: Implementation | None) -> _Plan:
    if x.ndim < 1 or scale.shape != x.shape[-1:]:
        raise ValueError(f"rms_norm: scale must have the width of x; scale is {scale.shape} and x is {x.shape}")
    if not (jnp.issubdtype(x.dtype, jnp.floating) and jnp.issubdtype(scale.dtype, jnp.floating)):
        raise ValueError(f"rms_norm: x and scale must be floating-point; x is {x.dtype} and scale is {scale.dtype}")
    if room < 0:
        raise ValueError(f"rms_norm: room must not be negative; got {room}")
    return _Plan(eps, room, _dispatch.choose("rms_norm", implementation, _refusals(x, room)))


def _refusals(x: Array | jax.ShapeDtypeStruct, room: int) -> _dispatch.Refusals:
    return {"mosaic_gpu": mosaic_gpu.refuses(x, room), "xla": None}


class _Kept(NamedTuple):
    """For the backward pass; `frozen` is () where scale has no gradient, and None where it has: no array either way."""

    x: Array
    scale: Array
    rrms: Array
    frozen: tuple[()] | None

    @classmethod
    def of(cls, x: Array, scale: CustomVJPPrimal, rrms: Array) -> "_Kept":
        rrms = checkpoint_name(run_once(rrms), RRMS_NAME)
        return cls(x, scale.value, rrms, None if scale.perturbed else ())


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rms_norm(plan: _Plan, x: Array, scale: Array) -> Array:
    return _FORWARD[plan.chosen](x, scale, plan.eps, plan.room)[0]


def _rms_norm_fwd(plan: _Plan, x: CustomVJPPrimal, scale: CustomVJPPrimal) -> tuple[Array, _Kept]:
    y, rrms = _FORWARD[plan.chosen](x.value, scale.value, plan.eps, plan.room)
    return y, _Kept.of(x.value, scale, rrms)


def _rms_norm_bwd(
    plan: _Plan, kept: _Kept, dy: Any, dresidual: Array | SymbolicZero | None = None
) -> tuple[Array, Array | None]:
    if isinstance(dy, SymbolicZero):
        dy = jnp.zeros(dy.shape, kept.x.dtype)
    dresidual = None if isinstance(dresidual, SymbolicZero) else dresidual
    dy = dy[..., : kept.x.shape[-1]]
    return _BACKWARD[plan.chosen](kept.x, kept.scale, kept.rrms, dy, dresidual, trained=kept.frozen is None)


_rms_norm.defvjp(_rms_norm_fwd, _rms_norm_bwd, symbolic_zeros=True)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rms_norm_residual(plan: _Plan, x: Array, scale: Array) -> tuple[Array, Array]:
    return x, _rms_norm(plan, x, scale)


def _residual_fwd(plan: _Plan, x: CustomVJPPrimal, scale: CustomVJPPrimal) -> tuple[tuple[Array, Array], _Kept]:
    y, kept = _rms_norm_fwd(plan, x, scale)
    return (x.value, y), kept


def _residual_bwd(plan: _Plan, kept: _Kept, cotangents: tuple) -> tuple[Array, Array | None]:
    dresidual, dy = cotangents
    return _rms_norm_bwd(plan, kept, dy, dresidual)


_rms_norm_residual.defvjp(_residual_fwd, _residual_bwd, symbolic_zeros=True)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _add_rms_norm(plan: _Plan, x: Array, added: Array, scale: Array) -> tuple[Array, Array]:
    return _ADDED[plan.chosen](x, added, scale, plan.eps, plan.room)[:2]


def _add_fwd(
    plan: _Plan, x: CustomVJPPrimal, added: CustomVJPPrimal, scale: CustomVJPPrimal
) -> tuple[tuple[Array, Array], _Kept]:
    total, y, rrms = _ADDED[plan.chosen](x.value, added.value, scale.value, plan.eps, plan.room)
    return (total, y), _Kept.of(total, scale, rrms)


def _add_bwd(plan: _Plan, kept: _Kept, cotangents: tuple) -> tuple[Array, Array, Array | None]:
    dtotal, dscale = _residual_bwd(plan, kept, cotangents)
    return dtotal, dtotal, dscale


_add_rms_norm.defvjp(_add_fwd, _add_bwd, symbolic_zeros=True)
