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
from pallas_kernels.lora_linear import explain, lora_linear
from pallas_kernels.lora_linear.mosaic_gpu import NarrowTiles, narrow_products, one_pass

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


def test_refusals_name_their_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert explain().startswith("lora_linear: xla (mosaic_gpu refuses: it needs an NVIDIA GPU")
    x, w, a, b = jnp.ones((8, 16), jnp.bfloat16), jnp.ones((4, 16)), jnp.ones((2, 16)), jnp.ones((4, 2))
    call = partial(lora_linear, x, w, a, b, 1.0, implementation="mosaic_gpu")
    with pytest.raises(NotImplementedError, match="at least 1024 rows, and x has 8"):
        call()
    monkeypatch.setattr(_platform, "compute_capability", lambda: (8, 0))
    assert "needs Hopper" in explain()
