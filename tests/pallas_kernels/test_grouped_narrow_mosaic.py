"""The Hopper kernel of adapters of grouped rows in the GPU interpreter, with race detection, against float64."""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul.mosaic_gpu_narrow import NarrowTiles, narrow_products

CASES = {  # rows, sizes, width, rank, blocks
    "whole tiles": (256, [128, 128], 256, 16, 2),
    "odd sizes, rows of no group": (304, [130, 0, 9, 1, 70], 128, 16, 3),
    "one block": (200, [3, 150, 47], 256, 32, 1),
    "more blocks than tiles": (64, [0, 5, 0], 128, 16, 40),
    "nothing routed": (64, [0, 0], 128, 16, 2),
}


@pytest.mark.parametrize("case", CASES)
def test_interpreted(case, normal, relative_error, capfd):
    rows, sizes, width, rank, blocks = CASES[case]
    groups = len(sizes)
    x, factor, low = normal(0, (rows, width), (groups, rank, width), (rows, rank), dtype=jnp.bfloat16)
    wide_x, wide_factor, wide_low = (np.asarray(array, np.float64) for array in (x, factor, low))
    product, gradient = np.zeros((rows, rank)), np.zeros((groups, width, rank))
    for e, start in enumerate(np.cumsum(sizes) - sizes):
        mine = slice(start, start + sizes[e])
        product[mine], gradient[e] = wide_x[mine] @ wide_factor[e].T, wide_x[mine].T @ wide_low[mine]
    tiles = NarrowTiles(columns=64, blocks=blocks, staged=True)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        got = jax.block_until_ready(narrow_products(x, factor, low, jnp.asarray(sizes, jnp.int32), tiles))
    assert "RACE" not in capfd.readouterr().out
    for ours, truth in zip(got, (product, gradient), strict=True):
        assert (ours.shape, ours.dtype) == (truth.shape, jnp.float32)
        if truth.any():
            assert relative_error(ours, truth) <= 1e-6  # f32 sums of exact products
        else:
            assert not np.asarray(ours).any()


def test_shapes_that_the_kernel_does_not_have():
    x, factor, low = (jnp.zeros(shape, jnp.bfloat16) for shape in ((64, 512), (2, 16, 512), (64, 12)))
    with pytest.raises(ValueError, match="R=12 must be multiples of 8, R at most 32, N=512 a multiple of 512"):
        narrow_products(x, factor, low, jnp.asarray([1, 2]), NarrowTiles())
