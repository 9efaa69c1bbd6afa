"""The summed loss against log_softmax in float64."""

import jax
import jax.numpy as jnp
import numpy as np

from gymjax.losses.sft import sft_loss


def test_weighted_sum_and_gradient():
    rng = np.random.default_rng(0)
    hidden, head = rng.normal(size=(2, 5, 8)), rng.normal(size=(13, 8))
    targets, weights = rng.integers(0, 13, (2, 5)), rng.choice([0.0, 0.5, 1.0], (2, 5))
    logits = hidden @ head.T
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    expected = -(np.log(np.take_along_axis(p, targets[..., None], -1))[..., 0] * weights).sum()
    dhidden = (p - np.eye(13)[targets]) * weights[..., None] @ head

    def loss(hidden, frozen):
        return sft_loss(hidden, jnp.asarray(head, jnp.float32), targets, jnp.asarray(weights), frozen_head=frozen)

    for frozen in (True, False):
        value, grad = jax.value_and_grad(loss)(jnp.asarray(hidden, jnp.float32), frozen)
        np.testing.assert_allclose(value, expected, rtol=1e-5)  # f32 against f64
        np.testing.assert_allclose(grad, dhidden, atol=1e-5)
