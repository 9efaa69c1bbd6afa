"""Token-weighted next-token loss for supervised fine-tuning and continued pre-training."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.linear_cross_entropy import linear_cross_entropy

IGNORED = -100
CHUNK_TOKENS = 2048  # about how many tokens' logits exist at a time


def sft_loss(
    hidden_BTD: Float[Array, "B T D"],
    head_VD: Float[Array, "V D"],
    targets_BT: Int[Array, "B T"],
    weights_BT: Float[Array, "B T"],
    *,
    frozen_head: bool,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
) -> Float[Array, ""]:
    """Weighted sum of negative log-likelihoods, `sum_t w_t * -log p(target_t)`, f32; the caller divides once.

    Args:
        hidden_BTD: states after the final norm, in the compute dtype.
        head_VD: output projection.
        targets_BT: next token of each position; any value where the weight is 0.
        weights_BT: f32, 0 where nothing is learned.
        frozen_head: the head gets no gradient, and the states' gradient is computed in the forward pass.
        logit_scale: the model's factor on logits.
        logit_softcap: its bound on them.
    """
    labels_BT = jnp.where(weights_BT > 0, targets_BT, IGNORED)
    loss: Any = linear_cross_entropy(
        hidden_BTD,
        head_VD,
        labels_BT,
        weights=weights_BT,
        frozen_head=frozen_head,
        reduction="sum",
        chunk_tokens=CHUNK_TOKENS,
        group_tokens=CHUNK_TOKENS,
        ignore_index=IGNORED,
        scale=logit_scale,
        softcap=logit_softcap,
    )
    return loss
