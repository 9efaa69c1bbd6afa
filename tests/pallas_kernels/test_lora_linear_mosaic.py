"""The one-pass products with adapters in the GPU interpreter, with race detection, and what lowers for the GPU.

The interpreter cannot leave products in flight: `staged=True` reads every sum after each of them.
"""

from functools import partial

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _platform
from pallas_kernels.lora_linear import Projection, explain, lora_linear, lora_linears, reference, room
from pallas_kernels.lora_linear.mosaic_gpu import NarrowTiles, narrow_products, one_pass, put_last

SMALL = NarrowTiles(columns=64, blocks=4, staged=True)

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


def test_gradients_lower_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_platform, "compute_capability", lambda: (9, 0))
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2, 1024, 1024), (2048, 1024)))
    a, b = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((12, 1024), (2048, 12)))

    def loss(x, w, a, b):
        return lora_linear(x, w, a, b, 0.5).astype(jnp.float32).sum()

    lowered = jax.jit(jax.grad(loss, (0, 2, 3))).trace(x, w, a, b).lower(lowering_platforms=("cuda",))
    # The low product; then the gradient of b with that of the low product; then that of a.
    assert lowered.as_text().count("mosaic_gpu") >= 3


def two_layers(width: int = 1024) -> list[Projection]:
    rng = np.random.default_rng(1)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape) * width**-0.5, jnp.float32)

    scale = jnp.float32(0.5)
    return [Projection(draw(2048, width), draw(r, width), draw(2048, r), scale) for r in (12, 4)]


def test_room_behind_x_may_hold_anything() -> None:
    layers = two_layers()
    x = jnp.asarray(np.random.default_rng(2).standard_normal((2, 1024, 1024)), jnp.bfloat16)
    assert reference.room(x, layers, "xla", ready=True) == 64  # of ranks of 16
    wide = jnp.pad(x, ((0, 0), (0, 0), (0, 64)), constant_values=jnp.nan)
    want, kept = reference.forward(x, layers, 0.0, None)
    got, kept_of_wide = reference.forward(wide, layers, 0.0, None)
    for ours, plain in zip(jax.tree.leaves((got, kept_of_wide)), jax.tree.leaves((want, kept)), strict=True):
        np.testing.assert_array_equal(ours, plain)  # the same operations on the same numbers


def test_operands_are_joined_where_that_moves_fewer_bytes() -> None:
    w, one = jnp.zeros((2048, 1024)), jnp.float32(1)
    plain, adapted = Projection(w, None, None, one), Projection(w, jnp.zeros((16, 1024)), jnp.zeros((2048, 16)), one)

    def joined(rows: int, *layers: Projection, ready: bool) -> bool:
        return reference.room(jnp.zeros((rows, 1024)), layers, "xla", ready=ready) > 0

    assert joined(1032, adapted, ready=True)  # a copy of 1024 x 2048 weights, or of 1032 x 2048 sums
    assert not joined(1032, adapted, ready=False)  # and of 1032 x 1024 inputs
    assert joined(2056, adapted, ready=False)
    assert not joined(1024, adapted, ready=True)
    assert joined(2056, adapted, plain, ready=True)  # the layer without an adapter has weights to copy, no sums
    assert not joined(2048, adapted, plain, ready=True)


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
