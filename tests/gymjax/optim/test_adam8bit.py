"""8-bit AdamW against its equations in NumPy, over layers, small tensors and embeddings."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gymjax.optim import adam8bit
from gymjax.optim.adam8bit import scale_by_adam_8bit
from gymjax.quant.blockwise import MAPS, Blockwise

B1, B2, EPS = 0.9, 0.99, 1e-8
SHAPES = {"matrix": (32, 512), "ragged": (70, 99), "small": (10, 10), "embed": (64, 256)}
STACKED = {"a": (3, 16, 512), "b": (3, 300, 16)}


def params_of():
    return {name: jnp.zeros(shape) for name, shape in SHAPES.items()} | {
        "stacks": {name: jnp.zeros(shape) for name, shape in STACKED.items()}
    }


def gradients(step):
    rng = np.random.default_rng(step)
    return jax.tree.map(lambda p: rng.normal(size=p.shape).astype(np.float32), params_of())


def stored(x, kind):
    """A flat tensor in f64 after quantizing block by block."""
    blocks = np.zeros((-(-x.size // 256), 256))
    blocks.reshape(-1)[: x.size] = x
    largest = np.float32(np.abs(blocks).max(1, keepdims=True)).astype(np.float64)
    values = MAPS[kind].astype(np.float64)
    nearest = np.abs((blocks / np.where(largest > 0, largest, 1))[..., None] - values).argmin(-1)
    return (values[nearest] * largest).reshape(-1)[: x.size]


def oracle(steps, shape, tensors, kept):
    """Directions of the last step, f64; `kept`: moments are not quantized."""
    m = v = np.zeros((tensors, int(np.prod(shape)) // tensors))
    for t in range(1, len(steps) + 1):
        g = steps[t - 1].reshape(tensors, -1).astype(np.float64)
        m, v = B1 * m + (1 - B1) * g, B2 * v + (1 - B2) * g**2
        direction = (m / (1 - B1**t)) / (np.sqrt(v / (1 - B2**t)) + EPS)
        if not kept:
            m = np.stack([stored(row, "signed") for row in m])
            v = np.stack([stored(row, "unsigned") for row in v])
    return direction.reshape(shape)


@pytest.mark.parametrize("in_pieces", [False, True])
def test_directions_follow_the_equations(in_pieces, monkeypatch):
    if in_pieces:
        monkeypatch.setattr(adam8bit, "LARGEST", 0)
    optimizer = scale_by_adam_8bit(B1, B2, EPS)
    state, update, seen = optimizer.init(params_of()), jax.jit(optimizer.update), []
    for step in range(4):
        seen.append(gradients(step))
        found, state = update(seen[-1], state)
    flat = lambda tree: {k: v for k, v in tree.items() if k != "stacks"} | tree["stacks"]  # noqa: E731
    for name, direction in flat(found).items():
        shape, tensors = direction.shape, 3 if name in STACKED else 1
        expected = oracle([flat(grads)[name] for grads in seen], shape, tensors, name in ("small", "embed"))
        # Where f32 rounds a moment to the neighbouring code, which happens to few, the direction moves by that code.
        error = np.abs(np.asarray(direction) - expected)
        assert np.quantile(error, 0.99) < 1e-4, name
        assert error.max() < 0.2, name


def test_what_is_kept_in_8_bits():
    state = scale_by_adam_8bit().init(params_of())
    packed = {name for name, leaf in state.mu.items() if isinstance(leaf, Blockwise)}
    assert packed == {"matrix", "ragged"}  # not the embedding, nor a tensor of fewer than 4096 elements
    assert all(isinstance(leaf, Blockwise) for leaf in state.nu["stacks"].values())
    sizes = [leaf.nbytes for leaf in jax.tree.leaves((state.mu["matrix"], state.nu["matrix"]))]
    assert sum(sizes) == 2 * (32 * 512 + 4 * 64)  # a byte an element, an f32 in 256


def test_it_learns_as_adamw_does():
    target = jax.random.normal(jax.random.key(0), (64, 256))

    def run(optimizer):
        params = jnp.zeros_like(target)

        @jax.jit
        def step(params, state):
            updates, state = optimizer.update(params - target, state, params)
            return optax.apply_updates(params, updates), state

        state = optimizer.init(params)
        for _ in range(150):
            params, state = step(params, state)
        return float(jnp.mean((params - target) ** 2))

    quantized = run(optax.chain(scale_by_adam_8bit(), optax.scale_by_learning_rate(0.02)))
    exact = run(optax.adamw(0.02, weight_decay=0.0))
    assert quantized < 2 * exact + 1e-3
