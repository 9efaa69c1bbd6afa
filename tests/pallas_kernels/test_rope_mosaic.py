"""The Hopper kernel of the rotary embedding, in the CPU interpreter."""

from collections.abc import Callable
from functools import partial

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Implementation, _platform
from pallas_kernels.rope import explain, reference, rope
from pallas_kernels.rope import mosaic_gpu as kernel


# whole heads and parts of tokens for the threads, both ways, several tiles a row; tables of all rows and of each; heads
# that turn in part, once and three times as many channels passing; few heads of keys, for which queries take turns
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("shape", "kv_heads", "rows", "turned", "dtype"),
    [
        ((2, 8, 32, 128), 8, 1, 128, jnp.bfloat16),
        ((2, 16, 4, 128), 2, 2, 128, jnp.float16),
        ((1, 32, 14, 64), 2, 1, 64, jnp.bfloat16),
        ((1, 6, 8, 256), 4, 1, 256, jnp.bfloat16),
        ((2, 16, 6, 128), 4, 2, 64, jnp.bfloat16),
        ((1, 32, 8, 256), 2, 1, 64, jnp.float16),
    ],
)
def test_interpreted(
    shape: tuple[int, ...],
    kv_heads: int,
    rows: int,
    turned: int,
    dtype: jnp.dtype,
    interleaved: bool,
    normal: Callable,
    out_and_grads: Callable,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture,
) -> None:
    monkeypatch.setattr(_platform, "compute_capability", lambda: (9, 0))
    monkeypatch.setattr(kernel, "FEWEST", 0)
    monkeypatch.setattr(kernel, "rotate", partial(kernel.rotate, staged=True))
    of_keys = (*shape[:2], kv_heads, shape[3])
    q, k, dq, dk = normal(19, shape, of_keys, shape, of_keys, dtype=dtype)
    angle = np.random.default_rng(20).uniform(-9, 9, (rows, shape[1], turned // 2)).astype(np.float32)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        call = partial(rope, interleaved=interleaved, implementation="mosaic_gpu")
        there, back = out_and_grads(lambda q, k: call(q, k, cos, sin), (q, k), (dq, dk))
    assert "RACE" not in capfd.readouterr().out
    for ours, x, sign in zip((*there, *back), (q, k, dq, dk), (1, 1, -1, -1), strict=True):
        plain = reference.rotate(x, cos, sign * sin, interleaved)
        assert ours.dtype == x.dtype
        np.testing.assert_array_equal(ours[..., turned:], x[..., turned:])
        # The compiler may round a product and a sum once or twice: rarely, a result between two numbers of 16 bits
        # falls to the other one.
        ours, plain = (np.asarray(array, np.float32) for array in (ours, plain))
        np.testing.assert_allclose(ours, plain, rtol=2**-7, atol=1e-6)
        assert (ours != plain).mean() < 1e-3


# what the interpreter does not run: pair i of a thread's register r is numbers 2i and 2i + 1 of its register r
@pytest.mark.parametrize(("heads", "piece"), [(32, 128), (6, 64), (3, 256), (1, 64)])
def test_a_register_of_neighbours_is_two_of_pairs(heads: int, piece: int) -> None:
    tokens = 2 * kernel._at_a_time(heads, piece)[0]

    def places(channels: int, together: int) -> np.ndarray:
        """(tokens, heads, channels) of (warp, lane, register, place in it)."""
        layout, shape = kernel._layout(heads, channels, together).to_mgpu(), (tokens, heads, channels)
        tiled = layout.tiling.tile_shape(shape)
        dims = [[len(tiled) + dim for dim in of] for of in (layout.warp_dims, layout.lane_dims, [layout.vector_dim])]
        dims.insert(2, [dim for dim in range(len(tiled)) if not any(dim in of for of in dims)])
        index = np.stack([layout.tiling.tile_indices(at) for at in np.ndindex(shape)], axis=1)
        numbers = [np.ravel_multi_index(index[of], np.array(tiled)[of]) for of in dims]
        return np.stack(numbers, axis=-1).reshape(*shape, 4)

    pairs = places(piece // 2, 4)
    assert len(np.unique(pairs.reshape(-1, 4), axis=0)) == pairs.size // 4
    for which in (0, 1):
        expected = pairs * [1, 1, 1, 2] + [0, 0, 0, which]
        np.testing.assert_array_equal(places(piece, 8)[:, :, which::2], expected)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("heads", "turned"), [(8, 128), (2, 64)])
def test_lowers_for_the_gpu(heads: int, turned: int, interleaved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_platform, "compute_capability", lambda: (9, 0))
    q, k = (jax.ShapeDtypeStruct((2, 4096, count, 128), jnp.bfloat16) for count in (32, heads))
    table = jax.ShapeDtypeStruct((1, 4096, turned // 2), jnp.float32)

    def gradient(
        q: jax.Array, k: jax.Array, cos: jax.Array, sin: jax.Array, implementation: Implementation | None
    ) -> tuple[jax.Array, ...]:
        turn = partial(rope, interleaved=interleaved, implementation=implementation)
        there, back = jax.vjp(lambda q, k: turn(q, k, cos, sin), q, k)
        return (*there, *back(there))

    in_part = interleaved and turned < 128  # XLA's by default
    for implementation, kernels in ((None, 0 if in_part else 2), ("mosaic_gpu", 2)):
        step = jax.jit(partial(gradient, implementation=implementation))
        text = step.trace(q, k, table, table).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("custom_call @mosaic_gpu") == kernels
    assert explain() == "rope: mosaic_gpu"


def test_says_what_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_platform, "compute_capability", lambda: (9, 0))
    for shape, dtype, turned, interleaved, reason in (
        ((1, 4096, 32, 128), jnp.float32, 128, False, "it needs bfloat16"),
        ((1, 4096, 32, 128), jnp.bfloat16, 96, True, "of these 128 turn 96"),
        ((1, 4096, 32, 96), jnp.bfloat16, 96, False, "of these 96 turn 96"),
        ((1, 4096, 32, 96), jnp.bfloat16, 64, True, "heads of a multiple of 64, and of these 96 turn 64"),
        ((1, 4096, 15, 128), jnp.bfloat16, 128, False, "15 and 8 heads do not share out"),
        ((1, 4097, 32, 128), jnp.bfloat16, 128, False, "multiple of 2 tokens, and has 4097"),
        ((1, 4098, 32, 128), jnp.bfloat16, 64, False, "multiple of 4 tokens, and has 4098"),
        ((1, 64, 32, 128), jnp.bfloat16, 128, False, "it is for 4194304 numbers or more"),
    ):
        q, k = (jax.ShapeDtypeStruct((*shape[:2], count, shape[3]), dtype) for count in (shape[2], 8))
        table = jax.ShapeDtypeStruct((1, shape[1], turned // 2), jnp.float32)
        call = partial(rope, interleaved=interleaved, implementation="mosaic_gpu")
        with pytest.raises(NotImplementedError, match=reason):
            jax.eval_shape(call, q, k, table, table)
