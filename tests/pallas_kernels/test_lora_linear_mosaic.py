"""The one-pass products with adapters in the GPU interpreter, with race detection, and what lowers for the GPU.

The interpreter cannot leave products in flight: `staged=True` reads every sum after each of them.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _platform
from pallas_kernels._tiles import Tiles
from pallas_kernels.lora_linear import Projection, explain, lora_linear, lora_linears, reference, room
from pallas_kernels.lora_linear.mosaic_gpu import NarrowTiles, narrow_products, one_pass, put_last
from pallas_kernels.lora_linear.mosaic_gpu_product import adapted_product, makers
from pallas_kernels.nf4_linear.cases import random_weight

SMALL = NarrowTiles(columns=64, blocks=4, staged=True)
SMALL_TILES = Tiles(blocks=2, stages=2, band=2, staged=True)

CASES = {  # rows, columns, rank, whether there is a factor, and a low product; columns that x has beyond
    "both": (256, 256, 16, True, True, 0),
    "the product alone, fewer blocks than columns": (192, 1024, 8, True, False, 0),
    "the gradient alone, rows that do not divide among blocks": (320, 128, 16, False, True, 0),
    "rank of whole registers, one tile": (64, 128, 64, True, True, 0),
    "a wider array": (128, 128, 24, True, True, 64),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_interpreted_pass(name: str, dtype: str, capfd: pytest.CaptureFixture) -> None:
    rows, width, rank, with_factor, with_low, more = CASES[name]
    rng = np.random.default_rng(rows)
    shapes = ((rows, width + more), (rank, width), (rows, rank))
    x, factor, low = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        product, gradient = one_pass(x, factor if with_factor else None, low if with_low else None, SMALL, width)
    assert "RACE" not in capfd.readouterr().out  # the interpreter goes on after it has said so
    x64, factor64, low64 = (np.asarray(array, np.float64) for array in (x[:, :width], factor, low))
    for got, wanted, truth in (
        (product, with_factor, x64 @ factor64.T),
        (gradient, with_low, x64.T @ low64),
    ):
        assert (got is not None) == wanted
        if got is not None:  # f32 sums of at most 1024 terms
            np.testing.assert_allclose(got, truth, rtol=1e-5, atol=1e-4)


def test_ragged_shapes_and_large_ranks_go_to_xla() -> None:
    rng = np.random.default_rng(0)
    for rows, width, rank in ((60, 128, 4), (64, 130, 4), (64, 1024, 80)):
        x, factor, low = (
            jnp.asarray(rng.standard_normal(s)) for s in ((2, rows, width), (rank, width), (2, rows, rank))
        )
        product, gradient = narrow_products(x, factor, low, rank_first=True)
        np.testing.assert_allclose(product, np.asarray(x) @ np.asarray(factor).T, rtol=1e-4, atol=1e-4)
        want = np.asarray(low).reshape(-1, rank).T @ np.asarray(x).reshape(-1, width)
        np.testing.assert_allclose(gradient, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("rows", "kernels"), [(2048, 4), (3001, 2)])  # of 3001, narrow products are not in whole tiles
def test_gradients_lower_for_the_gpu(rows: int, kernels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_platform, "compute_capability", lambda: (9, 0))
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1, rows, 1024), (2048, 1024)))
    a, b = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((12, 1024), (2048, 12)))

    def loss(x, w, a, b):
        return lora_linear(x, w, a, b, 0.5).astype(jnp.float32).sum()

    lowered = jax.jit(jax.value_and_grad(loss, (0, 2, 3))).trace(x, w, a, b).lower(lowering_platforms=("cuda",))
    # The product and the low one; the gradient of x; that of b with that of the low product; that of a.
    assert lowered.as_text().count("@mosaic_gpu_v2") == kernels
    assert lowered.as_text().count("dot_general") == 3 * (kernels == 2)


PRODUCTS = {  # rows, columns of x and of the result, of the adapter and of low products, the first
    "several tiles a block, one across the edge": (384, 256, 320, 64, 64, 0),
    "the second of two parts": (128, 320, 256, 64, 128, 64),
    "two parts, rows that end within a tile": (200, 256, 192, 128, 128, 0),
    "less than a tile": (40, 256, 64, 64, 64, 0),
}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("transpose", [False, True])
def test_interpreted_product(
    name: str, transpose: bool, relative_error: Callable, capfd: pytest.CaptureFixture
) -> None:
    rows, depth, across, ranks, columns, first = PRODUCTS[name]
    rng = np.random.default_rng(rows)
    shapes = (rows, depth), (across, depth), (across, ranks), (rows, columns)
    x, w, up, low = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in shapes)
    turned = (w.T, up.T) if transpose else (w, up)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        got = adapted_product(x, *turned, low, first=first, transpose=transpose, tiles=SMALL_TILES)
    assert "RACE" not in capfd.readouterr().out
    x64, w64, up64, low64 = (np.asarray(array, np.float64) for array in (x, w, up, low))
    want = x64 @ w64.T + low64[:, first : first + ranks] @ up64.T
    assert relative_error(got, want) < 2.0**-8 / 12**0.5 * 1.5  # of a rounding to bf16


def test_low_products_are_left_to_blocks_with_fewer_tiles() -> None:
    assert makers(64, 1024, 132) == 32  # 32 blocks have seven tiles, the others eight
    assert makers(16, 896, 132) == 16
    assert makers(64, 1024, 128) == 64  # none has fewer
    assert makers(64, 132 * 8 - 2, 132) == 64  # two have, and would be waited for


def two_layers() -> list[Projection]:
    """Packed, as operands are joined then."""
    rng = np.random.default_rng(1)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape) * shape[1] ** -0.5, jnp.float32)

    w = random_weight(jax.random.key(0), (2048, 1024))
    return [Projection(w, draw(r, 1024), draw(2048, r), jnp.float32(0.5)) for r in (12, 4)]


def test_room_behind_x_may_hold_anything(relative_error: Callable) -> None:
    layers = two_layers()
    x = jnp.asarray(np.random.default_rng(2).standard_normal((2, 1024, 1024)), jnp.bfloat16)
    assert reference.room(x, layers, "xla") == 64  # of ranks of 16
    wide = jnp.pad(x, ((0, 0), (0, 0), (0, 64)), constant_values=jnp.nan)
    want, kept = reference.forward(x, layers, 0.0, None)
    got, kept_of_wide = reference.forward(wide, layers, 0.0, None)
    np.testing.assert_array_equal(kept_of_wide.x[..., :1024], x)
    np.testing.assert_array_equal(kept_of_wide.x[..., 1024 : 1024 + 16], kept_of_wide.low)
    assert relative_error(kept_of_wide.low, kept.low) < 3e-3  # factors are scaled before they are rounded, or after
    for ours, plain in zip(got, want, strict=True):
        assert relative_error(ours, plain) < 4e-3


def test_operands_are_joined_where_weights_are_unpacked() -> None:
    x, (packed, other) = jnp.zeros((1032, 1024), jnp.bfloat16), two_layers()
    dense = packed._replace(w=jnp.zeros((2048, 1024)))
    assert reference.room(x, [packed], "xla") == 64
    assert reference.room(x, [packed, other._replace(a=None, b=None)], "xla") == 64
    assert reference.room(x, [packed, dense], "xla") == 0  # a kernel copies neither x nor w


def test_low_products_go_behind_x_in_place(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(_platform, "compute_capability", lambda: (9, 0))
    rng = np.random.default_rng(3)
    whole, more = (jnp.asarray(rng.standard_normal((2, 512, n)), jnp.bfloat16) for n in (192, 64))
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        got = put_last(whole, more)
    assert "RACE" not in capfd.readouterr().out
    np.testing.assert_array_equal(got, jnp.concatenate([whole[..., :128], more], axis=-1))


def test_room_lowers_for_the_gpu_without_a_copy_of_x(monkeypatch: pytest.MonkeyPatch) -> None:
    layers, x = two_layers(), jax.ShapeDtypeStruct((2, 1024, 1024), jnp.bfloat16)
    assert room(x, layers) == 0  # here XLA does all of it in one operation
    monkeypatch.setattr(_platform, "compute_capability", lambda: (9, 0))
    assert room(x, layers) == 64
    assert room(jax.ShapeDtypeStruct((2, 8, 1024), jnp.bfloat16), layers) == 0

    def loss(x: jax.Array) -> jax.Array:
        return sum(y.astype(jnp.float32).sum() for y in lora_linears(x, layers))

    wide = jax.ShapeDtypeStruct((2, 1024, 1088), jnp.bfloat16)
    assert jax.eval_shape(jax.grad(loss), wide) == wide
    text = jax.jit(loss).trace(wide).lower(lowering_platforms=("cuda",)).as_text()
    assert "stablehlo.pad" not in "".join(line for line in text.splitlines() if "2x1024x1024" in line)
    assert "dynamic_update_slice" not in text  # which fails on what a kernel made
    with pytest.raises(ValueError, match=r"of width 1024 \(or 1088, with room behind\) to meet w; got .*2048, 1080"):
        lora_linears(jnp.ones((2048, 1080), jnp.bfloat16), layers)


def test_refusals_name_their_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert explain().startswith("lora_linear: xla (mosaic_gpu refuses: it needs an NVIDIA GPU")
    x, w, a, b = jnp.ones((8, 16), jnp.bfloat16), jnp.ones((4, 16)), jnp.ones((2, 16)), jnp.ones((4, 2))
    call = partial(lora_linear, x, w, a, b, 1.0, implementation="mosaic_gpu")
    with pytest.raises(NotImplementedError, match="at least 1024 rows, and x has 8"):
        call()
    monkeypatch.setattr(_platform, "compute_capability", lambda: (8, 0))
    assert "needs Hopper" in explain()
