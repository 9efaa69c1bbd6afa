"""The Hopper kernels that gate grouped products, in the GPU interpreter, with race detection, against float64."""

import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._tiles import HALF
from pallas_kernels.grouped_matmul import mosaic_gpu
from pallas_kernels.grouped_matmul.mosaic_gpu_work import places_of_rows, row_items

ROUTINGS = {  # rows, sizes, (D, F)
    "full tiles": (256, [128, 128], (128, 128)),
    "empty, odd sizes, rows of no group": (210, [130, 0, 70], (64, 320)),
    "small groups": (150, [3, 50, 9, 1, 70], (64, 64)),
    "one row": (1, [0, 1, 0], (64, 64)),
    "odd widths": (100, [37, 63], (70, 9)),
}
RANK = 64


def wide(*arrays):
    return jax.tree.map(lambda array: np.asarray(array, np.float64), arrays)


def oracle(x, low, gates, ups, weight, sizes):
    """gate, up and the gated product in f64."""
    x, low, gates, ups, weight = wide(x, low, gates, ups, weight)
    gate, up = (np.zeros((len(x), ws[0].shape[1])) for ws in (gates, ups))
    for e, start in enumerate(np.cumsum(sizes) - sizes):
        rows = slice(start, start + sizes[e])
        for out, (base, more) in ((gate, gates), (up, ups)):
            out[rows] = x[rows] @ base[e].T + low[rows] @ more[e].T
    return gate, up, gated(gate, up)[1] * weight[:, None]


def gated(gate, up):
    sigmoid = 1 / (1 + np.exp(-gate))
    return sigmoid, gate * sigmoid * up


def backward_oracle(ds, ws, gate, up, weight, sizes):
    """Gradients of gate and up, the gated product, and the gradient of weight in f64."""
    ds, ws, gate, up, weight = wide(ds, ws, gate, up, weight)
    d = np.zeros_like(gate)
    for e, start in enumerate(np.cumsum(sizes) - sizes):
        rows = slice(start, start + sizes[e])
        d[rows] = sum(one[rows] @ w[e] for one, w in zip(ds, ws, strict=True))
    (sigmoid, product), scaled = gated(gate, up), d * weight[:, None]
    dgate = scaled * up * sigmoid * (1 + gate * (1 - sigmoid))
    return dgate, scaled * gate * sigmoid, product * weight[:, None], np.sum(d * product, axis=1)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_interpreted_forward(routing, normal, relative_error, capfd, races):
    rows, sizes, (width, out) = ROUTINGS[routing]
    groups, used = len(sizes), sum(sizes)
    shapes = [(rows, width), (rows, RANK), *[(groups, out, width)] * 2, *[(groups, out, RANK)] * 2, (rows,)]
    x, low, gate, up, gate_more, up_more, weight = normal(0, *shapes, dtype=jnp.bfloat16)
    gates, ups = (gate * 0.1, gate_more * 0.1), (up * 0.1, up_more * 0.1)
    weight = weight.astype(jnp.float32)
    exact = oracle(x, low, gates, ups, weight, sizes)
    x, low = (array.at[used:].set(jnp.nan) for array in (x, low))
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        got = mosaic_gpu.gated((x, low), gates, ups, weight, jnp.asarray(sizes, jnp.int32), staged=True)
        got = jax.block_until_ready(got)
    assert races(capfd.readouterr().out) == []
    # one rounding of f32 sums to 8 bits, of the product three: its own, gate's and up's
    for ours, truth, roundings in zip(got, exact, (1, 1, 3), strict=True):
        assert (ours.shape, ours.dtype) == (truth.shape, jnp.bfloat16)
        assert relative_error(ours, truth) <= 0.6 * roundings * float(jnp.finfo(jnp.bfloat16).eps)
        assert not np.asarray(ours, np.float32)[used:].any()


@pytest.mark.parametrize("routing", ROUTINGS)
def test_interpreted_backward(routing, normal, relative_error, capfd, races):
    rows, sizes, (width, out) = ROUTINGS[routing]
    groups, used = len(sizes), sum(sizes)
    shapes = [(rows, width), (rows, RANK), (groups, width, out), (groups, RANK, out), *[(rows, out)] * 2, (rows,)]
    dy, dlow, w, a, gate, up, weight = normal(1, *shapes, dtype=jnp.bfloat16)
    gate, up = (array.at[used:].set(0) for array in (gate, up))
    weight = weight.astype(jnp.float32)
    exact = backward_oracle((dy, dlow), (w, a), gate, up, weight, sizes)
    dy, dlow = (array.at[used:].set(jnp.nan) for array in (dy, dlow))
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        got = mosaic_gpu.gated_backward(
            (dy, dlow), (w, a), gate, up, weight, jnp.asarray(sizes, jnp.int32), staged=True
        )
        got = jax.block_until_ready(got)
    assert races(capfd.readouterr().out) == []
    for ours, truth in zip(got[:3], exact[:3], strict=True):
        assert (ours.shape, ours.dtype) == (truth.shape, jnp.bfloat16)
        assert relative_error(ours, truth) <= 0.6 * float(jnp.finfo(jnp.bfloat16).eps)  # f32, rounded once
        assert not np.asarray(ours, np.float32)[used:].any()
    assert relative_error(got[3], exact[3]) <= 1e-5  # f32 sums


@pytest.mark.parametrize("seed", range(6))
def test_each_row_is_found_in_the_table(seed):
    rng = np.random.default_rng(seed)
    sizes = rng.choice([0, 1, 2, 5, 7, 31, 63, 64, 65, 127, 128, 129, 300, 2500], int(rng.integers(1, 9)))
    rows, columns = int(sizes.sum() + rng.choice([0, 1, 200])) or 1, int(rng.integers(1, 6))
    on_device = jnp.asarray(sizes, jnp.int32)
    table = jax.jit(functools.partial(row_items, rows=rows, columns=columns))(on_device)
    lines, half, place = (np.asarray(a) for a in places_of_rows(table, on_device, rows, columns))
    table = np.asarray(table)
    for column in range(columns):
        line = table[lines[:, column]]
        first, stored = line[np.arange(rows), 2 + half], line[np.arange(rows), 4 + half]
        assert (line[:, 1] == column).all()
        assert (first + place == np.arange(rows)).all()
        assert ((place >= 0) & (place < np.minimum(stored, HALF))).all()
