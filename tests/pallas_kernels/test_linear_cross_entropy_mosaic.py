"""The loss by the kernel that gives exponentials or their codes, in the GPU interpreter, against float64."""

from collections.abc import Callable
from functools import partial

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _platform
from pallas_kernels._tiles import Tiles
from pallas_kernels.linear_cross_entropy import (
    explain,
    linear_cross_entropy,
    mosaic_gpu,
    reference,
    stores_exponentials,
)
from pallas_kernels.linear_cross_entropy.mosaic_gpu_codes import LEAST, ONE, STEPS, gradients
from pallas_kernels.linear_cross_entropy.mosaic_gpu_exponentials import exponentials

IGNORED = -100
SMALL = Tiles(stages=2, blocks=2)  # blocks with several tiles, slots that are used again
SIZES = {  # rows, width, vocabulary: ragged rows, a last tile that reaches beyond the vocabulary by 64 to 192
    "one tile": ((70, 64, 256), SMALL),
    "two columns": ((70, 64, 448), SMALL),
    "several rows of tiles": ((300, 192, 576), Tiles(stages=2, blocks=2, band=2)),
    "pair": ((300, 128, 640), Tiles(stages=2, blocks=4, pair=True)),
}


@pytest.mark.parametrize("name", SIZES)
def test_interpreted_kernel(name: str, capfd: pytest.CaptureFixture) -> None:
    (rows, width, vocabulary), tiles = SIZES[name]
    rng = np.random.default_rng(rows)
    x = jnp.asarray(rng.standard_normal((rows, width)), jnp.bfloat16)
    head = jnp.asarray(rng.standard_normal((vocabulary, width)) * width**-0.5, jnp.bfloat16)
    top = rng.standard_normal(rows).astype(np.float32)
    top[3] = -60.0  # large exponentials, small ones
    top[4] = 60.0
    labels = rng.integers(0, vocabulary, rows).astype(np.int32)
    labels[:4] = IGNORED, vocabulary, 0, vocabulary - 1
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        got = exponentials(x, head, labels, jnp.asarray(top), scale=0.5, tiles=tiles)
        powers, total, label_product = (np.asarray(one, np.float64) for one in got)
    assert "RACE" not in capfd.readouterr().out  # the interpreter goes on after it has said so
    products = np.asarray(x, np.float64) @ np.asarray(head, np.float64).T
    want = np.exp(0.5 * products) * 2.0 ** -top[:, None].astype(np.float64)
    picked = np.zeros(rows)
    inside = np.flatnonzero((labels >= 0) & (labels < vocabulary))
    picked[inside] = products[inside, labels[inside]]
    want[inside, labels[inside]] = 0
    # bf16 rounds by 2^-9 of 1 to 2; f32 exponents of about 60 are off by 4e-6, their powers by as much of themselves
    np.testing.assert_allclose(powers[:rows], want, rtol=2**-8)
    np.testing.assert_allclose(total, want.sum(1), rtol=1e-5)
    np.testing.assert_allclose(label_product, picked, rtol=1e-6, atol=1e-6)


def test_interpreted_codes(capfd: pytest.CaptureFixture) -> None:
    """Codes of the product: those of exponentials from 2**-90 to 2**50."""
    rng = np.random.default_rng(1)
    x, head = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((70, 64), (448, 64)))
    labels = np.zeros(70, np.int32)
    top = jnp.asarray(rng.uniform(-30, 60, 70), jnp.float32)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        codes, _, _ = exponentials(x, head, labels, top, scale=0.5, coded=True, tiles=SMALL)
        codes = np.asarray(codes)
    assert "RACE" not in capfd.readouterr().out
    octaves = 0.5 * np.log2(np.e) * (np.asarray(x, np.float64) @ np.asarray(head, np.float64).T)
    steps = (octaves - np.asarray(top, np.float64)[:, None]) * STEPS + ONE
    np.testing.assert_allclose(codes[:70], np.maximum(steps, LEAST), atol=0.52)  # f32 has steps of 2**-9 there
    assert (codes[:70] == LEAST).any()


def test_interpreted_gradients(capfd: pytest.CaptureFixture) -> None:
    """Every code, in rows that pieces share; labels at both ends, none, and rows that only fill the tiles up."""
    rng = np.random.default_rng(2)
    codes = rng.permutation(np.arange(64 * 1088) % 2**16 + LEAST).astype(np.int16).reshape(64, 1088)
    labels = rng.integers(0, 1088, 50).astype(np.int32)
    labels[:4] = IGNORED, 1088, 0, 1087
    of_all, of_label = (rng.standard_normal(50).astype(np.float32) for _ in range(2))
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        got = np.asarray(jax.jit(partial(gradients, piece=1024))(codes, labels, of_all, of_label), np.float64)
    assert "RACE" not in capfd.readouterr().out
    powers = np.where(codes == LEAST, 0, 2.0 ** ((codes.astype(np.float64) - ONE) / STEPS))
    want = powers[:50] * of_all[:, None]
    inside = np.flatnonzero((labels >= 0) & (labels < 1088))
    want[inside, labels[inside]] = of_label[inside]
    np.testing.assert_allclose(got[:50], want, rtol=2**-8)  # bf16's rounding, of values that f32 has to 5e-6
    assert not got[50:].any()


def test_codes_of_other_shapes_are_refused() -> None:
    row = jnp.zeros(8)
    for shape in ((8, 512), (8, 4100)):
        with pytest.raises(ValueError, match="must be a multiple of 4096, of wide rows"):
            gradients(jnp.zeros(shape, jnp.int16), jnp.zeros(8, jnp.int32), row, row)


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mosaic_gpu, "gradients", partial(gradients, piece=1024))
    monkeypatch.setattr(mosaic_gpu, "PIECE", 1024)
    monkeypatch.setattr(mosaic_gpu, "exponentials", partial(exponentials, tiles=SMALL))
    monkeypatch.setattr(_platform, "why_not_hopper", lambda **_: None)


def rows_of(kind: str, vocabulary: int = 512) -> tuple[jax.Array, jax.Array, np.ndarray]:
    """Hidden states (2, 67, 64), a head (vocabulary, 64) and labels, some of them ignored."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((2, 67, 64)).astype(np.float32)
    head = (rng.standard_normal((vocabulary, 64)) / 8).astype(np.float32)
    labels = rng.integers(0, vocabulary, (2, 67)).astype(np.int32)
    labels[:, ::5] = IGNORED
    if kind == "equal logits":
        head[:] = head[0]
    if kind == "all ignored":
        labels[:] = IGNORED
    if kind in ("sure of the label", "one huge logit", "too large"):  # by 30 to 60 nats, or 300
        x[..., :16] += 2
        head[7, :16] = (10 if kind == "too large" else 1) * (1 + 0.3 * rng.random(16))
        if kind == "sure of the label":
            labels[labels != IGNORED] = 7
        else:
            labels[labels == 7] = 8  # the sample has not every row of the head
    return jnp.asarray(x, jnp.bfloat16), jnp.asarray(head, jnp.bfloat16), labels


def oracle(x: jax.Array, head: jax.Array, labels: np.ndarray, weights: np.ndarray, z_loss: float):
    """Weighted sum of the losses and its gradients by x and head, in float64."""
    x64, head64 = np.asarray(x, np.float64), np.asarray(head, np.float64)
    z, kept = x64 @ head64.T, labels != IGNORED
    top = z.max(-1, keepdims=True)
    lse = (top + np.log(np.exp(z - top).sum(-1, keepdims=True)))[..., 0]
    picked = np.maximum(labels, 0)
    others = np.exp(z - lse[..., None])
    np.put_along_axis(others, picked[..., None], 0, -1)
    loss = lse - np.take_along_axis(z, picked[..., None], -1)[..., 0]
    factor = np.where(kept, weights, 0)[..., None]
    more, other = 2 * z_loss * lse[..., None], others.sum(-1, keepdims=True)
    dlogits = (1 + more) * others
    np.put_along_axis(dlogits, picked[..., None], more * (1 - other) - other, -1)
    dlogits *= factor
    return ((loss + z_loss * lse**2) * factor[..., 0]).sum(), dlogits @ head64, np.einsum("btv,btd->vd", dlogits, x64)


def dense(x: jax.Array, head: jax.Array, labels: np.ndarray, weights: jax.Array, z_loss: float) -> jax.Array:
    logits = jnp.einsum("btd,vd->btv", x, head).astype(jnp.float32)
    lse = jax.nn.logsumexp(logits, axis=-1)
    picked = jnp.take_along_axis(logits, np.maximum(labels, 0)[..., None], -1)[..., 0]
    return jnp.where(labels == IGNORED, 0, weights * (lse - picked + z_loss * lse**2)).sum()


@pytest.mark.parametrize(
    ("kind", "z_loss", "form"),
    [
        ("random", 0.01, "frozen"),
        ("random", 0.01, "trained"),
        ("random", 0.01, "kept"),
        ("random", 0.01, "kept by token"),
        ("equal logits", 0.0, "frozen"),
        ("all ignored", 0.01, "frozen"),
        ("all ignored", 0.01, "trained"),
        ("all ignored", 0.01, "kept"),
        ("sure of the label", 0.0, "frozen"),
        ("sure of the label", 0.0, "trained"),
        ("sure of the label", 0.0, "kept"),
        ("one huge logit", 0.0, "frozen"),
        ("one huge logit", 0.0, "trained"),
        ("too large", 0.0, "frozen"),
        ("too large", 0.0, "trained"),
        ("too large", 0.01, "kept"),
        ("too large", 0.0, "kept by token"),
    ],
)
def test_loss_and_gradients(
    kind: str, z_loss: float, form: str, on_hopper: None, relative_error: Callable, capfd: pytest.CaptureFixture
) -> None:
    """In chunks of 80 tokens, and what is left, or of few tokens with all codes kept; within the bars of dense bf16."""
    trained, kept = form != "frozen", form.startswith("kept")
    x, head, labels = rows_of(kind, 1024 if trained else 512)
    x, labels = (x[:, :61], labels[:, :61]) if kept else (x, labels)
    assert mosaic_gpu.keeps_codes(labels.size, head) == kept
    weights = jnp.asarray(np.random.default_rng(6).random(labels.shape), jnp.float32)
    sizes = {"chunk_tokens": 20, "group_tokens": 40} if trained else {"chunk_tokens": 40}
    shared = {"implementation": "mosaic_gpu", "z_loss": z_loss, "frozen_head": not trained}

    def ours(x: jax.Array, head: jax.Array) -> jax.Array:
        if form == "kept by token":
            return jnp.sum(linear_cross_entropy(x, head, labels, **sizes, **shared) * weights)
        return linear_cross_entropy(x, head, labels, weights=weights, reduction="sum", **sizes, **shared)

    wrt = (0, 1) if trained else (0,)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        loss, grads = jax.block_until_ready(jax.value_and_grad(ours, wrt)(x, head))
    assert "RACE" not in capfd.readouterr().out
    truth, *true_grads = oracle(x, head, labels, np.asarray(weights, np.float64), z_loss)
    assert not np.asarray(grads[0], np.float32)[labels == IGNORED].any()
    if kind == "all ignored":
        assert loss == 0
        assert not any(np.asarray(grad, np.float32).any() for grad in grads)
        return
    assert abs(float(loss) - truth) <= 1e-6 * max(truth, 1)
    dense_grads = jax.grad(dense, wrt)(x, head, labels, weights, z_loss)
    for got, theirs, exact in zip(grads, dense_grads, true_grads, strict=False):
        if kind == "equal logits":  # of equal rows of the head, whose gradients add up to nothing
            assert np.linalg.norm(np.asarray(got, np.float64)) <= 1e-6
        else:
            assert relative_error(got, exact) <= 1.05 * relative_error(theirs, exact)


@pytest.mark.parametrize("kind", ["random", "all ignored", "sure of the label", "one huge logit", "too large"])
def test_loss_alone(kind: str, on_hopper: None, capfd: pytest.CaptureFixture) -> None:
    """Without gradients; in chunks of 80 tokens and what is left."""
    x, head, labels = rows_of(kind)
    loss = partial(linear_cross_entropy, z_loss=0.01, frozen_head=True, chunk_tokens=40, implementation="mosaic_gpu")
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        by_token = np.asarray(loss(x, head, labels))
    assert "RACE" not in capfd.readouterr().out
    truth = oracle(x, head, labels, np.ones(labels.shape), 0.01)[0]
    assert abs(by_token.sum() - truth) <= 1e-6 * max(truth, 1)
    assert not by_token[labels == IGNORED].any()


@pytest.mark.parametrize("kind", ["one huge logit", "too large"])
def test_only_a_row_out_of_range_is_computed_again(kind: str, on_hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    x, head, labels = rows_of(kind)
    monkeypatch.setattr(mosaic_gpu, "forward_and_gradients", _nothing)
    how = reference.Settings(200, 200, IGNORED, 1.0, None, 0.0, 0.0, False, "mosaic_gpu")
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        outcome, _ = mosaic_gpu.loss_and_gradients(x, reference.Head(head, None), labels, None, how, trained=False)
    assert np.isnan(outcome.loss).all() == (kind == "too large")


def _nothing(x: jax.Array, head: reference.Head, labels: np.ndarray, *_, **__):
    nothing = jnp.full(labels.shape, jnp.nan, jnp.float32)
    return reference.Outcome(nothing, nothing, None, None), reference.Gradients(x, None, None)


REFUSED = {
    "without softcap, bias": {"softcap": True, "bias": True, "metrics": False},
    "scale must be above 0, and is -1.0": {"scale": -1.0},
    "at least 4096, and is 512": {"trained": True},
    "at most 2 * D tokens": {"vocabulary": 4096, "trained": True, "late_weights": True},
    "needs bfloat16, and x is float16": {"dtype": jnp.dtype(jnp.float16)},
    "multiples of 64, and are 48 and 512": {"width": 48},
    "multiples of 64, and are 64 and 500": {"vocabulary": 500},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refusals_name_their_reason(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_platform, "compute_capability", lambda: (9, 0))
    monkeypatch.setattr(_platform, "miscompiles", lambda: None)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    plain = {"width": 64, "vocabulary": 512, "dtype": jnp.bfloat16, "trained": False}
    assert reason in str(mosaic_gpu.refuses(**{**plain, **REFUSED[reason]}))
    for vocabulary in (128256, 151936, 32000, 32064, 262144, 49152, 200064):
        assert mosaic_gpu.refuses(64, vocabulary, jnp.bfloat16, trained=True) is None
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    assert "one device" in str(mosaic_gpu.refuses(**plain))


def test_what_is_asked_for_and_refused_names_it(on_hopper: None) -> None:
    x, head = jnp.zeros((1, 8, 64), jnp.bfloat16), jnp.zeros((1024, 64), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="plain logits, without softcap, label_smoothing; usable here: 'xla'"):
        linear_cross_entropy(
            x, head, np.zeros((1, 8), np.int32), softcap=30.0, label_smoothing=0.1, implementation="mosaic_gpu"
        )


def test_it_is_the_default_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many tokens' weights known in the backward pass a trained head goes over logits."""
    assert explain().startswith("linear_cross_entropy: xla (mosaic_gpu refuses: ")
    assert not stores_exponentials(4096, 128256, jnp.bfloat16, trained=False)
    monkeypatch.setattr(_platform, "why_not_hopper", lambda **_: None)
    assert explain() == "linear_cross_entropy: mosaic_gpu"
    assert explain(width=48).startswith("linear_cross_entropy: xla (mosaic_gpu refuses: width and vocabulary must")
    for dtype, softcap, stored in ((jnp.bfloat16, None, True), (jnp.bfloat16, 30.0, False), (jnp.float32, None, False)):
        assert stores_exponentials(4096, 128256, dtype, trained=True, softcap=softcap) == stored
    x, labels = jax.ShapeDtypeStruct((2, 65, 64), jnp.bfloat16), jax.ShapeDtypeStruct((2, 65), jnp.int32)
    head = jax.ShapeDtypeStruct((4096, 64), jnp.bfloat16)
    for frozen, reduction, kernels in ((True, "sum", True), (True, "none", True), (False, "none", False)):

        def loss(x, head, labels, frozen=frozen, reduction=reduction):
            return linear_cross_entropy(x, head, labels, frozen_head=frozen, reduction=reduction).sum()

        for run in (loss, jax.grad(loss)):
            text = jax.jit(run).trace(x, head, labels).lower(lowering_platforms=("cuda",)).as_text()
            assert ("mosaic_gpu" in text) == kernels


def test_everything_lowers_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also under vmap, where calls follow each other."""
    monkeypatch.setattr(_platform, "why_not_hopper", lambda **_: None)
    x, head, labels = (
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (((3, 2, 300, 64), jnp.bfloat16), ((151936, 64), jnp.bfloat16), ((3, 2, 300), jnp.int32))
    )

    def loss(x: jax.Array, head: jax.Array, labels: jax.Array, frozen: bool) -> jax.Array:
        options = {"frozen_head": frozen, "reduction": "sum", "implementation": "mosaic_gpu"}
        return linear_cross_entropy(x, head, labels, **options)

    for frozen in (True, False):
        step = jax.jit(jax.vmap(jax.grad(partial(loss, frozen=frozen), (0, 1)), (0, None, 0)))
        assert "mosaic_gpu" in step.trace(x, head, labels).lower(lowering_platforms=("cuda",)).as_text()
