"""Throughput: model FLOPs per token, the device's peak, and memory in use."""

from __future__ import annotations

import jax

from gymjax.models.decoder_config import DecoderConfig, LayerKind

GIB = 2**30
PEAK_BF16_FLOPS = {  # dense, per device, by a part of its name; from the vendor's datasheets
    "H200": 989e12,
    "H100": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
    "RTX 5090": 210e12,
}


def linear_weights(cfg: DecoderConfig) -> int:
    """Weights that every token is multiplied with: all linear layers and the head."""
    attention = cfg.width * cfg.head_dim * (2 * cfg.heads + 2 * cfg.kv_heads)
    ffn = sum(_ffn_weights(cfg, kind) for kind in cfg.kinds)
    return cfg.layers * attention + ffn + cfg.vocab_size * cfg.width


def _ffn_weights(cfg: DecoderConfig, kind: LayerKind) -> int:
    """Of a layer's feed-forward block, those that one token meets: of experts its own and the shared one."""
    moe = kind.experts
    if moe is None:
        return 3 * cfg.width * cfg.ffn_width
    return cfg.width * (3 * (moe.top_k * moe.ffn_width + (moe.shared_ffn_width or 0)) + moe.experts)


def step_flops(cfg: DecoderConfig, tokens: int, length: int, *, frozen_base: bool) -> float:
    """Model FLOPs of one update, recomputation not counted.

    2 FLOPs per weight and token forward, 2 backward to the inputs, 2 more to the weights unless the base is frozen;
    causal attention adds 4 * T * N * H / 2 forward and 2.5 times that backward, per layer and token.

    Args:
        cfg: model shape.
        tokens: in the update.
        length: tokens per row, an upper bound of what each attends to.
        frozen_base: whether only adapters are trained.
    """
    matmul = (4 if frozen_base else 6) * linear_weights(cfg)
    attention = 3.5 * cfg.layers * 2 * length * cfg.heads * cfg.head_dim
    return float(tokens) * (matmul + attention)


def peak_flops() -> float | None:
    """Dense bf16 peak of all devices together, None where it is not known."""
    name = jax.devices()[0].device_kind
    known = next((flops for part, flops in PEAK_BF16_FLOPS.items() if part in name), None)
    return None if known is None else known * jax.device_count()


def peak_memory_gib() -> float | None:
    """Highest memory use so far of the first local device, in GiB; None where the device does not say (CPU)."""
    stats = jax.local_devices()[0].memory_stats()
    return None if not stats else stats.get("peak_bytes_in_use", 0) / GIB


def device_memory_gib() -> float | None:
    """Memory that JAX may use on the first local device, in GiB; None where the device does not say."""
    stats = jax.local_devices()[0].memory_stats()
    return None if not stats or "bytes_limit" not in stats else stats["bytes_limit"] / GIB
