"""Token-weighted next-token loss for supervised fine-tuning and continued pre-training."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.linear_cross_entropy import linear_cross_entropy
from pallas_kernels.nf4_linear import dense

IGNORED = -100
CHUNK_TOKENS = 1024  # about how many tokens' logits exist at a time
GROUP_TOKENS = 1024  # about how many tokens' gradients by the logits do


def sft_loss(
    hidden_BTD: Float[Array, "B T D"],
    head_VD: Float[Array, "V D"],
    targets_BT: Int[Array, "B T"],
    weights_BT: Float[Array, "B T"],
    *,
    frozen_head: bool,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    fused_ops: bool = True,
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
        fused_ops: chunk by chunk of tokens; False: the logits of all tokens at once, as plain jnp.
    """
    labels_BT = jnp.where(weights_BT > 0, targets_BT, IGNORED)
    if not fused_ops:
        head_VD = dense(head_VD, hidden_BTD.dtype)
        head_VD = jax.lax.stop_gradient(head_VD) if frozen_head else head_VD
        return jnp.sum(_plain_nll(hidden_BTD, head_VD, labels_BT, logit_scale, logit_softcap) * weights_BT)
    return linear_cross_entropy(
        hidden_BTD,
        head_VD,
        labels_BT,
        weights=weights_BT,
        frozen_head=frozen_head,
        reduction="sum",
        chunk_tokens=CHUNK_TOKENS,
        group_tokens=GROUP_TOKENS,
        ignore_index=IGNORED,
        scale=logit_scale,
        softcap=logit_softcap,
    )


def _plain_nll(hidden_BTD: Array, head_VD: Array, labels_BT: Array, scale: float, softcap: float | None) -> Array:
    logits_BTV = scale * jnp.einsum("BTD,VD->BTV", hidden_BTD, head_VD).astype(jnp.float32)
    logits_BTV = logits_BTV if softcap is None else softcap * jnp.tanh(logits_BTV / softcap)
    logprob_BTV = jax.nn.log_softmax(logits_BTV)
    ignored_BT = labels_BT == IGNORED
    picked_BT1 = jnp.take_along_axis(logprob_BTV, jnp.where(ignored_BT, 0, labels_BT)[..., None], axis=-1)
    return jnp.where(ignored_BT, 0, -picked_BT1[..., 0])
