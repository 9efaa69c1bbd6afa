"""Named shapes of attention and its naive peer."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels._case import Case, Peer
from pallas_kernels.flash_attention.reference import attention_mask

METRIC = "tflops"


def _case(
    name: str,
    batch: int,
    tokens: int,
    heads: int,
    kv_heads: int,
    width: int,
    *,
    causal: bool = True,
    window: int | None = None,
    documents: int = 0,
    **options: Any,
) -> Case:
    def args(key: Array) -> tuple[tuple[Array, ...], dict[str, object]]:
        shapes = (batch, tokens, heads, width), *[(batch, tokens, kv_heads, width)] * 2
        qkv = tuple(jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(jax.random.split(key, 3), shapes))
        ids_T = 1 + jnp.arange(tokens, dtype=jnp.int32) * documents // tokens
        segment_ids = jnp.broadcast_to(ids_T, (batch, tokens)) if documents else None
        return qkv, {"causal": causal, "window": window, "segment_ids": segment_ids, **options}

    pairs = _pairs(tokens, causal, window, documents)
    flops = 4 * batch * heads * width * pairs
    moved = 2 * batch * tokens * width * 2 * (heads + kv_heads)
    return Case(name, args, flops, moved, 3.5 * flops, 3.5 * moved, wrt=(0, 1, 2))


def _pairs(tokens: int, causal: bool, window: int | None, documents: int) -> float:
    """Count query-key pairs that a row needs, as the field does: half of the square where causal."""
    length = tokens / max(1, documents)
    if window is not None and window < length:
        return max(1, documents) * (length * window - window * window / 2)
    return max(1, documents) * length * length / (2 if causal else 1)


TINY = (
    _case("tiny-B2-S24-N4-K2-D8-causal", 2, 24, 4, 2, 8),
    _case("tiny-B1-S17-N3-K1-D16-causal-W5", 1, 17, 3, 1, 16, window=5),
    _case("tiny-B2-S20-N2-K2-D8-causal-docs3", 2, 20, 2, 2, 8, documents=3),
    _case("tiny-B1-S9-N2-K1-D8-full", 1, 9, 2, 1, 8, causal=False),
)

CASES = (
    _case("B4-S2048-N32-K8-D128-causal", 4, 2048, 32, 8, 128),
    _case("B64-S256-N32-K8-D128-causal", 64, 256, 32, 8, 128),
    _case("B32-S512-N32-K8-D128-causal", 32, 512, 32, 8, 128),
    _case("B4-S4096-N32-K8-D128-causal", 4, 4096, 32, 8, 128),
    _case("B4-S4096-N32-K8-D128-causal-pair", 4, 4096, 32, 8, 128, deterministic=True),
    _case("B4-S4096-N32-K8-D128-causal-cap30", 4, 4096, 32, 8, 128, softcap=30.0),
    _case("B4-S4096-N32-K8-D128-full", 4, 4096, 32, 8, 128, causal=False),
    _case("B4-S4096-N32-K8-D128-causal-W1024", 4, 4096, 32, 8, 128, window=1024),
    _case("B2-S4096-N32-K8-D128-causal-docs8", 2, 4096, 32, 8, 128, documents=8),
    _case("B4-S4096-N32-K8-D64-causal", 4, 4096, 32, 8, 64),
    _case("B4-S4096-N32-K8-D64-causal-pair", 4, 4096, 32, 8, 64, deterministic=True),
    _case("B2-S4096-N32-K8-D256-causal", 2, 4096, 32, 8, 256),
    _case("B1-S16384-N32-K8-D128-causal", 1, 16384, 32, 8, 128),
    _case("B1-S16384-N32-K8-D128-causal-pair", 1, 16384, 32, 8, 128, deterministic=True),
    _case("B16-S2048-N32-K8-D128-causal", 16, 2048, 32, 8, 128),
    _case("B16-S2048-N32-K8-D128-causal-pair", 16, 2048, 32, 8, 128, deterministic=True),
    *[
        _case(f"B{batch}-S{tokens}-N32-K8-D{width}-causal", batch, tokens, 32, 8, width)
        for width in (64, 256)
        for batch, tokens in ((1, 16384), (16, 2048))
    ],
    _case("B4-S4096-N32-K8-D256-causal", 4, 4096, 32, 8, 256),
    _case("B1-S32768-N32-K8-D128-causal", 1, 32768, 32, 8, 128),
    _case("B1-S32768-N32-K8-D128-causal-W4096", 1, 32768, 32, 8, 128, window=4096),
    _case("B12-S4096-N32-K8-D128-causal", 12, 4096, 32, 8, 128),
    _case("B1-S49152-N32-K8-D128-causal-docs12", 1, 49152, 32, 8, 128, documents=12),
    _case("B1-S65536-N32-K8-D128-causal-docs12", 1, 65536, 32, 8, 128, documents=12),
    _case("B1-S65536-N32-K8-D128-causal-docs12-pair", 1, 65536, 32, 8, 128, documents=12, deterministic=True),
    _case("B1-S131072-N32-K8-D128-causal", 1, 131072, 32, 8, 128),
)


def _naive(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool,
    window: int | None,
    segment_ids: Array | None,
    softcap: float | None = None,
    deterministic: bool | None = None,
) -> Array:
    """Repeat k and v to the query heads and take the softmax of the whole score matrix."""
    del deterministic  # it always is
    groups = q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, groups, axis=2), jnp.repeat(v, groups, axis=2)
    scores = jnp.einsum("BTNH,BSNH->BNTS", q, k).astype(jnp.float32) / q.shape[-1] ** 0.5
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    mask = attention_mask(q.shape[1], k.shape[1], causal, window, segment_ids, segment_ids)
    if mask is not None:
        scores = jnp.where(mask[:, None], scores, -jnp.inf)
    return jnp.einsum("BNTS,BSNH->BTNH", jax.nn.softmax(scores, axis=-1).astype(v.dtype), v)


PEERS = {"naive": Peer(_naive)}
