"""A layer's operations with kernels and without are the same function."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gymjax.losses.sft import sft_loss
from gymjax.nn.ops import layer_ops

DRAW = np.random.default_rng(0)


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(DRAW.standard_normal(shape), jnp.float32)


ANGLE = DRAW.uniform(-9, 9, (2, 5, 3))
OPERATIONS: dict[str, tuple[Callable, tuple]] = {
    "norm": (lambda ops, x, scale: ops.rms_norm(x, scale, eps=1e-5), (normal(2, 5, 8), normal(8))),
    "residual": (lambda ops, x, scale: ops.rms_norm_residual(x, scale, eps=1e-5), (normal(2, 5, 8), normal(8))),
    "rope": (
        lambda ops, q, k: ops.rope(q, k, jnp.cos(ANGLE).astype(jnp.float32), jnp.sin(ANGLE).astype(jnp.float32)),
        (normal(2, 5, 4, 8), normal(2, 5, 2, 8)),
    ),
    **{
        name: (lambda ops, gate, up, name=name: ops.swiglu(gate, up, activation=name), (normal(5, 16), normal(5, 16)))
        for name in ("silu", "gelu", "gelu_tanh")
    },
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_layer_ops_agree(name: str) -> None:
    function, args = OPERATIONS[name]
    results = []
    for fused in (True, False):
        out, pull_back = jax.vjp(lambda *args, fused=fused: function(layer_ops(fused), *args), *args)
        results.append((out, pull_back(jax.tree.map(jnp.ones_like, out))))
    # the same arithmetic in f32, in another order
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), *results)


@pytest.mark.parametrize("frozen", [True, False])
def test_losses_agree(frozen: bool) -> None:
    hidden, head, weights = normal(2, 7, 8), normal(19, 8), jnp.abs(normal(2, 7)).at[0, 2].set(0)
    targets = jnp.asarray(DRAW.integers(0, 19, (2, 7)), jnp.int32)
    options = {"frozen_head": frozen, "logit_scale": 0.5, "logit_softcap": 2.0}

    def loss(hidden: jax.Array, head: jax.Array, fused: bool) -> jax.Array:
        return sft_loss(hidden, head, targets, weights, fused_ops=fused, **options)

    one, other = (jax.jit(jax.value_and_grad(loss, (0, 1)), static_argnums=2)(hidden, head, f) for f in (True, False))
    # the same sums of up to 19 terms in f32, in another order
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), one, other)
