"""RMSNorm, RoPE and gated activations against float64."""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _platform
from pallas_kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_residual
from pallas_kernels.rms_norm import mosaic_gpu as norm_kernel
from pallas_kernels.rope import rope
from pallas_kernels.swiglu import swiglu

F32 = {"rtol": 1e-5, "atol": 1e-5}  # f32 has 24 bits; sums of up to 129 terms of size 1 to 10


def assert_f32_close(got: object, want: object) -> None:
    for ours, exact in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(ours, np.float64), exact, **F32)


def norm_oracle(x: jax.Array, scale: jax.Array, dy: jax.Array, eps: float) -> tuple[np.ndarray, tuple]:
    x, scale, dy = (np.asarray(a, np.float64) for a in (x, scale, dy))
    width = x.shape[-1]
    root = np.sqrt((x**2).sum(-1, keepdims=True) / width + eps)
    dx = dy * scale / root - x * (dy * scale * x).sum(-1, keepdims=True) / (width * root**3)
    return x / root * scale, (dx, (dy * x / root).reshape(-1, width).sum(0))


@pytest.mark.parametrize("shape", [(1,), (3, 127), (2, 5, 129)])
def test_rms_norm_f32(shape: tuple[int, ...], normal: Callable, out_and_grads: Callable) -> None:
    x, scale, dy = normal(0, shape, shape[-1:], shape)
    got = out_and_grads(lambda x, scale: rms_norm(x, scale, eps=1e-3), (x, scale), dy)
    assert_f32_close(got, norm_oracle(x, scale, dy, 1e-3))


def test_rms_norm_bf16_with_f32_scale(normal: Callable, out_and_grads: Callable, no_worse_than_dense: Callable) -> None:
    x, dy = normal(1, (513, 129), (513, 129), dtype=jnp.bfloat16)
    (scale,) = normal(2, (129,))

    def dense(x: jax.Array, scale: jax.Array) -> jax.Array:
        x_f32 = x.astype(jnp.float32)
        normed = x_f32 * jax.lax.rsqrt(jnp.mean(x_f32**2, -1, keepdims=True) + 1e-6)
        return normed.astype(x.dtype) * scale.astype(x.dtype)

    got = out_and_grads(rms_norm, (x, scale), dy)
    assert [leaf.dtype for leaf in jax.tree.leaves(got)] == [jnp.bfloat16, jnp.bfloat16, jnp.float32]
    truth = norm_oracle(x, scale, dy, 1e-6)
    no_worse_than_dense(got, out_and_grads(dense, (x, scale), dy), truth)
    # 513 rows are summed in f32: the gradient of scale is as exact as f32 allows
    np.testing.assert_allclose(got[1][1], truth[1][1], rtol=1e-4, atol=1e-4)


def test_rms_norm_keeps_x_and_a_number_a_row(normal: Callable) -> None:
    x, scale = normal(3, (64, 32), (32,), dtype=jnp.bfloat16)
    _, pull_back = jax.vjp(rms_norm, x, scale)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(pull_back)) == x.nbytes + scale.nbytes + 64 * 4


def test_rms_norm_large_values_do_not_overflow() -> None:
    x = jnp.full((1, 64), 3e4, jnp.float16)  # its square is beyond float16
    np.testing.assert_array_equal(rms_norm(x, jnp.ones(64)), jnp.ones((1, 64), jnp.float16))


def test_residual_norm_adds_both_gradients(normal: Callable, out_and_grads: Callable) -> None:
    x, scale, dx, dy = normal(14, (5, 129), (129,), (5, 129), (5, 133))
    got = out_and_grads(partial(rms_norm_residual, eps=1e-3, room=4), (x, scale), (dx, dy))
    y, (dx_of_y, dscale) = norm_oracle(x, scale, dy[:, :129], 1e-3)
    zeros = np.zeros((5, 4))
    assert_f32_close(got, ((x, np.concatenate([y, zeros], 1)), (dx_of_y + np.asarray(dx, np.float64), dscale)))


def test_added_norm_is_the_norm_of_the_sum(normal: Callable, out_and_grads: Callable) -> None:
    x, added, scale, dtotal, dy = normal(17, (5, 129), (5, 129), (129,), (5, 129), (5, 133))
    got = out_and_grads(partial(add_rms_norm, eps=1e-3, offset=1.0, room=4), (x, added, scale), (dtotal, dy))
    total = np.asarray(x, np.float64) + np.asarray(added, np.float64)
    y, (dx, dscale) = norm_oracle(total, 1 + np.asarray(scale, np.float64), dy[:, :129], 1e-3)
    dx += np.asarray(dtotal, np.float64)
    assert_f32_close(got, ((total, np.concatenate([y, np.zeros((5, 4))], 1)), (dx, dx, dscale)))


def test_a_residual_stream_alone_has_its_own_gradient() -> None:
    x, scale = jnp.ones((2, 8)), jnp.ones(8)
    dx, dscale = jax.grad(lambda *args: rms_norm_residual(*args)[0].sum(), (0, 1))(x, scale)
    np.testing.assert_array_equal(dx, jnp.ones((2, 8)))
    np.testing.assert_array_equal(dscale, jnp.zeros(8))


@pytest.mark.parametrize("function", [rms_norm, lambda *args, **options: rms_norm_residual(*args, **options)[1]])
def test_scales_around_zero(function: Callable, normal: Callable, out_and_grads: Callable) -> None:
    x, scale, dy = normal(18, (3, 127), (127,), (3, 127))
    y, dx, dscale = (lambda out, grads: (out, *grads))(
        *out_and_grads(partial(function, eps=1e-3, offset=1.0), (x, scale), dy)
    )
    assert_f32_close((y, (dx, dscale)), norm_oracle(x, 1 + np.asarray(scale, np.float64), dy, 1e-3))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("passed", [0, 2])
@pytest.mark.parametrize("heads", [(1, 1), (6, 2)])
def test_rope_f32(
    heads: tuple[int, int], passed: int, interleaved: bool, normal: Callable, out_and_grads: Callable
) -> None:
    tokens, width = 129, 6
    q_shape, k_shape = ((2, tokens, n, width + passed) for n in heads)
    q, k, dq, dk = normal(4, q_shape, k_shape, q_shape, k_shape)
    angle = np.random.default_rng(5).uniform(-9, 9, (2, tokens, width // 2))
    cos, sin = jnp.asarray(np.cos(angle), jnp.float32), jnp.asarray(np.sin(angle), jnp.float32)
    got = out_and_grads(lambda q, k: rope(q, k, cos, sin, interleaved=interleaved), (q, k), (dq, dk))
    first, second = (slice(0, width, 2), slice(1, width, 2)) if interleaved else (slice(0, 3), slice(3, width))

    def turn(x: jax.Array, sign: int) -> np.ndarray:
        """Rotate in the complex plane; the gradient turns the other way."""
        x = np.asarray(x, np.float64)
        pair = (x[..., first] + 1j * x[..., second]) * np.exp(sign * 1j * angle)[:, :, None]
        turned = x.copy()
        turned[..., first], turned[..., second] = pair.real, pair.imag
        return turned

    assert_f32_close(got, ((turn(q, 1), turn(k, 1)), (turn(dq, -1), turn(dk, -1))))


def test_rope_rotates_in_f32_and_shares_positions(normal: Callable) -> None:
    q, k = normal(6, (2, 7, 4, 8), (2, 7, 2, 8), dtype=jnp.bfloat16)
    angle = np.random.default_rng(7).uniform(-9, 9, (1, 7, 4)).astype(np.float32)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    got = jax.jit(rope)(q, k, cos, sin)
    wide = rope(q.astype(jnp.float32), k.astype(jnp.float32), jnp.tile(cos, (2, 1, 1)), jnp.tile(sin, (2, 1, 1)))
    for ours, exact in zip(got, wide, strict=True):
        assert ours.dtype == jnp.bfloat16
        # one rounding to bf16: half a unit in the last place is 2^-9 relative; a fused multiply-add may move a tie
        np.testing.assert_allclose(np.asarray(ours, np.float32), exact, rtol=2**-8, atol=1e-6)


def test_rope_keeps_only_the_tables(normal: Callable) -> None:
    q, k = normal(8, (1, 16, 4, 64), (1, 16, 4, 64))
    cos, sin = normal(9, (1, 16, 32), (1, 16, 32))
    _, pull_back = jax.vjp(jax.jit(lambda q, k: rope(q, k, cos, sin)), q, k)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(pull_back)) <= 4 * cos.nbytes


def silu(x: float) -> float:
    return x / (1 + math.exp(-x))


def gelu(x: float) -> float:
    return x * (1 + math.erf(x / math.sqrt(2))) / 2


def gelu_tanh(x: float) -> float:
    return x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


def gated_oracle(activation: Callable, gate: jax.Array, up: jax.Array, dy: jax.Array) -> tuple[np.ndarray, tuple]:
    gate, up, dy = (np.asarray(a, np.float64) for a in (gate, up, dy))
    active, step = np.vectorize(activation), 1e-5
    slope = (active(gate + step) - active(gate - step)) / (2 * step)  # its own error is of the order of step**2
    return active(gate) * up, (dy * up * slope, dy * active(gate))


@pytest.mark.parametrize("shape", [(1,), (127,), (2, 3, 129)])
def test_swiglu_f32(shape: tuple[int, ...], normal: Callable, out_and_grads: Callable) -> None:
    gate, up, dy = normal(10, shape, shape, shape)
    assert_f32_close(out_and_grads(swiglu, (gate, up), dy), gated_oracle(silu, gate, up, dy))


@pytest.mark.parametrize("activation", [gelu, gelu_tanh])
def test_geglu_f32(activation: Callable, normal: Callable, out_and_grads: Callable) -> None:
    gate, up, dy = normal(13, (2, 3, 129), (2, 3, 129), (2, 3, 129))
    gate = 2 * gate  # where the two forms differ
    got = out_and_grads(partial(swiglu, activation=activation.__name__), (gate, up), dy)
    assert_f32_close(got, gated_oracle(activation, gate, up, dy))


def test_swiglu_bf16(normal: Callable, out_and_grads: Callable, no_worse_than_dense: Callable) -> None:
    gate, up, dy = normal(11, (33, 129), (33, 129), (33, 129), dtype=jnp.bfloat16)
    got = out_and_grads(swiglu, (gate, up), dy)
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(got))
    dense = out_and_grads(lambda gate, up: jax.nn.silu(gate) * up, (gate, up), dy)
    no_worse_than_dense(got, dense, gated_oracle(silu, gate, up, dy))


def test_swiglu_keeps_gate_and_up_only(normal: Callable) -> None:
    gate, up = normal(12, (64, 32), (64, 32), dtype=jnp.bfloat16)
    _, pull_back = jax.vjp(swiglu, gate, up)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(pull_back)) == gate.nbytes + up.nbytes


def test_swiglu_is_finite_at_the_ends() -> None:
    gate = jnp.array([-1e4, 1e4, 0.0])
    out, pull_back = jax.vjp(swiglu, gate, jnp.ones(3))
    np.testing.assert_allclose(out, [0, 1e4, 0])
    np.testing.assert_allclose(pull_back(jnp.ones(3))[0], [0, 1, 0.5])


Q, K, TABLE = (2, 3, 4, 8), (2, 3, 2, 8), (2, 3, 4)


@pytest.mark.parametrize(("shape", "dtype"), [((2, 3, 1024), jnp.bfloat16), ((16, 512), jnp.float16)])
def test_interpreted_swiglu(
    shape: tuple[int, ...],
    dtype: jnp.dtype,
    normal: Callable,
    out_and_grads: Callable,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture,
) -> None:
    monkeypatch.setattr(_platform, "compute_capability", lambda: (9, 0))
    gate, up, dy = normal(21, shape, shape, shape, dtype=dtype)
    gate = gate.at[0, :3].set(jnp.asarray([-6e4, 0, 6e4], dtype).reshape(3, *[1] * (len(shape) - 2)))
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        out, grads = out_and_grads(partial(swiglu, implementation="mosaic_gpu"), (gate, up), dy)
    assert "RACE" not in capfd.readouterr().out
    plain, plain_grads = out_and_grads(partial(swiglu, implementation="xla"), (gate, up), dy)
    assert out.dtype == dtype
    # two ways to a quotient in f32: rarely, a result between two numbers of 16 bits falls to the other one
    np.testing.assert_allclose(np.asarray(out, np.float32), np.asarray(plain, np.float32), rtol=2**-7, atol=1e-7)
    assert (out != plain).mean() < 1e-2
    np.testing.assert_array_equal(jnp.stack(grads), jnp.stack(plain_grads))


@pytest.mark.parametrize(
    ("shape", "dtype", "activation", "reason"),
    [
        ((4, 1024), jnp.bfloat16, "gelu", "it has silu, and not gelu"),
        ((4, 1024), jnp.float32, "silu", "it needs bfloat16 or float16, and gate is float32"),
        ((5, 512), jnp.bfloat16, "silu", "multiple of 1024 below 2\\*\\*31, and is 2560"),
        ((4, 1024), jnp.bfloat16, "silu", "it needs an NVIDIA GPU"),
    ],
)
def test_swiglu_kernel_says_what_it_refuses(
    shape: tuple[int, ...], dtype: jnp.dtype, activation: str, reason: str
) -> None:
    with pytest.raises(NotImplementedError, match=reason):
        swiglu(jnp.ones(shape, dtype), jnp.ones(shape, dtype), activation=activation, implementation="mosaic_gpu")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda z: rms_norm(z((3, 8)), z((7,))), r"scale is \(7,\) and x is \(3, 8\)"),
        (lambda z: rms_norm(z((3, 8), "int32"), z((8,))), "x is int32 and scale is float32"),
        (lambda z: rms_norm(z((3, 8)), z((8,)), room=-1), "got -1"),
        (lambda z: add_rms_norm(z((3, 8)), z((2, 8)), z((8,))), r"float32\(3, 8\), as x is; got float32\(2, 8\)"),
        (lambda z: swiglu(z((3, 8)), z((3, 7))), r"gate is float32\(3, 8\) and up is float32\(3, 7\)"),
        (lambda z: swiglu(z((3,)), z((3,), "bfloat16")), r"up is bfloat16\(3,\)"),
        (lambda z: swiglu(z((3,)), z((3,)), activation="relu"), "must be one of silu, gelu, gelu_tanh; got 'relu'"),
        (lambda z: swiglu(z((3,), "int32"), z((3,), "int32")), "both are int32"),
        (lambda z: rope(z(Q), z((2, 4, 2, 8)), z(TABLE), z(TABLE)), r"got \(2, 3, 4, 8\) and \(2, 4, 2, 8\)"),
        (lambda z: rope(z((1, 1, 1, 7)), z((1, 1, 1, 7)), z((1, 1, 3)), z((1, 1, 3))), "even .* got 7"),
        (lambda z: rope(z(Q), z(K), z((2, 3, 8)), z((2, 3, 8))), r"must be \(2, 3, 4\) .* got \(2, 3, 8\)"),
        (lambda z: rope(z(Q), z(K), z(TABLE, "bfloat16"), z(TABLE)), "got bfloat16 and float32"),
        (
            lambda z: rope(z(Q, "int32"), z(K), z(TABLE), z(TABLE)),
            "q and k must be floating-point; got int32 and float",
        ),
    ],
)
def test_wrong_arguments_are_named(call: Callable, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(lambda shape, dtype="float32": jnp.zeros(shape, dtype))


# one row a block; several, next to each other and, where the scale's gradient is summed, 8 apart; 5 rows, which
# blocks do not share out; rows too wide for that sum; a width that threads share in 8 bytes; short rows, whose threads
# have one piece or several, in one step or two; room behind; a scale in 32 and in 16 bits
@pytest.mark.parametrize(
    ("shape", "room", "dtype", "scale_dtype"),
    [
        ((2, 3, 1024), 0, jnp.bfloat16, jnp.float32),
        ((16, 1024), 64, jnp.float16, jnp.float16),
        ((5, 2048), 8, jnp.bfloat16, jnp.bfloat16),
        ((3, 5120), 64, jnp.bfloat16, jnp.bfloat16),
        ((6, 1536), 0, jnp.bfloat16, jnp.float32),
        ((8, 896), 64, jnp.bfloat16, jnp.bfloat16),
        ((544, 128), 0, jnp.bfloat16, jnp.float32),
        ((2, 16, 576), 8, jnp.float16, jnp.float32),
    ],
)
def test_interpreted_norm(
    shape: tuple[int, ...],
    room: int,
    dtype: jnp.dtype,
    scale_dtype: jnp.dtype,
    normal: Callable,
    no_worse_than_dense: Callable,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture,
) -> None:
    monkeypatch.setattr(_platform, "multiprocessors", lambda: 1)
    x, dy, dresidual = normal(15, shape, shape, shape, dtype=dtype)
    scale = 1 + normal(16, shape[-1:])[0].astype(scale_dtype) / 4
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        y, rrms = norm_kernel.forward(x, scale, 1e-3, room)
        dx, none = norm_kernel.backward(x, scale, rrms, dy, trained=False)
        dx_beside, dscale = norm_kernel.backward(x, scale, rrms, dy, trained=True)
        dx_and_residual, dscale_too = norm_kernel.backward(x, scale, rrms, dy, dresidual, trained=True)
        total, y_total, _ = norm_kernel.forward_added(x, dresidual, scale, 1e-3, room)
    assert "RACE" not in capfd.readouterr().out
    assert none is None
    np.testing.assert_array_equal(dscale, dscale_too)
    assert (y.shape, rrms.shape) == ((*shape[:-1], shape[-1] + room), (*shape[:-1], 1))
    truth_y, (truth_dx, truth_dscale) = norm_oracle(x, scale, dy, 1e-3)
    truth_sum = truth_dx + np.asarray(dresidual, np.float64)
    np.testing.assert_array_equal(total, x + dresidual)
    got = (y[..., : shape[-1]], dx, dx_beside, dx_and_residual, y_total[..., : shape[-1]])
    truth = (truth_y, truth_dx, truth_dx, truth_sum, norm_oracle(total, scale, dy, 1e-3)[0])
    # the truth rounded once is as near as the dtype comes; the bar leaves half of that error to the arithmetic in f32
    no_worse_than_dense(got, [jnp.asarray(exact, jnp.float32).astype(dtype) for exact in truth], truth)
    root = np.sqrt((np.asarray(x, np.float64) ** 2).mean(-1) + 1e-3)
    np.testing.assert_allclose(np.asarray(rrms)[..., 0], 1 / root, rtol=1e-6)  # some ulps of f32
    # summed in f32 and rounded to the scale's dtype, 2^-9 in the worst
    np.testing.assert_allclose(np.asarray(dscale, np.float64), truth_dscale, rtol=2**-8, atol=1e-4)


def test_norm_lowers_for_the_gpu_and_says_what_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_platform, "compute_capability", lambda: (9, 0))
    x, scale = jax.ShapeDtypeStruct((2, 515, 2048), jnp.bfloat16), jax.ShapeDtypeStruct((2048,), jnp.float32)

    def loss(x: jax.Array, scale: jax.Array) -> jax.Array:
        x, y = rms_norm_residual(x, scale, room=64)
        return x.astype(jnp.float32).sum() + y[..., :2048].astype(jnp.float32).sum()

    for wrt, sums in ((0, 0), ((0, 1), 1)):  # blocks' sums of the scale's gradient, where somebody wants it
        text = jax.jit(jax.grad(loss, wrt)).trace(x, scale).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("custom_call @mosaic_gpu") == 2
        assert text.count("stablehlo.reduce(") == sums
    for shape, dtype, room, reason in (
        ((5, 2047), jnp.bfloat16, 0, "multiple of 64 of at most 1152, or of 256 of at most 8192, and is 2047"),
        ((5, 96), jnp.bfloat16, 0, "and is 96"),
        ((1028, 128), jnp.bfloat16, 0, "rows of 128 must be a multiple of 8, and x has 1028"),
        ((5, 9216), jnp.bfloat16, 0, "of 256 of at most 8192, and is 9216"),
        ((5, 1024), jnp.float32, 0, "it needs bfloat16"),
        ((5, 1024), jnp.bfloat16, 3, "room must be a multiple of 8, and is 3"),
        ((1023, 1024), jnp.bfloat16, 0, "at least 1024 rows, and x has 1023"),
    ):
        with pytest.raises(NotImplementedError, match=reason):
            rms_norm(jnp.ones(shape, dtype), jnp.ones(shape[-1]), room=room, implementation="mosaic_gpu")
