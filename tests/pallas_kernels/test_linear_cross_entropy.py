"""Linear cross-entropy against float64: values, gradients, memory, transformations and sharding."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.linear_cross_entropy import linear_cross_entropy, logprob, pack_int8, reference
from pallas_kernels.nf4_linear import dequantize
from pallas_kernels.nf4_linear.cases import random_weight

IGNORED = -100


def oracle(
    x: jax.Array,
    head: jax.Array,
    labels: np.ndarray,
    dloss: jax.Array,
    *,
    bias: jax.Array | float = 0.0,
    scale: float = 1.0,
    softcap: float = np.inf,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[np.ndarray, tuple]:
    """Return the losses and the gradients of x, head and bias in float64, from the whole logits."""
    x, head, dloss, bias = (np.asarray(a, np.float64) for a in (x, head, dloss, bias))
    logits = scale * (x @ head.T + bias)
    slope = np.full(logits.shape, scale)
    if softcap < np.inf:
        slope /= np.cosh(logits / softcap) ** 2
        logits = softcap * np.tanh(logits / softcap)
    top = logits.max(-1, keepdims=True)
    lse = top + np.log(np.exp(logits - top).sum(-1, keepdims=True))
    logprobs = logits - lse
    kept = labels != IGNORED
    target = (1 - label_smoothing) * np.eye(head.shape[0])[np.where(kept, labels, 0)] + label_smoothing / head.shape[0]
    dlogits = (1 + 2 * z_loss * lse) * np.exp(logprobs) - target
    dlogits *= np.where(kept, dloss, 0)[..., None] * slope
    flat = dlogits.reshape(-1, head.shape[0])
    loss = z_loss * lse[..., 0] ** 2 - (logprobs * target).sum(-1)
    return np.where(kept, loss, 0), (dlogits @ head, flat.T @ x.reshape(-1, head.shape[1]), flat.sum(0))


def random_labels(shape: tuple[int, ...], vocabulary: int) -> np.ndarray:
    rng = np.random.default_rng(1)
    labels = rng.integers(0, vocabulary, shape, dtype=np.int32)
    return np.where(rng.random(shape) < 0.25, np.int32(IGNORED), labels)


SHAPES = [  # leading axes and T, chunk_tokens: one token, no remainder, remainders, chunk beyond T, chunk below B
    ((1,), 2048),
    ((2, 16), 8),
    ((2, 127), 64),
    ((129,), 10),
    ((3, 5), 2048),
    ((2, 2, 3), 1),
]


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize(("shape", "chunk"), SHAPES)
def test_f32_matches_float64(
    shape: tuple[int, ...], chunk: int, frozen: bool, normal: Callable, out_and_grads: Callable
) -> None:
    x, head, dloss = normal(0, (*shape, 12), (33, 12), shape)
    labels = random_labels(shape, 33)
    function = partial(linear_cross_entropy, labels=labels, frozen_head=frozen, chunk_tokens=chunk)
    loss, (dx, dhead) = out_and_grads(function, (x, head), dloss)
    want_loss, (want_dx, want_dhead, _) = oracle(x, head, labels, dloss)
    # f32 has 24 bits; sums of up to 129 terms of size 1 to 10
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dx, want_dx, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dhead, 0 * want_dhead if frozen else want_dhead, rtol=1e-5, atol=1e-5)
    ignored = labels == IGNORED
    assert (np.asarray(loss)[ignored] == 0).all()
    assert (np.asarray(dx)[ignored] == 0).all()


OPTIONS = [
    {"bias": True},
    {"scale": 0.25},
    {"softcap": 2.0},
    {"label_smoothing": 0.2},
    {"z_loss": 0.05},
    {"bias": True, "scale": 0.5, "softcap": 1.5, "label_smoothing": 0.1, "z_loss": 0.01},
]


@pytest.mark.parametrize(("frozen", "reduction"), [(True, "none"), (False, "none"), (False, "sum")])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_match_float64(
    options: dict, frozen: bool, reduction: str, normal: Callable, out_and_grads: Callable
) -> None:
    x, head, bias, weights = normal(8, (2, 11, 12), (33, 12), (33,), (2, 11))
    labels = random_labels((2, 11), 33)
    known = {name: value for name, value in options.items() if name != "bias"}
    shared = {"weights": weights, "frozen_head": frozen, "chunk_tokens": 4, "group_tokens": 10, "reduction": reduction}

    def function(x: jax.Array, head: jax.Array, bias: jax.Array) -> jax.Array:
        added = bias if "bias" in options else None
        return linear_cross_entropy(x, head, labels, bias=added, **shared, **known)

    dloss = jnp.float32(0.7) if reduction == "sum" else normal(9, (2, 11))[0]
    loss, (dx, dhead, dbias) = out_and_grads(function, (x, head, bias), dloss)
    added = bias if "bias" in options else 0.0
    want, (want_dx, want_dhead, want_dbias) = oracle(x, head, labels, dloss * weights, bias=added, **known)
    want = want * np.asarray(weights, np.float64)
    if frozen:
        want_dhead, want_dbias = 0 * want_dhead, 0 * want_dbias
    # f32 has 24 bits; sums of up to 33 terms of size 1 to 10
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    close(loss, want.sum() if reduction == "sum" else want)
    close(dx, want_dx)
    close(dhead, want_dhead)
    close(dbias, want_dbias if "bias" in options else 0 * want_dbias)


@pytest.mark.parametrize("frozen", [True, False])
def test_a_sum_is_that_of_the_tokens(frozen: bool, normal: Callable) -> None:
    x, head, weights = normal(10, (3, 37, 8), (19, 8), (3, 37))
    labels = random_labels((3, 37), 19)

    def loss(x: jax.Array, head: jax.Array, **options) -> jax.Array:
        shared = {"weights": weights, "frozen_head": frozen, "chunk_tokens": 6}
        return linear_cross_entropy(x, head, labels, **shared, **options).sum()

    one, other = (
        jax.jit(jax.value_and_grad(partial(loss, **options), (0, 1)))(x, head)
        for options in ({"reduction": "sum", "group_tokens": 24}, {})
    )
    # the same sums in another order: f32 rounding only
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), one, other)


def test_metrics_and_logprob(normal: Callable) -> None:
    x, head = normal(11, (2, 7, 12), (33, 12))
    labels = random_labels((2, 7), 33)
    labels[0, :3] = np.argmax(np.asarray(x) @ np.asarray(head).T, -1)[0, :3]
    loss, found = jax.jit(partial(linear_cross_entropy, metrics=True, chunk_tokens=4))(x, head, labels)
    logits = np.asarray(x, np.float64) @ np.asarray(head, np.float64).T
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    np.testing.assert_array_equal(found.correct, logits.argmax(-1) == labels)
    assert found.correct[0, :3].all()
    # f32 has 24 bits; sums of 33 terms of size below 10
    np.testing.assert_allclose(found.entropy, -(np.exp(logprobs) * logprobs).sum(-1), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(loss, linear_cross_entropy(x, head, labels, chunk_tokens=4))
    np.testing.assert_array_equal(logprob(x, head, labels, chunk_tokens=4), -loss)
    hotter = logprob(x, head, labels, scale=0.5, frozen_head=True)
    halved = logits / 2
    want = np.take_along_axis(halved - np.log(np.exp(halved).sum(-1, keepdims=True)), labels.clip(0)[..., None], -1)
    np.testing.assert_allclose(hotter, np.where(labels == IGNORED, 0, want[..., 0]), rtol=1e-5, atol=1e-5)
    with pytest.raises(TypeError, match="reduction, z_loss belong to linear_cross_entropy"):
        logprob(x, head, labels, reduction="sum", z_loss=0.1)


@pytest.mark.parametrize("reduction", ["none", "sum"])
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("kind", ["huge", "equal", "ignored"])
def test_extreme_logits(kind: str, frozen: bool, reduction: str, normal: Callable) -> None:
    vocabulary, shape = 257, (2, 5)
    x, head = normal(12, (*shape, 12), (vocabulary, 12))
    labels = np.random.default_rng(2).integers(0, vocabulary, shape, dtype=np.int32)
    if kind == "huge":  # one logit above all others by thousands: the label's, or another's
        head = head.at[7].set(1e3 * x[0, 0])
        labels[0, 0], labels[0, 1] = 7, 8
    elif kind == "equal":
        head = jnp.broadcast_to(head[:1], head.shape)
    else:
        labels[:] = IGNORED
    function = partial(
        linear_cross_entropy, labels=labels, frozen_head=frozen, chunk_tokens=4, metrics=True, reduction=reduction
    )
    ones = jnp.float32(1) if reduction == "sum" else jnp.ones(shape)
    _, pull_back, found = jax.vjp(lambda x, head: function(x, head), x, head, has_aux=True)
    loss = function(x, head)[0]
    dx, dhead = pull_back(ones)
    want, (want_dx, want_dhead, _) = oracle(x, head, labels, np.ones(shape))
    want = want.sum() if reduction == "sum" else want
    # relative to the size of the logits: f32 rounds z itself, and the loss is a difference of such
    size = np.abs(np.asarray(x, np.float64) @ np.asarray(head, np.float64).T).max()
    np.testing.assert_allclose(loss, want, rtol=1e-6, atol=4e-7 * size)
    np.testing.assert_allclose(dx, want_dx, rtol=1e-4, atol=1e-6 * size)
    np.testing.assert_allclose(dhead, 0 * want_dhead if frozen else want_dhead, rtol=1e-4, atol=1e-6 * size)
    assert np.isfinite(found.entropy).all()
    if kind == "equal":
        np.testing.assert_allclose(found.entropy, np.log(vocabulary), rtol=1e-6)
    if kind == "ignored":
        assert not any(np.any(array) for array in (loss, dx, dhead))


def test_one_pass_logsumexp() -> None:
    logits = np.random.default_rng(3).standard_normal((3, 501)).astype(np.float32) * 4
    logits[0, 5], logits[1] = 1e30, -1e30
    top = logits.max(-1).astype(np.float64)
    want = top + np.log(np.exp(logits - top[:, None]).sum(-1))
    # the CPU adds 501 terms one by one, each rounded to 24 bits
    np.testing.assert_allclose(reference.one_pass_lse(jnp.asarray(logits)), want, rtol=1e-5)
    text = jax.jit(partial(linear_cross_entropy, frozen_head=True)).trace(
        jnp.zeros((1, 4, 8)), jnp.zeros((16, 8)), jnp.zeros((1, 4), jnp.int32)
    )
    assert text.lower(lowering_platforms=("cuda",)).as_text().count("stablehlo.reduce(") == 1


def test_loss_and_gradients_are_within_their_bars(normal: Callable, relative_error: Callable) -> None:
    (x,) = normal(13, (1, 64, 256), dtype=jnp.bfloat16)
    (head,) = normal(14, (4099, 256), dtype=jnp.bfloat16)
    head *= jnp.bfloat16(1 / 16)
    labels = random_labels((1, 64), 4099)

    def dense(x: jax.Array, head: jax.Array) -> jax.Array:
        logits = jnp.einsum("btd,vd->btv", x, head).astype(jnp.float32)
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), np.maximum(labels, 0)[..., None], -1)[..., 0]
        return jnp.where(labels == IGNORED, 0, -picked).sum()

    loss, grads = jax.jit(
        jax.value_and_grad(partial(linear_cross_entropy, labels=labels, chunk_tokens=16, reduction="sum"), (0, 1))
    )(x, head)
    truth, true_grads = oracle(x, head, labels, np.ones((1, 64)))
    assert abs(loss / truth.sum() - 1) <= 1e-6
    dense_grads = jax.jit(jax.grad(dense, (0, 1)))(x, head)
    for ours, theirs, exact in zip(grads, dense_grads, true_grads, strict=False):
        assert relative_error(ours, exact) <= 1.05 * relative_error(theirs, exact)


@pytest.mark.parametrize("frozen", [True, False])
def test_bf16_is_as_exact_as_dense_bf16(
    frozen: bool, normal: Callable, out_and_grads: Callable, no_worse_than_dense: Callable
) -> None:
    (x,) = normal(2, (2, 129, 32), dtype=jnp.bfloat16)
    head, dloss = normal(3, (257, 32), (2, 129))
    head = head.astype(jnp.bfloat16)
    labels = random_labels((2, 129), 257)

    def dense(x: jax.Array, head: jax.Array) -> jax.Array:
        logits = jnp.einsum("btd,vd->btv", x, head).astype(jnp.float32)
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), np.maximum(labels, 0)[..., None], -1)[..., 0]
        return jnp.where(labels == IGNORED, 0, -picked)

    function = partial(linear_cross_entropy, labels=labels, frozen_head=frozen, chunk_tokens=64)
    loss, grads = out_and_grads(function, (x, head), dloss)
    assert loss.dtype == jnp.float32
    assert [grad.dtype for grad in grads] == [jnp.bfloat16, jnp.bfloat16]
    dense_loss, dense_grads = out_and_grads(dense, (x, head), dloss)
    truth, true_grads = oracle(x, head, labels, dloss)
    compared = slice(0, 1 if frozen else 2)
    no_worse_than_dense((loss, grads[compared]), (dense_loss, dense_grads[compared]), (truth, true_grads[compared]))


def test_head_gradient_does_not_lose_precision_over_chunks(normal: Callable, relative_error: Callable) -> None:
    x, head = normal(4, (1, 512, 16), (40, 16))
    x, labels = x.astype(jnp.bfloat16), random_labels((1, 512), 40)

    def dhead(chunk: int) -> jax.Array:
        return jax.jit(jax.grad(lambda h: linear_cross_entropy(x, h, labels, chunk_tokens=chunk).sum()))(head)

    truth = oracle(x, head.astype(jnp.bfloat16), labels, np.ones((1, 512)))[1][1]
    one, many = relative_error(dhead(512), truth), relative_error(dhead(4), truth)
    assert many <= 1.05 * one  # 128 chunks add in f32, far below the bf16 error of d(logits) that both share


def test_packed_head_is_the_dequantized_head(normal: Callable, out_and_grads: Callable) -> None:
    weight = random_weight(jax.random.key(0), (21, 9))
    (x,) = normal(5, (2, 6, 9))
    labels = random_labels((2, 6), 21)
    dloss = np.ones((2, 6), np.float32)
    codes = pack_int8(normal(6, (21, 9))[0])
    for packed_head, array in ((weight, dequantize(weight, jnp.float32)), (codes, codes.codes * codes.scale[:, None])):
        packed, dense = (
            out_and_grads(lambda x, head=head: linear_cross_entropy(x, head, labels, frozen_head=True), (x,), dloss)
            for head in (packed_head, array)
        )
        # the same head bit for bit, in two programs: f32 rounding only
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), packed, dense)


@pytest.mark.parametrize("reduction", ["none", "sum"])
@pytest.mark.parametrize("frozen", [True, False])
def test_never_holds_the_logits(frozen: bool, reduction: str) -> None:
    rows, tokens, width, vocabulary = 4, 512, 16, 4096
    x = jax.ShapeDtypeStruct((rows, tokens, width), jnp.bfloat16)
    head = jax.ShapeDtypeStruct((vocabulary, width), jnp.bfloat16)
    labels = jax.ShapeDtypeStruct((rows, tokens), jnp.int32)

    def mean(x: jax.Array, head: jax.Array, labels: jax.Array) -> jax.Array:
        return linear_cross_entropy(x, head, labels, frozen_head=frozen, chunk_tokens=64, reduction=reduction).mean()

    step = jax.jit(jax.value_and_grad(mean, 0 if frozen else (0, 1)))
    temporary = step.lower(x, head, labels).compile().memory_analysis().temp_size_in_bytes
    logits = rows * tokens * vocabulary * 4
    # A chunk is 1/32 of the tokens; a few copies of its logits and the f32 head gradient may live at a time.
    assert temporary < logits / 5


def test_forward_alone_computes_no_gradient() -> None:
    x, head, labels = jnp.zeros((2, 8, 4)), jnp.zeros((16, 4)), jnp.zeros((2, 8), jnp.int32)
    text = str(jax.make_jaxpr(partial(linear_cross_entropy, frozen_head=True))(x, head, labels))
    assert text.count("dot_general") == 1


@pytest.mark.parametrize("frozen", [True, False])
def test_under_checkpoint_and_scan(frozen: bool, normal: Callable) -> None:
    x, head = normal(6, (3, 2, 7, 8), (19, 8))
    labels = random_labels((3, 2, 7), 19)

    def loss(x: jax.Array, head: jax.Array, labels: jax.Array) -> jax.Array:
        return linear_cross_entropy(x, head, labels, frozen_head=frozen, chunk_tokens=4).sum()

    def accumulated(x: jax.Array, head: jax.Array) -> jax.Array:
        body = jax.checkpoint(lambda total, xs: (total + loss(xs[0], head, xs[1]), None))
        return jax.lax.scan(body, 0.0, (x, labels))[0]

    got = jax.jit(jax.value_and_grad(accumulated, (0, 1)))(x, head)
    want = jax.jit(jax.value_and_grad(loss, (0, 1)))(x, head, labels)
    # the same sums in another order: f32 rounding only
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), got, want)


SHARDED = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from pallas_kernels.linear_cross_entropy import linear_cross_entropy, logprob, pack_int8, reference
mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
place = lambda a, *spec: jax.device_put(a, NamedSharding(mesh, P(*spec)))
rng = np.random.default_rng(0)
x, head = rng.standard_normal((8, 12, 16), np.float32), rng.standard_normal((64, 16), np.float32)
labels = rng.integers(0, 64, (8, 12), dtype=np.int32)
for frozen, reduction in ((True, 'none'), (False, 'none'), (True, 'sum'), (False, 'sum')):
    loss = lambda x, h, l: linear_cross_entropy(x, h, l, frozen_head=frozen, chunk_tokens=16, group_tokens=32,
                                                reduction=reduction).sum()
    step = jax.jit(jax.value_and_grad(loss, 0 if frozen else (0, 1)))
    one = step(x, head, labels)
    args = place(x, "data"), place(head), place(labels, "data")
    text = step.lower(*args).compile().as_text()
    assert "all-gather" not in text and "all-to-all" not in text, "the rows must stay on their device"
    four = step(*args)
    assert jax.tree.leaves(four[1])[0].sharding.spec == P("data"), jax.tree.leaves(four[1])[0].sharding
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), one, four)
"""


def test_rows_stay_sharded() -> None:
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "4", "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", SHARDED], check=True, env=environment)


def test_a_label_outside_the_vocabulary_is_found() -> None:
    x, head = jnp.zeros((1, 3, 4)), jnp.zeros((8, 4))
    for label in (8, -1):
        labels = jnp.array([[0, label, IGNORED]])
        with pytest.raises(ValueError, match=rf"in \[0, 8\) or -100; got {label} at flat position 1"):
            linear_cross_entropy(x, head, labels)
        np.testing.assert_array_equal(np.isnan(jax.jit(linear_cross_entropy)(x, head, labels)), [[False, True, False]])


def test_no_tokens_give_no_losses() -> None:
    assert linear_cross_entropy(jnp.zeros((2, 0, 4)), jnp.zeros((8, 4)), jnp.zeros((2, 0), jnp.int32)).shape == (2, 0)


@pytest.mark.parametrize(
    ("x", "head", "labels", "options", "message"),
    [
        ((2, 3, 4), (8, 5), (2, 3), {}, r"of one width; got \(2, 3, 4\) and \(8, 5\)"),
        ((2, 3, 4), (8, 4), (2, 4), {}, r"integers of shape \(2, 3\); got int32\(2, 4\)"),
        ((2, 3, 4), (8, 4), (2, 3), {"chunk_tokens": 0}, "at least 1; got 0"),
        ((2, 3, 4), (8, 4), (2, 3), {"softcap": 0.0}, "softcap must be above 0, or None for no bound; got 0.0"),
        ((2, 3, 4), (8, 4), (2, 3), {"group_tokens": 0}, "group_tokens must be at least 1, or None; got 0"),
        ((2, 3, 4), (8, 4), (2, 3), {"label_smoothing": 1.0}, r"in \[0, 1\); got 1.0"),
        ((2, 3, 4), (8, 4), (2, 3), {"z_loss": -1.0}, "must not be negative; got -1.0"),
        ((2, 3, 4), (8, 4), (2, 3), {"reduction": "mean"}, "must be none or sum; got 'mean'"),
        ((2, 3, 4), (8, 4), (2, 3), {"bias": np.zeros(4)}, r"bias must be \(8,\).* got \(4,\)"),
        ((2, 3, 4), (8, 4), (2, 3), {"weights": np.zeros(3)}, r"shape \(2, 3\); got \(3,\)"),
    ],
)
def test_wrong_arguments_are_named(x: tuple, head: tuple, labels: tuple, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(jnp.zeros(x), jnp.zeros(head), jnp.zeros(labels, jnp.int32), **options)


def test_wrong_dtypes_and_an_unfrozen_packed_head_are_named() -> None:
    x, head, labels = jnp.zeros((2, 3, 4)), jnp.zeros((8, 4)), jnp.zeros((2, 3), jnp.int32)
    with pytest.raises(ValueError, match="x must be floating-point; got int32"):
        linear_cross_entropy(x.astype(jnp.int32), head, labels)
    with pytest.raises(ValueError, match=r"head must be floating-point, or packed .*; got int8\(8, 4\)"):
        linear_cross_entropy(x, head.astype(jnp.int8), labels, frozen_head=True)
    with pytest.raises(ValueError, match=r"labels must be integers .* got float32\(2, 3\)"):
        linear_cross_entropy(x, head, labels.astype(jnp.float32))
    with pytest.raises(ValueError, match="NF4 head has no gradient; got frozen_head=False"):
        linear_cross_entropy(x, random_weight(jax.random.key(0), (8, 4)), labels)
    with pytest.raises(ValueError, match="int8 head has no gradient; got frozen_head=False"):
        linear_cross_entropy(x, pack_int8(jnp.ones((8, 4))), labels)
    with pytest.raises(ValueError, match=r"floating-point matrix \(O, I\); got int32\(8, 4\)"):
        pack_int8(jnp.ones((8, 4), jnp.int32))
