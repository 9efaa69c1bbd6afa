"""Attention against a float64 oracle whose mask is built pair by pair."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.flash_attention import cudnn, explain, flash_attention


@dataclass(frozen=True)
class Shape:
    tokens: int = 16
    keys: int = 16
    heads: int = 4
    kv_heads: int = 2
    width: int = 8
    causal: bool = True
    window: int | None = None
    documents: tuple[int, ...] | None = None  # lengths; the rest of the row is padding
    scale: float | None = None
    softcap: float | None = None

    def segment_ids(self) -> np.ndarray | None:
        if self.documents is None:
            return None
        ids = np.repeat(np.arange(1, len(self.documents) + 1), self.documents)
        row = np.pad(ids, (0, self.tokens - len(ids))).astype(np.int32)
        other = np.roll(row, 1)
        other[0] *= 10  # what came round is a document of its own: documents are runs of equal ids
        return np.stack([row, other])

    def options(self) -> dict[str, object]:
        named = ("causal", "window", "scale", "softcap")
        return {name: getattr(self, name) for name in named} | {"segment_ids": self.segment_ids()}


SHAPES = {
    "one token": Shape(1, 1, 1, 1),
    "127 tokens, MHA": Shape(127, 127, 2, 2),
    "129 tokens, MQA": Shape(129, 129, 3, 1),
    "GQA 6/2": Shape(17, 17, 6, 2, 16),
    "full": Shape(9, 9, causal=False),
    "full, T < S": Shape(5, 9, causal=False),
    "causal, T < S": Shape(5, 9),
    "causal, T > S": Shape(9, 5),
    "decode": Shape(1, 9),
    "window 1": Shape(9, 9, window=1),
    "window 5": Shape(17, 17, window=5),
    "window, T < S": Shape(5, 17, window=4),
    "window as long as the row": Shape(9, 9, window=9),
    "documents": Shape(19, 19, documents=(5, 1, 13)),
    "documents and padding": Shape(17, 17, documents=(5, 9)),
    "documents and window": Shape(17, 17, documents=(7, 8), window=3),
    "documents, full": Shape(17, 17, documents=(7, 8), causal=False),
    "all padding": Shape(8, 8, documents=()),
    "softcap": Shape(9, 9, softcap=0.7),
    "scale": Shape(9, 9, scale=0.3),
}


def visible(shape: Shape) -> np.ndarray:
    """Decide for every row, query and key, one at a time, whether the query sees the key."""
    ids = shape.segment_ids()
    mask = np.zeros((2, shape.tokens, shape.keys), bool)
    for b, i, j in np.ndindex(mask.shape):
        distance = i + shape.keys - shape.tokens - j
        sees = not shape.causal or (distance >= 0 and (shape.window is None or distance < shape.window))
        if ids is not None:
            sees = sees and ids[b, i] != 0 and ids[b, i] == ids[b, j]
        mask[b, i, j] = sees
    return mask


def oracle(shape: Shape, args: tuple, dout: jax.Array) -> tuple[np.ndarray, tuple]:
    """Return the output and the gradients of q, k and v in float64."""
    q, k, v, dout = (np.asarray(x, np.float64).swapaxes(1, 2) for x in (*args, dout))
    groups, mask = shape.heads // shape.kv_heads, visible(shape)[:, None]
    scale = shape.scale or shape.width**-0.5
    k, v = np.repeat(k, groups, 1), np.repeat(v, groups, 1)
    scores, slope = q @ k.swapaxes(2, 3) * scale, 1.0
    if shape.softcap:
        capped = np.tanh(scores / shape.softcap)
        scores, slope = shape.softcap * capped, 1 - capped**2
    weights = np.where(mask, np.exp(scores), 0)
    total = weights.sum(-1, keepdims=True)
    probs = weights / np.where(total == 0, 1, total)
    dprobs = dout @ v.swapaxes(2, 3)
    dscores = probs * (dprobs - (probs * dprobs).sum(-1, keepdims=True)) * slope * scale

    def grouped(x: np.ndarray) -> np.ndarray:
        return x.reshape(2, shape.kv_heads, groups, *x.shape[2:]).sum(2)

    grads = dscores @ k, grouped(dscores.swapaxes(2, 3) @ q), grouped(probs.swapaxes(2, 3) @ dout)
    return (probs @ v).swapaxes(1, 2), tuple(grad.swapaxes(1, 2) for grad in grads)


def inputs(shape: Shape, dtype: jnp.dtype) -> tuple[tuple[jax.Array, ...], jax.Array]:
    rng = np.random.default_rng(shape.tokens)
    q_shape = (2, shape.tokens, shape.heads, shape.width)
    kv_shape = (2, shape.keys, shape.kv_heads, shape.width)
    arrays = [rng.standard_normal(s, np.float32).astype(dtype) for s in (q_shape, kv_shape, kv_shape, q_shape)]
    *qkv, dout = map(jnp.asarray, arrays)
    return tuple(qkv), dout


@pytest.mark.parametrize("name", SHAPES)
def test_f32_matches_float64(name: str, out_and_grads: Callable) -> None:
    shape = SHAPES[name]
    args, dout = inputs(shape, jnp.float32)
    got = out_and_grads(lambda *a: flash_attention(*a, **shape.options()), args, dout)
    want = oracle(shape, args, dout)
    for ours, exact in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        # f32 has 24 bits; sums over up to 129 terms of size 1 to 10
        np.testing.assert_allclose(ours, exact, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["127 tokens, MHA", "129 tokens, MQA", "documents and padding"])
def test_bf16_is_as_exact_as_dense_bf16(name: str, out_and_grads: Callable, no_worse_than_dense: Callable) -> None:
    shape = SHAPES[name]
    args, dout = inputs(shape, jnp.bfloat16)
    got = out_and_grads(lambda *a: flash_attention(*a, **shape.options()), args, dout)
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(got))

    def dense(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        groups, mask = shape.heads // shape.kv_heads, visible(shape)[:, None]
        k, v = jnp.repeat(k, groups, 2), jnp.repeat(v, groups, 2)
        scores = jnp.einsum("btnh,bsnh->bnts", q, k).astype(jnp.float32) * shape.width**-0.5
        probs = jax.nn.softmax(jnp.where(mask, scores, -1e9)).astype(q.dtype) * mask
        return jnp.einsum("bnts,bsnh->btnh", probs, v)

    no_worse_than_dense(got, out_and_grads(dense, args, dout), oracle(shape, args, dout))


@pytest.mark.parametrize("causal", [True, False])
def test_documents_never_touch(causal: bool, out_and_grads: Callable) -> None:
    shape = Shape(24, 24, documents=(7, 6, 8), causal=causal)
    (q, k, v), dout = inputs(shape, jnp.float32)
    ids = jnp.asarray(shape.segment_ids())
    from_second = jnp.where((ids == 2)[:, :, None, None], dout, 0)
    _, grads = out_and_grads(lambda *a: flash_attention(*a, **shape.options()), (q, k, v), from_second)
    for grad in grads:
        outside = np.asarray(grad)[np.asarray(ids) != 2]
        assert (outside == 0).all()
        assert np.abs(grad).max() > 0


def test_padding_gives_zero_and_sends_nothing(out_and_grads: Callable) -> None:
    shape = SHAPES["documents and padding"]
    args, dout = inputs(shape, jnp.bfloat16)
    out, grads = out_and_grads(lambda *a: flash_attention(*a, **shape.options()), args, dout)
    for array in (out, *grads):
        assert (np.asarray(array, np.float32)[shape.segment_ids() == 0] == 0).all()


def test_packed_equals_separate_documents() -> None:
    (q, k, v), _ = inputs(Shape(20, 20), jnp.float32)
    ids = jnp.array([[1] * 8 + [2] * 12] * 2)
    packed = jax.jit(flash_attention)(q, k, v, segment_ids=ids)
    for part in (slice(0, 8), slice(8, 20)):
        alone = jax.jit(flash_attention)(q[:, part], k[:, part], v[:, part])
        # the same sums with zeros among them: f32 rounding only
        np.testing.assert_allclose(packed[:, part], alone, rtol=1e-5, atol=1e-6)


def test_key_segments_of_their_own_select_the_keys() -> None:
    (q, k, v), _ = inputs(Shape(1, 9), jnp.float32)
    lengths = jnp.array([4, 9])
    kv_ids = (jnp.arange(9) < lengths[:, None]).astype(jnp.int32)
    attend = jax.jit(partial(flash_attention, causal=False))
    got = attend(q, k, v, segment_ids=jnp.ones((2, 1), jnp.int32), kv_segment_ids=kv_ids)
    alone = attend(q[:1], k[:1, :4], v[:1, :4])
    np.testing.assert_allclose(got[:1], alone, rtol=1e-5, atol=1e-6)  # the same sums: f32 rounding only


def test_keys_are_not_repeated_to_the_query_heads() -> None:
    (q, k, v), dout = inputs(Shape(5, 7, heads=4, kv_heads=2), jnp.float32)
    text = str(jax.make_jaxpr(lambda *a: jax.vjp(flash_attention, *a)[1](dout))(q, k, v))
    assert "[2,7,4,8]" not in text
    assert "[2,7,2,8]" in text


class TestCudnn:
    """Its arguments, checked through JAX's own implementation of the same function: there is no GPU here."""

    @pytest.fixture(autouse=True)
    def _without_cudnn(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = jax.nn.dot_product_attention

        def stand_in(*args: object, implementation: str, **kwargs: object) -> jax.Array:
            assert implementation == "cudnn"
            return real(*args, **kwargs, implementation="xla")

        monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)

    @pytest.mark.parametrize(
        "name",
        ["full", "window 5", "window as long as the row", "documents and padding", "documents and window", "scale"],
    )
    def test_masks_and_windows(self, name: str, out_and_grads: Callable) -> None:
        shape = SHAPES[name]
        args, dout = inputs(shape, jnp.float32)
        options = shape.options() | {"scale": shape.scale or shape.width**-0.5}
        options.pop("softcap")
        got = out_and_grads(lambda *a: cudnn.forward(*a, **options), args, dout)
        want = oracle(shape, args, dout)
        for ours, exact in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(ours, exact, rtol=2e-5, atol=2e-5)  # f32 against float64, as above

    def test_odd_causal_rows_get_one_token_of_padding(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen = []
        monkeypatch.setattr(jax.nn, "dot_product_attention", lambda q, *_, **__: seen.append(q.shape[1]) or q)
        q = jnp.ones((1, 127, 2, 8), jnp.bfloat16)
        out = cudnn.forward(q, q, q, causal=True, window=None, segment_ids=None, scale=1.0)
        assert (seen, out.shape) == ([128], q.shape)

    def test_masked_rows_are_padded_to_128(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen = []

        def record(q: jax.Array, k: jax.Array, v: jax.Array, **kwargs: object) -> jax.Array:
            seen.append((q.shape[1], kwargs["mask"].shape))
            return q

        monkeypatch.setattr(jax.nn, "dot_product_attention", record)
        (q, k, v), _ = inputs(Shape(192, 192), jnp.bfloat16)
        out = cudnn.forward(q, k, v, causal=True, window=None, segment_ids=jnp.ones((2, 192), jnp.int32), scale=1.0)
        assert seen == [(256, (2, 1, 256, 256))]
        assert out.shape == q.shape


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="cuDNN runs on an NVIDIA GPU only")
@pytest.mark.parametrize(
    "shape",
    [
        Shape(192, 192, 8, 2, 64),  # T % 128 == 64
        Shape(256, 256, 8, 2, 128, window=100),
        Shape(192, 192, 8, 2, 64, documents=(70, 100)),
        Shape(129, 129, 4, 4, 128, documents=(30, 60), window=20),
        Shape(256, 256, 4, 1, 64, documents=(100, 100), causal=False),
        Shape(128, 256, 4, 2, 64, causal=False),
    ],
)
def test_cudnn_on_gpu(shape: Shape, out_and_grads: Callable, no_worse_than_dense: Callable) -> None:
    args, dout = inputs(shape, jnp.bfloat16)
    results = [
        out_and_grads(lambda *a, name=name: flash_attention(*a, **shape.options(), implementation=name), args, dout)
        for name in ("cudnn", "xla")
    ]
    no_worse_than_dense(*results, oracle(shape, args, dout))


@pytest.mark.parametrize(
    ("change", "dtype", "message"),
    [
        ({}, jnp.bfloat16, "needs an NVIDIA GPU and the default device is cpu"),
        ({}, jnp.float32, "needs bfloat16 or float16, and q is float32"),
        ({"width": 12}, jnp.bfloat16, "multiple of 8 up to 256, and is 12"),
        ({"width": 264}, jnp.bfloat16, "multiple of 8 up to 256, and is 264"),
        ({"softcap": 30.0}, jnp.bfloat16, "no softcap, and softcap is 30.0"),
        ({"tokens": 5}, jnp.bfloat16, "T must equal S; T is 5 and S is 16"),
    ],
)
def test_cudnn_says_why_it_refuses(change: dict, dtype: jnp.dtype, message: str) -> None:
    shape = replace(Shape(), **change)
    args, _ = inputs(shape, dtype)
    with pytest.raises(NotImplementedError, match=rf"'cudnn' refuses: .*{message}; usable here: 'xla'"):
        flash_attention(*args, **shape.options(), implementation="cudnn")


def test_cudnn_needs_hopper_for_wide_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pallas_kernels._platform.why_not_gpu", lambda: None)
    monkeypatch.setattr("pallas_kernels._platform.compute_capability", lambda: (8, 0))
    wide, narrow = (jax.ShapeDtypeStruct((2, 16, 4, width), jnp.bfloat16) for width in (160, 128))
    assert explain(wide, wide) == (
        "flash_attention: xla (cudnn refuses: head width 160 needs compute capability (9, 0); this GPU has (8, 0); "
        "mosaic_gpu refuses: the head width must be one of (64, 96, 128, 256), and is 160)"
    )
    assert explain(narrow, narrow).startswith("flash_attention: cudnn")
    assert "can leave a query without a key" in explain(narrow, narrow, own_ids=True)


Q, KV = (2, 6, 4, 8), (2, 6, 2, 8)


@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        ((Q, KV, (2, 5, 2, 8)), {}, r"k and v both \(B, S, K, H\); got .*\(2, 5, 2, 8\)"),
        ((Q, (3, 6, 2, 8), (3, 6, 2, 8)), {}, r"same B and H; got \(2, 6, 4, 8\) and \(3, 6, 2, 8\)"),
        ((Q, (2, 6, 3, 8), (2, 6, 3, 8)), {}, "multiple of the key heads; got 4 and 3"),
        ((Q, (2, 6, 0, 8), (2, 6, 0, 8)), {}, "multiple of the key heads; got 4 and 0"),
        ((Q, KV, KV), {"window": 0}, "got window=0, causal=True"),
        ((Q, KV, KV), {"window": 3, "causal": False}, "got window=3, causal=False"),
        ((Q, KV, KV), {"softcap": -1.0}, "softcap must be positive or None; got -1.0"),
        ((Q, KV, KV), {"kv_segment_ids": np.ones((2, 6), np.int32)}, "needs segment_ids"),
        ((Q, KV, KV), {"segment_ids": np.ones((2, 5), np.int32)}, r"integers of shape \(2, 6\); got int32\(2, 5\)"),
        ((Q, KV, KV), {"segment_ids": np.ones((2, 6), np.float32)}, r"got float32\(2, 6\)"),
        (((2, 3, 4, 8), KV, KV), {"segment_ids": np.ones((2, 3), np.int32)}, "where T and S differ; got 3 and 6"),
    ],
)
def test_wrong_arguments_are_named(shapes: tuple, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        flash_attention(*(jnp.zeros(shape) for shape in shapes), **options)


def test_mixed_dtypes_are_named() -> None:
    with pytest.raises(ValueError, match="must share one floating-point dtype; got float32, bfloat16 and bfloat16"):
        flash_attention(jnp.zeros(Q), jnp.zeros(KV, jnp.bfloat16), jnp.zeros(KV, jnp.bfloat16))


@pytest.mark.parametrize("sinks", [False, True])
def test_log_sum_exp_joins_parts_of_the_keys_and_has_gradients(sinks, normal):
    q, k, v, dout = normal(5, (1, 6, 2, 8), (1, 6, 1, 8), (1, 6, 1, 8), (1, 6, 2, 8))
    scores = jnp.asarray([0.5, -1.0]) if sinks else None

    def whole(q, k, v):
        return flash_attention(q, k, v, causal=False, sinks=scores, return_lse=True)

    def joined(q, k, v):
        (a, lse_a), (b, lse_b) = (
            flash_attention(q, k[:, part], v[:, part], causal=False, sinks=s, return_lse=True)
            for part, s in ((slice(0, 2), scores), (slice(2, 6), None))
        )
        lse = jnp.logaddexp(lse_a, lse_b)
        weight_a, weight_b = (jnp.exp(part - lse).swapaxes(1, 2)[..., None] for part in (lse_a, lse_b))
        return a * weight_a + b * weight_b, lse

    (out, lse), pull_back = jax.vjp(whole, q, k, v)
    (out_2, lse_2), pull_back_2 = jax.vjp(joined, q, k, v)
    np.testing.assert_allclose(out, out_2, atol=1e-6)  # f32 sums of 6 terms
    np.testing.assert_allclose(lse, lse_2, atol=1e-6)
    dlse = jnp.ones_like(lse)
    for a, b in zip(pull_back((dout, dlse)), pull_back_2((dout, dlse)), strict=True):
        np.testing.assert_allclose(a, b, atol=5e-6)


def test_log_sum_exp_of_padding_is_minus_infinity():
    q = jnp.ones((1, 4, 1, 8))
    _, lse = flash_attention(q, q, q, segment_ids=jnp.asarray([[1, 1, 0, 0]]), return_lse=True)
    np.testing.assert_array_equal(jnp.isneginf(lse[0, 0]), [False, False, True, True])
