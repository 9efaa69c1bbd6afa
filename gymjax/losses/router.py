"""Losses that keep a mixture's routers balanced and their logits small: functions of sums over tokens.

They are sums over tokens of what a layer's router gives, so that those of microbatches and devices add up to those of
the global batch; only the fractions enter as a whole.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float


def expert_fractions(counts_LE: Float[Array, "L E"]) -> Float[Array, "L E"]:
    """Share of each layer's assignments that each expert gets; a layer's shares sum to 1."""
    return counts_LE / jnp.maximum(jnp.sum(counts_LE, axis=-1, keepdims=True), 1)


def load_balancing_loss(
    fractions_LE: Float[Array, "L E"], probs_LE: Float[Array, "L E"], tokens: Float[Array, ""]
) -> Float[Array, ""]:
    """Mean over layers of `E * sum_e f_e * P_e`, with P_e the mean router probability: 1 when routing is balanced.

    f_e counts a token's top_k assignments as one whole, which divides by top_k, and every layer is balanced by itself;
    transformers' function does neither (there balanced routing gives top_k, and opposite imbalances of two layers
    cancel). Source: arXiv 2101.03961, eq. 4 to 6; divided by top_k: 2409.02060, eq. 4.

    Args:
        fractions_LE: of the global batch; they pass no gradient.
        probs_LE: softmax over all experts, summed over a part of the global batch; the loss is that part's share.
        tokens: of the global batch, without padding.
    """
    return jnp.mean(fractions_LE.shape[-1] * jnp.sum(fractions_LE * probs_LE, axis=-1)) / tokens


def router_z_loss(z_L: Float[Array, " L"], tokens: Float[Array, ""]) -> Float[Array, ""]:
    """Mean over layers and tokens of `logsumexp(logits)**2` (arXiv 2202.08906, eq. 5).

    Args:
        z_L: summed over a part of the global batch; the loss is that part's share.
        tokens: of the global batch, without padding.
    """
    return jnp.mean(z_L) / tokens


def expert_load(counts_LE: Float[Array, "L E"]) -> dict[str, Float[Array, ""]]:
    """How evenly experts are used.

    Returns:
        expert_load_max and expert_load_min: tokens of the busiest and of the idlest expert of any layer over those of
        an even share (1 is even, E all tokens); expert_entropy: mean over layers of the entropy of the shares over
        log(E) (1 is even, 0 one expert alone).
    """
    fractions_LE = expert_fractions(counts_LE)
    experts = fractions_LE.shape[-1]
    logs_LE = jnp.log(jnp.where(fractions_LE > 0, fractions_LE, 1.0))
    return {
        "expert_load_max": experts * jnp.max(fractions_LE),
        "expert_load_min": experts * jnp.min(fractions_LE),
        "expert_entropy": jnp.mean(-jnp.sum(fractions_LE * logs_LE, axis=-1)) / jnp.log(float(experts)),
    }
