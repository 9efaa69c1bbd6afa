"""Softmax attention in plain jnp: the oracle's shape of the computation, and "xla".

The scores (B, N, T, S) are materialised in f32, so memory grows with T * S.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

_MASKED = -1e30  # finite, so that neither max - max nor its gradient makes NaN; exp(_MASKED - max) is exactly 0


def forward(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    *,
    causal: bool,
    window: int | None,
    segment_ids: Int[Array, "B T"] | None,
    kv_segment_ids: Int[Array, "B S"] | None,
    scale: float,
    softcap: float | None,
    sinks: Float[Array, " N"] | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B N T"]]:
    """Attend; returns (out, lse). Rows that may see no key give exactly 0 and pass no gradient."""
    batch, tokens, heads, width = q.shape
    keys, kv_heads = k.shape[1], k.shape[2]
    # A key head's queries lie in one matrix and the mask is added: on CPUs thrice as fast as 5-d products and where.
    q_BKXH = q.reshape(batch, tokens, kv_heads, -1, width).transpose(0, 2, 3, 1, 4).reshape(batch, kv_heads, -1, width)
    k_BKSH, v_BKSH = k.swapaxes(1, 2), v.swapaxes(1, 2)
    scores_BKXS = jnp.einsum("BKXH,BKSH->BKXS", q_BKXH, k_BKSH, preferred_element_type=jnp.float32) * scale
    scores_BKGTS = scores_BKXS.reshape(batch, kv_heads, -1, tokens, keys)
    if softcap is not None:
        scores_BKGTS = softcap * jnp.tanh(scores_BKGTS / softcap)
    mask_BTS = attention_mask(tokens, keys, causal, window, segment_ids, kv_segment_ids)
    if mask_BTS is not None:
        scores_BKGTS += jnp.where(mask_BTS, 0.0, _MASKED)[:, None, None]
    probs_BKGTS, lse_BNT = _softmax(scores_BKGTS, sinks)
    probs_BKXS = probs_BKGTS.astype(v.dtype).reshape(scores_BKXS.shape)
    out_BKXH = jnp.einsum("BKXS,BKSH->BKXH", probs_BKXS, v_BKSH)
    out_BTKGH = out_BKXH.reshape(batch, kv_heads, heads // kv_heads, tokens, width).transpose(0, 3, 1, 2, 4)
    if mask_BTS is not None and (segment_ids is not None or tokens > keys):  # else every row sees itself
        sees_BT = jnp.any(mask_BTS, axis=-1)
        out_BTKGH = jnp.where(sees_BT[:, :, None, None, None], out_BTKGH, 0)
        if sinks is None:
            lse_BNT = jnp.where(sees_BT[:, None], lse_BNT, -jnp.inf)
    return out_BTKGH.reshape(q.shape), lse_BNT


def _softmax(
    scores_BKGTS: Float[Array, "B K G T S"], sinks: Float[Array, " N"] | None
) -> tuple[Float[Array, "B K G T S"], Float[Array, "B N T"]]:
    """Softmax over keys, and over a score that stands for none of them where heads have sinks; and its denominator."""
    batch, kv_heads, group, tokens, _ = scores_BKGTS.shape
    if sinks is not None:
        sinks_KG11 = sinks.astype(jnp.float32).reshape(kv_heads, group, 1, 1)
        column_BKGT1 = jnp.broadcast_to(sinks_KG11, (batch, kv_heads, group, tokens, 1))
        scores_BKGTS = jnp.concatenate([scores_BKGTS, column_BKGT1], axis=-1)
    lse_BKGT = jax.nn.logsumexp(scores_BKGTS, axis=-1)
    probs_BKGTS = jax.nn.softmax(scores_BKGTS, axis=-1)
    probs_BKGTS = probs_BKGTS if sinks is None else probs_BKGTS[..., :-1]
    return probs_BKGTS, lse_BKGT.reshape(batch, kv_heads * group, tokens)


def attention_mask(
    tokens: int,
    keys: int,
    causal: bool,
    window: int | None,
    segment_ids: Int[Array, "B T"] | None,
    kv_segment_ids: Int[Array, "B S"] | None,
) -> Bool[Array, "B T S"] | None:
    """Return which query sees which key (B is 1 without segments), or None where each sees all."""
    mask = None
    if causal:
        position_T1 = jnp.arange(tokens)[:, None] + (keys - tokens)  # the last query lines up with the last key
        key_1S = jnp.arange(keys)[None, :]
        mask = key_1S <= position_T1
        if window is not None:
            mask &= key_1S > position_T1 - window
        mask = mask[None]
    if segment_ids is not None and kv_segment_ids is not None:
        q_ids, kv_ids = segment_ids[:, :, None], kv_segment_ids[:, None, :]
        same = (q_ids == kv_ids) & (q_ids != 0)
        mask = same if mask is None else mask & same
    return mask
