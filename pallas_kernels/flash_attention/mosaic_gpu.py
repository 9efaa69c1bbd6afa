"""Attention by this project's Hopper kernels: what they refuse, padding to whole tiles, and the gradient."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from pallas_kernels import _platform
from pallas_kernels._hopper import run_once
from pallas_kernels.flash_attention.bounds import pad_bounds, row_bounds
from pallas_kernels.flash_attention.mosaic_gpu_dkv import DkvTiles, backward_dkv
from pallas_kernels.flash_attention.mosaic_gpu_dkv_wide import WideTiles, backward_dkv_wide
from pallas_kernels.flash_attention.mosaic_gpu_dq import DqTiles, backward_dq
from pallas_kernels.flash_attention.mosaic_gpu_dq_rings import RingTiles, backward_dq_rings
from pallas_kernels.flash_attention.mosaic_gpu_forward_ahead import forward_ahead
from pallas_kernels.flash_attention.mosaic_gpu_forward_wide import forward_wide
from pallas_kernels.flash_attention.mosaic_gpu_fused import FusedTiles, backward_fused
from pallas_kernels.flash_attention.mosaic_gpu_items import ForwardTiles
from pallas_kernels.flash_attention.mosaic_gpu_splitting import split_work
from pallas_kernels.flash_attention.mosaic_gpu_tiles import LOG2E, Scores

WIDTHS = (64, 96, 128, 256)
FUSED_WIDTHS = (64, 128)  # of the fused backward: others have no tile that fits registers and swizzles
FORWARDS = {width: (forward_ahead, ForwardTiles()) for width in WIDTHS} | {
    64: (forward_ahead, ForwardTiles(stages=3)),
    256: (forward_wide, ForwardTiles(block_kv=64)),
}
MULTIPLE = 128  # every tile size below divides it
FEW = 16  # queries of a row whose gradients are formed without the rounding of `out`

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
    if own_ids:
        return "keys with segment ids of their own are not done yet"
    if isinstance(scale, jax.Array) or isinstance(softcap, jax.Array):
        return "scale and softcap must be Python numbers, as they are compiled into the kernel"
    return _platform.why_not_hopper()


@dataclasses.dataclass(frozen=True)
class Form:
    """Which kernels run.

    Attributes:
        scores: from products to scores.
        deterministic: whether the backward gives the same bits in every run: two kernels of seven products in all,
            where the fused one has five.
        staged: whether products go through shared memory: slower, but what the CPU interpreter can run.
        few: how many queries a row has, if they are at most FEW, else 0.
    """

    scores: Scores
    deterministic: bool = False
    staged: bool = False
    few: int = 0


def forward(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    *,
    causal: bool,
    window: int | None,
    segment_ids: Int[Array, "B T"] | None,
    scale: float,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    deterministic: bool = False,
    staged: bool = False,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B N T"]]:
    """Attend; returns (out, lse), differentiable in both. Memory grows with T: masks are two integers a row.

    `deterministic` and `staged` are Form's; other widths than FUSED_WIDTHS are deterministic always.
    """
    tokens, keys = q.shape[1], k.shape[1]
    lo, hi = row_bounds(tokens, keys, causal=causal, window=window, segment_ids=segment_ids)
    q, k, v = (_pad(x) for x in (q, k, v))
    lo, hi = pad_bounds(lo, hi, q.shape[1], keys)
    sinks = None if sinks is None else sinks.astype(jnp.float32)
    few = tokens if tokens <= FEW else 0
    form = Form(Scores(scale, softcap, staged), deterministic or q.shape[-1] not in FUSED_WIDTHS, staged, few)
    out, lse = _attend(q, k, v, lo, hi, sinks, form)
    lse = jnp.where(jnp.isposinf(lse), -jnp.inf, lse / LOG2E)
    return out[:, :tokens], lse[..., :tokens]


def _pad(x: Array) -> Array:
    more = -x.shape[1] % MULTIPLE
    return x if not more else jnp.pad(x, ((0, 0), (0, more), (0, 0), (0, 0)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _attend(q, k, v, lo, hi, sinks, form: Form):
    return _attend_fwd(q, k, v, lo, hi, sinks, form)[0]


def _attend_fwd(q, k, v, lo, hi, sinks, form: Form):
    run, tiles = FORWARDS[q.shape[-1]]
    if form.staged:  # few blocks, so that the interpreter meets one with several items
        tiles = dataclasses.replace(tiles, staged=True, blocks=2)
    kernel = functools.partial(run, scores=form.scores, tiles=tiles)
    spec = "BTNH,BSKH,BSKH,BT,BT" + ("" if sinks is None else ",N") + "->BTNH,BNT"
    out, lse = run_once(split_work(kernel, spec, q, k, v, lo, hi, *([] if sinks is None else [sinks])))
    out, lse = checkpoint_name(out, OUT_NAME), checkpoint_name(lse, LSE_NAME)
    return (out, lse), (q, k, v, lo, hi, sinks, out, lse)


def _attend_bwd(form: Form, residuals, cotangents):
    q, k, v, lo, hi, sinks, out, lse = residuals
    dout, dlse = cotangents
    if form.few:
        delta = _delta_of_few(form, q, k, v, lo, hi, lse, dout)
    else:
        delta = jnp.einsum("BTNH,BTNH->BNT", out, dout, preferred_element_type=jnp.float32)
    # The log-sum-exp's gradient by a score is its weight p: it joins what p is multiplied with. (lse is in base 2.)
    delta -= dlse * LOG2E
    kernels = functools.partial(_backward, form)
    spec = "BTNH,BSKH,BSKH,BTNH,BNT,BNT,BT,BT->BTNH,BSKH,BSKH"
    dq, dk, dv = split_work(kernels, spec, q, k, v, dout, lse, delta, lo, hi)
    # A sink is a key whose value is 0: its weight p gives the gradient p * (0 - delta) of its score.
    dsinks = None if sinks is None else -jnp.sum(jnp.exp2(sinks[:, None] * LOG2E - lse) * delta, axis=(0, 2))
    return dq, dk, dv, None, None, dsinks


def _delta_of_few(form: Form, q, k, v, lo, hi, lse, dout):
    """`sum(out * dout)` of the unpadded queries, as the sum over keys of weights and their gradients.

    Equal but for the rounding of `out`, which averages out over the keys of many queries. Beside a sink a query with
    one key or a few has gradients that are small differences: by `out` they are twice as far off as dense attention's.
    """
    (batch, tokens, heads, width), kv_heads = q.shape, k.shape[2]

    def product(queries, keys):
        queries = queries[:, : form.few].reshape(batch, form.few, kv_heads, -1, width)
        one = jnp.einsum("BTKGH,BSKH->BKGTS", queries, keys, preferred_element_type=jnp.float32)
        return one.reshape(batch, heads, form.few, -1)

    scores = dataclasses.replace(form.scores, staged=True)  # no kernel here
    lse, lo, hi = lse[:, :, : form.few, None], lo[:, None, : form.few, None], hi[:, None, : form.few, None]
    weight = jnp.exp2(scores.squash(product(q, k)) * scores.factor - lse)
    key = jnp.arange(k.shape[1])
    delta = jnp.sum(jnp.where((key >= lo) & (key <= hi), weight * product(dout, v), 0.0), -1)
    return jnp.pad(delta, ((0, 0), (0, 0), (0, tokens - form.few)))


def _backward(form: Form, *inputs):
    width = inputs[0].shape[-1]
    if not form.deterministic:
        tiles = FusedTiles(stream=128 if width == 64 else 64, staged=form.staged)
        return backward_fused(*inputs, scores=form.scores, tiles=tiles)
    if width > 128:
        dk, dv = backward_dkv_wide(*inputs, scores=form.scores, tiles=WideTiles(staged=form.staged))
        return backward_dq_rings(*inputs, scores=form.scores, tiles=RingTiles(staged=form.staged)), dk, dv
    dk, dv = backward_dkv(*inputs, scores=form.scores, tiles=DkvTiles(staged=form.staged))
    return backward_dq(*inputs, scores=form.scores, tiles=DqTiles(staged=form.staged)), dk, dv


_attend.defvjp(_attend_fwd, _attend_bwd)
