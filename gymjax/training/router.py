"""What a mixture's routers add to the loss of a step, and what is logged of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from gymjax.losses.router import expert_fractions, expert_load, load_balancing_loss, router_z_loss
from gymjax.nn.routing import RouterStats


def router_loss(
    stats: RouterStats, counts_LE: Float[Array, "L E"], tokens: Array, *, balance: float, z: float
) -> Float[Array, ""]:
    """A microbatch's share of `balance * load_balancing_loss + z * router_z_loss` of the global batch.

    Args:
        stats: of the microbatch.
        counts_LE: tokens sent to each expert in the global batch.
        tokens: of the global batch, without padding.
        balance: coefficient, likewise z; a loss whose coefficient is 0 is not computed.
    """
    loss = jnp.zeros(())
    if balance:
        loss += balance * load_balancing_loss(expert_fractions(counts_LE), stats.probs, tokens)
    return loss + z * router_z_loss(stats.z, tokens) if z else loss


def router_metrics(stats: RouterStats, tokens: Array) -> dict[str, jax.Array]:
    """Losses without their coefficients, and the load, of the global batch.

    Nothing is dropped: `dispatch` has a row for every assignment.
    """
    return {
        "moe_aux_loss": load_balancing_loss(expert_fractions(stats.counts), stats.probs, tokens),
        "router_z_loss": router_z_loss(stats.z, tokens),
        **expert_load(stats.counts),
        "expert_dropped": jnp.zeros(()),
    }
