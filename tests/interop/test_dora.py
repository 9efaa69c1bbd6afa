"""One DoRA layer against PEFT's: results, gradients, merged weights; with and without dropout, dense and NF4."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gymjax.adapters.dora import Dora
from gymjax.adapters.lora import Lora, LoraRow
from gymjax.optim.labels import Trained
from gymjax.quant.nf4 import quantize
from pallas_kernels.lora_linear.reference import drop
from pallas_kernels.nf4_linear import dequantize

pytestmark = pytest.mark.interop

ROWS, OUT, IN, RANK, ALPHA = 5, 24, 18, 3, 5.0
# f32 sums of some tens of products in another order, and a norm from three terms instead of from the sum's elements.
TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}
DROPOUT, KEY = 0.3, jax.random.key(4)


@pytest.fixture(scope="module")
def arrays():
    rng = np.random.default_rng(0)
    shapes = {"x": (2, ROWS, IN), "dy": (2, ROWS, OUT), "w": (OUT, IN), "bias": (OUT,), "a": (RANK, IN)}
    values = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    values["b"] = 0.3 * rng.normal(size=(OUT, RANK)).astype(np.float32)
    values["magnitude"] = np.linalg.norm(values["w"], axis=1) * np.exp(0.3 * rng.normal(size=OUT)).astype(np.float32)
    return values


def layer_of(arrays, w, dropout=0.0):
    lora = Lora(
        jnp.asarray(arrays["a"]),
        jnp.asarray(arrays["b"]),
        np.float32(ALPHA / RANK),
        dropout=dropout,
        rows=(LoraRow("0", None, RANK, ALPHA),),
    )
    return Dora(lora, w, stacked=False)


def by_name(grads):
    tree = nnx.to_pure_dict(grads)
    return {"da": tree["lora"]["a"], "db": tree["lora"]["b"], "dmagnitude": tree["magnitude"]}


def assert_close_gradient(ours, theirs):
    scale = np.abs(theirs).max()  # an element of a sum is as exact as the largest
    np.testing.assert_allclose(ours / scale, theirs / scale, **TOLERANCE)


@pytest.mark.parametrize("dropout", [0.0, DROPOUT])
@pytest.mark.parametrize("nf4", [False, True])
def test_layer_equals_pefts(nf4, dropout, arrays, torch_side, tmp_path):
    """Over NF4 PEFT gets what the packed weight stands for."""
    w = quantize(arrays["w"], dtype="float32") if nf4 else jnp.asarray(arrays["w"])
    given = arrays | {"w": np.asarray(dequantize(w)) if nf4 else arrays["w"]}
    if dropout:
        given["mask"] = np.asarray(drop(jnp.ones_like(given["x"]), dropout, KEY))
    np.savez(tmp_path / "given.npz", **given)
    torch_side.dora_layer(arrays=tmp_path / "given.npz", alpha=ALPHA, out=tmp_path / "theirs.npz")
    theirs = np.load(tmp_path / "theirs.npz")

    layer = layer_of(arrays, w, dropout)
    layer.magnitude.set_value(jnp.asarray(arrays["magnitude"]))
    graphdef, params, frozen = nnx.split(layer, Trained, ...)

    def forward(x, params):
        return nnx.merge(graphdef, params, frozen)(x, w, KEY) + arrays["bias"]

    y, pull_back = jax.vjp(forward, jnp.asarray(arrays["x"]), params)
    np.testing.assert_allclose(y, theirs["y"], **TOLERANCE)
    dx, grads = pull_back(jnp.asarray(arrays["dy"]))
    for name, grad in {"dx": dx, **by_name(grads)}.items():
        assert_close_gradient(grad, theirs[name])
    np.testing.assert_allclose(layer.effective(jnp.asarray(given["w"])), theirs["merged"], **TOLERANCE)


def test_first_magnitude_is_pefts(arrays, torch_side, tmp_path):
    np.savez(tmp_path / "given.npz", **arrays)
    torch_side.dora_layer(arrays=tmp_path / "given.npz", alpha=ALPHA, out=tmp_path / "theirs.npz")
    fresh = layer_of(arrays | {"b": np.zeros_like(arrays["b"])}, jnp.asarray(arrays["w"]))
    np.testing.assert_allclose(
        fresh.magnitude.get_value(), np.load(tmp_path / "theirs.npz")["first_magnitude"], rtol=1e-6
    )


def test_gradient_through_the_effective_weight_is_that_of_the_layer(arrays):
    """The head is applied inside the loss; its norm is a constant there too."""
    w = jnp.asarray(arrays["w"])
    graphdef, params, frozen = nnx.split(layer_of(arrays, w), Trained, ...)

    def gradient(effective):
        def loss(params):
            layer = nnx.merge(graphdef, params, frozen)
            y = arrays["x"] @ layer.effective(w).T if effective else layer(jnp.asarray(arrays["x"]), w, None)
            return jnp.sum(y * arrays["dy"])

        return by_name(jax.grad(loss)(params))

    wanted = gradient(False)
    for name, grad in gradient(True).items():
        assert_close_gradient(grad, wanted[name])
