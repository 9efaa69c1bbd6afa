"""Public attention: argument checks and the choice of implementation."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import Implementation, _dispatch, _platform
from pallas_kernels.flash_attention import cudnn, mosaic_gpu, reference
from pallas_kernels.flash_attention.bounds import number_documents

SHORT = 255  # tokens of a row, up to which cuDNN comes first: our kernels were not timed there


def flash_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    *,
    causal: bool = True,
    window: int | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    kv_segment_ids: Int[Array, "B S"] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N H"] | tuple[Float[Array, "B T N H"], Float[Array, "B N T"]]:
    """Softmax attention; N query heads share K key heads in groups of N/K, and k and v are never repeated.

    `softmax(mask(cap * tanh(q @ k.T * scale / cap))) @ v`, scores and softmax in f32, returned in q.dtype.
    Query i stands at key position p = i + S - T. Causal: it sees keys j <= p; with a window w, also j > p - w, so
    that the window counts the query itself. Segments: a document is a run of equal ids, and a query sees the keys of
    its own; id 0 is padding, which nobody sees. A query that sees no key gives 0 and passes no gradient. With sinks, a
    head's softmax has one more score, its sink, which takes weight and gives no value.
    Source: arXiv 1706.03762, eq. 1; 2305.13245; sinks: 2309.17453, section 3.3, a learned score in place of a key.

    Args:
        q: queries, f32, bf16 or f16.
        k: keys, same dtype, B and H; K divides N.
        v: values, shaped as k.
        causal: whether a query is kept from later keys.
        window: number of keys that a query sees at most, itself included; needs causal.
        segment_ids: int32 document number of each query, 0 for padding.
        kv_segment_ids: the same for keys; left out, they are segment_ids.
        scale: factor on the scores; None for 1/sqrt(H).
        softcap: bound on the scores, in their unit; None for no bound.
        sinks: score of each head's sink, in the unit of the scaled scores, any float dtype; not bounded by softcap.
        deterministic: whether mosaic_gpu's backward must give the same bits in every run. Without, widths 64 and 128
            form their gradients in one pass with fewer products, 1.2 times as fast on an H200, and
            dq is added up in an order that varies. None: as --xla_gpu_deterministic_ops in XLA_FLAGS says, off where
            it says nothing. cuDNN's backward never promises it.
        return_lse: whether to return the logarithm of each softmax's denominator too, f32, -inf where there is nothing
            to see; by it, results over parts of the keys can be joined. It may be differentiated.
        implementation: "mosaic_gpu", "cudnn", "xla", or None: the first that accepts the arguments on this device, in
            this order; in rows of at most SHORT tokens without segments cuDNN comes first.

    Returns:
        The attended values, in q's shape and dtype; with return_lse (values, lse).

    Raises:
        ValueError: shapes, dtypes or options do not fit together; the message holds both values.
        NotImplementedError: the named implementation refuses these arguments; the message says why and what is usable.
    """
    _check(q, k, v, causal, window, softcap)
    if sinks is not None and (sinks.shape != q.shape[2:3] or not jnp.issubdtype(sinks.dtype, jnp.floating)):
        raise ValueError(
            f"flash_attention: sinks must be floating-point of shape {q.shape[2:3]}; got {sinks.dtype}{sinks.shape}"
        )
    _check_segments(q, k, segment_ids, kv_segment_ids)
    packed, own_ids = segment_ids is not None, kv_segment_ids is not None
    refusals = _refusals(q, k, causal, packed, own_ids, scale, softcap, sinks is not None, return_lse)
    name = _dispatch.choose("flash_attention", implementation, refusals)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if segment_ids is not None and kv_segment_ids is None:
        segment_ids = number_documents(segment_ids)
    options: dict[str, Any] = {"causal": causal, "window": window, "segment_ids": segment_ids, "scale": scale}
    if name == "cudnn":
        return cudnn.forward(q, k, v, **options)
    options |= {"softcap": softcap, "sinks": sinks}
    if name == "mosaic_gpu":
        deterministic = _platform.deterministic() if deterministic is None else deterministic
        out, lse = mosaic_gpu.forward(q, k, v, **options, deterministic=deterministic)
    else:
        kv_segment_ids = segment_ids if kv_segment_ids is None else kv_segment_ids
        out, lse = reference.forward(q, k, v, **options, kv_segment_ids=kv_segment_ids)
    return (out, lse) if return_lse else out


def explain(
    q: Float[Array, "B T N H"] | jax.ShapeDtypeStruct,
    k: Float[Array, "B S K H"] | jax.ShapeDtypeStruct,
    *,
    causal: bool = True,
    packed: bool = False,
    own_ids: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: bool = False,
) -> str:
    """Say which implementation None picks for these arguments (arrays or jax.ShapeDtypeStruct) and why.

    `packed` tells whether segment_ids would be given, `own_ids` whether kv_segment_ids would, `sinks` whether sinks.
    """
    refusals = _refusals(q, k, causal, packed, own_ids, scale, softcap, sinks, False)
    return _dispatch.explain("flash_attention", refusals)


def _refusals(
    q: Array | jax.ShapeDtypeStruct,
    k: Array | jax.ShapeDtypeStruct,
    causal: bool,
    packed: bool,
    own_ids: bool,
    scale: float | None,
    softcap: float | None,
    sinks: bool,
    lse: bool,
) -> _dispatch.Refusals:
    shared = {"own_ids": own_ids, "scale": scale, "softcap": softcap}
    ours = mosaic_gpu.refuses(q, k, **shared)
    nvidias = cudnn.refuses(q, k, causal=causal, sinks=sinks, lse=lse, **shared)
    # Packed, cuDNN's mask would be T * T. Of ours, rematerialisation can keep what the backward pass needs.
    if packed or q.shape[1] > SHORT:
        return {"mosaic_gpu": ours, "cudnn": nvidias, "xla": None}
    return {"cudnn": nvidias, "mosaic_gpu": ours, "xla": None}


def _check(q: Array, k: Array, v: Array, causal: bool, window: int | None, softcap: float | None) -> None:
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape:
        raise ValueError(
            f"flash_attention: q must be (B, T, N, H), k and v both (B, S, K, H); "
            f"got {q.shape}, {k.shape} and {v.shape}"
        )
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"flash_attention: q and k must have the same B and H; got {q.shape} and {k.shape}")
    if not (q.shape[2] and k.shape[2]) or q.shape[2] % k.shape[2]:
        raise ValueError(
            f"flash_attention: the query heads must be a multiple of the key heads; got {q.shape[2]} and {k.shape[2]}"
        )
    if not (q.dtype == k.dtype == v.dtype and jnp.issubdtype(q.dtype, jnp.floating)):
        raise ValueError(
            f"flash_attention: q, k and v must share one floating-point dtype; got {q.dtype}, {k.dtype} and {v.dtype}"
        )
    if window is not None and (window < 1 or not causal):
        raise ValueError(f"flash_attention: a window must be >= 1 and causal; got window={window}, causal={causal}")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"flash_attention: softcap must be positive or None; got {softcap}")


def _check_segments(q: Array, k: Array, segment_ids: Array | None, kv_segment_ids: Array | None) -> None:
    if segment_ids is None:
        if kv_segment_ids is not None:
            raise ValueError("flash_attention: kv_segment_ids needs segment_ids for the queries; got None")
        return
    if kv_segment_ids is None and q.shape[1] != k.shape[1]:
        raise ValueError(
            f"flash_attention: kv_segment_ids must be given where T and S differ; got {q.shape[1]} and {k.shape[1]}"
        )
    for name, ids, tokens in (("segment_ids", segment_ids, q), ("kv_segment_ids", kv_segment_ids, k)):
        if ids is not None and (ids.shape != tokens.shape[:2] or not jnp.issubdtype(ids.dtype, jnp.integer)):
            raise ValueError(
                f"flash_attention: {name} must be integers of shape {tokens.shape[:2]}; got {ids.dtype}{ids.shape}"
            )
