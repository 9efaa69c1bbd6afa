"""The feed-forward block over long rows: chunk by chunk as all at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gymjax.nn import mlp


@pytest.mark.parametrize(("tokens", "chunk"), [(24, 8), (25, 7), (9, 5)])  # 25 tokens in four chunks of at most 8
@pytest.mark.parametrize("fused", [False, True])
def test_chunks_give_what_the_whole_gives(fused, tokens, chunk, monkeypatch):
    block = mlp.GatedMLP(6, 10, use_bias=True, fused=fused, dtype=jnp.float32)
    graphdef, state = nnx.split(block)
    rng = np.random.default_rng(0)
    state = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype), state)
    x, dy = (jnp.asarray(rng.normal(size=(2, tokens, 6)), jnp.float32) for _ in range(2))

    def run(state, x):
        out, pull_back = jax.vjp(lambda state, x: nnx.merge(graphdef, state)(x), state, x)
        return out, pull_back(dy)

    whole = run(state, x)
    monkeypatch.setattr(mlp, "CHUNK", 8)
    for ours, theirs in zip(jax.tree.leaves(jax.jit(run)(state, x)), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)  # f32 sums over rows in another order
    text = jax.jit(lambda x: nnx.merge(graphdef, state)(x)).lower(x).as_text()
    assert f"2x{chunk}x10" in text  # one chunk's activations
    assert f"2x{tokens}x10" not in text
