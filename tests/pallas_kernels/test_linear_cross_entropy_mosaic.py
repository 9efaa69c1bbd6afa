"""The loss' Hopper kernel in the GPU interpreter, with race detection, against float64; and what lowers for the GPU.

Four warpgroups and rows of a thousand lines take the interpreter too long: small tiles give each warpgroup as many
pieces beyond its ring, and each block as many rows, as the kernel has to tell apart.
"""

from functools import partial

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _platform
from pallas_kernels.linear_cross_entropy import explain, linear_cross_entropy, mosaic_gpu, mosaic_gpu_passes, reference
from pallas_kernels.linear_cross_entropy.mosaic_gpu import LABEL, LOG2E, SUM, TOP, TOTAL, Form, Tiles

SMALL = Tiles(lines=4, slots=2, warpgroups=2, blocks=2)
PLAIN, ALL = Form(), Form(scale=0.5, softcap=2.0, smoothing=0.1, z_loss=0.01)

SIZES = {  # lines of a row: the rest alone, a rest that is no whole group, pieces beyond the rings, within them
    "rest": (4, SMALL),
    "odd rest": (7, SMALL),
    "many pieces": (31, SMALL),
    "a piece for one warpgroup alone": (9, SMALL),
    "kept whole": (18, Tiles(lines=4, slots=3, warpgroups=2, blocks=3)),
    "one warpgroup": (22, Tiles(lines=8, slots=1, warpgroups=1, blocks=1)),
}


def rows_of(vocabulary: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Products, labels and factors: random, ignored, equal, one huge logit that is or is not the label's, all low."""
    rng = np.random.default_rng(vocabulary)
    products = (3 * rng.standard_normal((6, vocabulary))).astype(np.float32)
    labels = rng.integers(0, vocabulary, 6).astype(np.int32)
    factor = rng.standard_normal(6).astype(np.float32)
    factor[1] = 0
    products[2] = -7.25
    products[3, vocabulary - 1] = 1e4
    products[4, labels[4]] = 90
    labels[3], labels[5] = 0, vocabulary - 1
    products[5] = -50
    return products, labels, factor


def oracle(products: np.ndarray, labels: np.ndarray, form: Form) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Log-sum-exp, mean logit, and gradient of the losses by the products over the scale, in float64."""
    z, slope = products.astype(np.float64) * form.scale, np.ones(products.shape)
    if form.softcap is not None:
        slope = 1 - np.tanh(z / form.softcap) ** 2
        z = form.softcap * np.tanh(z / form.softcap)
    top = z.max(-1, keepdims=True)
    lse = top + np.log(np.exp(z - top).sum(-1, keepdims=True))
    target = form.smoothing / z.shape[1] + (1 - form.smoothing) * np.eye(z.shape[1])[labels]
    return lse[:, 0], z.mean(-1), (np.exp(z - lse) * (1 + 2 * form.z_loss * lse) - target) * slope


@pytest.mark.parametrize("form", [PLAIN, ALL], ids=["plain", "options"])
@pytest.mark.parametrize("name", SIZES)
def test_interpreted_kernel(name: str, form: Form, capfd: pytest.CaptureFixture) -> None:
    lines, tiles = SIZES[name]
    products, labels, factor = rows_of(128 * lines)
    lse, mean, gradient = oracle(products, labels, form)
    want = gradient * factor[:, None]
    room = jnp.full((2, *products.shape), 3, jnp.bfloat16)
    arrays = jnp.asarray(products), jnp.asarray(labels), jnp.asarray(factor)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        told, filled = mosaic_gpu.statistics_and_gradient(*arrays, room, 1, form, tiles)
        again = mosaic_gpu.statistics(*arrays[:2], form, tiles)
        known = mosaic_gpu.gradient(*arrays, jnp.asarray(lse, jnp.float32), room, 1, form, tiles)
    assert "RACE" not in capfd.readouterr().out  # the interpreter goes on after it has said so
    np.testing.assert_array_equal(told, again)
    numbers = np.asarray(told, np.float64)
    scale = form.unit / LOG2E
    # f32 sums of exponentials of at most 1; tanh by an exponential is off by some 1e-7 of the bound
    np.testing.assert_allclose(numbers[TOP] * scale + np.log(numbers[TOTAL]), lse, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(told[LABEL], products[range(6), labels])
    if form.smoothing:
        np.testing.assert_allclose(numbers[SUM] * scale / products.shape[1], mean, rtol=1e-5, atol=1e-5)
    for got in (filled, known):
        # half a unit in bf16's last place is 2^-9 to 2^-8 of a value; f32's errors on terms of at most 1
        np.testing.assert_allclose(np.asarray(got[1], np.float64), want, rtol=2**-8, atol=3e-6)
        assert (np.asarray(got[0]) == 3).all()
        assert (np.asarray(got[1, 1]) == 0).all()


@pytest.mark.parametrize("options", [{}, {"softcap": 5.0, "scale": 0.5, "label_smoothing": 0.1, "z_loss": 0.01}])
@pytest.mark.parametrize(("frozen", "reduction"), [(True, "sum"), (False, "sum"), (False, "none")])
def test_passes_are_those_of_plain_jnp(
    frozen: bool, reduction: str, options: dict, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    """The whole loss with its gradients, by way of the interpreter: chunks, groups, weights, ignored and bad labels."""
    for name in ("statistics", "statistics_and_gradient", "gradient"):
        monkeypatch.setattr(mosaic_gpu, name, partial(getattr(mosaic_gpu, name), tiles=SMALL))
    monkeypatch.setattr(_platform, "why_not_hopper", lambda **_: None)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((2, 7, 16)), jnp.bfloat16)
    head = jnp.asarray(rng.standard_normal((640, 16)), jnp.bfloat16)
    weights = jnp.asarray(rng.random((2, 7)), jnp.float32)
    labels = rng.integers(0, 640, (2, 7)).astype(np.int32)
    labels[0, 1:4] = -100

    def loss(x: jax.Array, head: jax.Array, implementation: str) -> jax.Array:
        sizes = {"chunk_tokens": 4, "group_tokens": 8, "frozen_head": frozen, "reduction": reduction}
        return linear_cross_entropy(
            x, head, labels, weights=weights, implementation=implementation, **sizes, **options
        ).sum()

    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        got, want = (
            jax.value_and_grad(partial(loss, implementation=name), (0, 1))(x, head) for name in ("mosaic_gpu", "xla")
        )
    assert "RACE" not in capfd.readouterr().out
    np.testing.assert_allclose(got[0], want[0], rtol=1e-6)  # both sum in f32
    for ours, theirs in zip(got[1], want[1], strict=True):  # a bf16 gradient whose terms may round the other way
        np.testing.assert_allclose(ours.astype(jnp.float32), theirs.astype(jnp.float32), rtol=0.02, atol=0.01)
    assert (np.asarray(got[1][0], np.float32)[0, 1:4] == 0).all()


def test_a_label_outside_the_vocabulary_is_seen() -> None:
    how = reference.Settings(8, 8, -100, 1.0, None, 0.0, 0.0, False)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        outcome = mosaic_gpu_passes.PASSES.outcome(jnp.zeros((3, 512)), jnp.asarray([600, -100, 3]), how)
    np.testing.assert_array_equal(np.isnan(outcome.loss), [True, False, False])
    np.testing.assert_allclose(outcome.loss[1:], [0, np.log(512)], rtol=1e-6)


REFUSED = {
    "multiple of 128": ({"vocabulary": 1000}, PLAIN),
    "at least 512": ({"vocabulary": 384}, PLAIN),
    "bfloat16 or float16": ({"dtype": jnp.float32}, PLAIN),
    "scale must be above 0": ({}, Form(scale=-1.0)),
    "accuracy": ({"metrics": True}, PLAIN),
    "bias": ({"bias": True}, PLAIN),
    "2**31": ({"rows": 2**21}, PLAIN),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refusals_name_their_reason(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_platform, "compute_capability", lambda: (9, 0))
    monkeypatch.setattr(_platform, "miscompiles", lambda: None)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    call, form = REFUSED[reason]
    assert reason in str(mosaic_gpu.refuses(**{"vocabulary": 1024, "dtype": jnp.bfloat16, "form": form, **call}))
    for vocabulary in (128256, 151936, 32000, 262144, 49152, 200064):
        assert mosaic_gpu.refuses(vocabulary, jnp.bfloat16, ALL) is None
    assert explain() == "linear_cross_entropy: mosaic_gpu"
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    assert "one device" in str(mosaic_gpu.refuses(1024, jnp.bfloat16, PLAIN))


def test_everything_lowers_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiles of the GPU; and under vmap, where calls follow each other."""
    monkeypatch.setattr(_platform, "why_not_hopper", lambda **_: None)
    x, head, labels = (
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (((3, 2, 300, 64), jnp.bfloat16), ((151936, 64), jnp.bfloat16), ((3, 2, 300), jnp.int32))
    )

    def loss(x: jax.Array, head: jax.Array, labels: jax.Array, reduction: str) -> jax.Array:
        return linear_cross_entropy(x, head, labels, reduction=reduction, implementation="mosaic_gpu").sum()

    for reduction in ("sum", "none"):
        step = jax.jit(jax.vmap(jax.grad(partial(loss, reduction=reduction), (0, 1)), (0, None, 0)))
        assert "mosaic_gpu" in step.trace(x, head, labels).lower(lowering_platforms=("cuda",)).as_text()
