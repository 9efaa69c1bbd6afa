"""Attention by this project's Hopper kernels: what they refuse, padding to whole tiles, and the gradient."""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from pallas_kernels import _platform
from pallas_kernels.flash_attention.bounds import pad_bounds, row_bounds
from pallas_kernels.flash_attention.mosaic_gpu_backward import BackwardTiles, backward_dkv, backward_dq
from pallas_kernels.flash_attention.mosaic_gpu_forward import ForwardTiles, forward_tiles

WIDTHS = (64, 128)
MULTIPLE = 128  # every tile size below divides it

# Names of what the backward needs, for rematerialisation policies that keep it.
OUT_NAME, LSE_NAME = "attention", "attention_lse"


def refuses(
    q: Array | jax.ShapeDtypeStruct,
    k: Array | jax.ShapeDtypeStruct,
    *,
    own_ids: bool,
    scale: float | None,
    softcap: float | None,
) -> str | None:
    """Return why the kernels cannot do these arguments on the default device, or None.

    `own_ids` tells whether the keys have segment ids of their own instead of sharing the queries'.
    """
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it needs bfloat16 or float16, and q is {q.dtype}"
    if q.shape[-1] not in WIDTHS:
        return f"the head width must be one of {WIDTHS}, and is {q.shape[-1]}"
    if softcap is not None:
        return f"it has no softcap yet, and softcap is {softcap}"
    if own_ids:
        return "keys with segment ids of their own are not done yet"
    if isinstance(scale, jax.Array):
        return "scale must be a Python number, as it is compiled into the kernel"
    capability = _platform.compute_capability()
    if capability is None:
        return _platform.why_not_gpu()
    if capability[0] != 9:
        return f"it needs Hopper (compute capability 9.0); this GPU has {capability}"
    if jax.device_count() > 1 and not jax.sharding.get_abstract_mesh().manual_axes:
        return "on several devices it must run inside shard_map, as XLA cannot split it"
    return None


def forward(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    *,
    causal: bool,
    window: int | None,
    segment_ids: Int[Array, "B T"] | None,
    scale: float,
    staged: bool = False,
) -> Float[Array, "B T N H"]:
    """Attend; differentiable. Memory grows with T: masks are two integers a row.

    `staged` sends products through shared memory: slower, but what the CPU interpreter can run.
    """
    tokens, keys = q.shape[1], k.shape[1]
    lo, hi = row_bounds(tokens, keys, causal=causal, window=window, segment_ids=segment_ids)
    q, k, v = (_pad(x) for x in (q, k, v))
    lo, hi = pad_bounds(lo, hi, q.shape[1], keys)
    return _attend(q, k, v, lo, hi, scale, staged)[:, :tokens]


def _pad(x: Array) -> Array:
    more = -x.shape[1] % MULTIPLE
    return x if not more else jnp.pad(x, ((0, 0), (0, more), (0, 0), (0, 0)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _attend(q, k, v, lo, hi, scale, staged):
    return forward_tiles(q, k, v, lo, hi, scale=scale, tiles=ForwardTiles(staged=staged))[0]


def _attend_fwd(q, k, v, lo, hi, scale, staged):
    out, lse = forward_tiles(q, k, v, lo, hi, scale=scale, tiles=ForwardTiles(staged=staged))
    out, lse = checkpoint_name(out, OUT_NAME), checkpoint_name(lse, LSE_NAME)
    return out, (q, k, v, lo, hi, out, lse)


def _attend_bwd(scale, staged, residuals, dout):
    q, k, v, lo, hi, out, lse = residuals
    delta = jnp.einsum("BTNH,BTNH->BNT", out, dout, preferred_element_type=jnp.float32)
    tiles = BackwardTiles(staged=staged)
    dk, dv = backward_dkv(q, k, v, dout, lse, delta, lo, hi, scale=scale, tiles=tiles)
    dq = backward_dq(q, k, v, dout, lse, delta, lo, hi, scale=scale, tiles=tiles)
    return dq, dk, dv, None, None


_attend.defvjp(_attend_fwd, _attend_bwd)
