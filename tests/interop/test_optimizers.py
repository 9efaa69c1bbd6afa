"""8-bit AdamW against bitsandbytes'."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gymjax.config import OptimConfig
from gymjax.optim.adam8bit import Adam8bitState, scale_by_adam_8bit
from gymjax.optim.build import OPTIMIZERS
from gymjax.quant.blockwise import MAPS, Blockwise, dequantize

pytestmark = pytest.mark.interop

LR, DECAY, STEPS = 1e-2, 0.1, 5
LOOKUP = (
    2 / 65535
)  # bitsandbytes' CPU looks codes up in a table of 65,536 points; on GPUs and here they are the nearest


def inputs(shape):
    rng = np.random.default_rng(sum(shape))
    arrays = {"p": rng.normal(size=shape).astype(np.float32)}
    return arrays | {f"g{i}": rng.normal(size=shape).astype(np.float32) for i in range(STEPS)}


@pytest.mark.parametrize("shape", [(64, 256), (70, 99), (10, 10)], ids=["rows", "ragged", "small"])
def test_each_step_from_bitsandbytes_own_state(shape, torch_side, tmp_path):
    arrays = inputs(shape)
    np.savez(tmp_path / "in.npz", **arrays)
    torch_side.adamw_8bit(inputs=tmp_path / "in.npz", out=tmp_path / "out.npz", lr=LR, decay=DECAY, steps=STEPS)
    theirs = np.load(tmp_path / "out.npz")
    optim = OptimConfig(adam_beta1=0.9, adam_beta2=0.99, adam_epsilon=1e-8)
    optimizer = OPTIMIZERS["adamw_8bit"](optim, lambda step: LR, DECAY)
    params = jnp.asarray(arrays["p"])
    state = optimizer.init(params)
    for i in range(STEPS):
        updates, state = optimizer.update(jnp.asarray(arrays[f"g{i}"]), state, params)
        params = optax.apply_updates(params, updates)
        # The same f32 operations in another order.
        np.testing.assert_allclose(params, theirs[f"p{i}"], rtol=1e-5, atol=1e-6)
        adam = state[0]
        if isinstance(adam.mu, Blockwise):
            adam = their_state(theirs, i, adam)
        state = (adam, *state[1:])


def their_state(theirs, i, ours: Adam8bitState) -> Adam8bitState:
    """bitsandbytes' moments after step i, once ours are seen to be as near to what both stand for."""
    moments = []
    for number, moment in ((1, ours.mu), (2, ours.nu)):
        codes, absmax = theirs[f"state{number}_{i}"], theirs[f"absmax{number}_{i}"]
        np.testing.assert_allclose(np.asarray(moment.absmax).reshape(-1), absmax.reshape(-1), rtol=1e-5)
        other = Blockwise(jnp.asarray(codes), jnp.asarray(absmax.reshape(moment.absmax.shape)), moment.map)
        scale = float(absmax.max())
        difference = np.abs(np.asarray(dequantize(moment)) - np.asarray(dequantize(other)))
        # At a midpoint one code of the coarse end of the map, 0.9 / 64 or half that; elsewhere what the lookup costs.
        assert difference.max() <= scale * 0.9 / 32
        assert np.quantile(difference, 0.95) <= scale * 2 * LOOKUP
        moments.append(other)
    return Adam8bitState(ours.count, *moments)


def test_maps_have_the_same_bits(torch_side, tmp_path):
    np.savez(tmp_path / "in.npz", **inputs((8, 8)))
    torch_side.adamw_8bit(inputs=tmp_path / "in.npz", out=tmp_path / "out.npz", lr=LR, decay=DECAY, steps=1)
    theirs = np.load(tmp_path / "out.npz")
    for name, values in MAPS.items():
        assert theirs[name].tobytes() == values.tobytes()


def test_untouched_state_is_zero():
    state = scale_by_adam_8bit().init(jnp.zeros((64, 256)))
    assert not np.asarray(dequantize(state.mu)).any()
