"""The Hopper kernels of the grouped product in the GPU interpreter, with race detection, and their table of tiles.

The interpreter knows no two views of the same shared memory: `staged=True` takes the same one for both, and few slots.
What the real kernels' schedule adds is checked on the GPU by scripts/check_grouped_matmul.py.
"""

import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._tiles import BAND, HALF, ROWS, Tiles, stores_behind, walk
from pallas_kernels.grouped_matmul import explain, grouped_matmul, mosaic_gpu
from pallas_kernels.grouped_matmul.mosaic_gpu_rows import group_rows
from pallas_kernels.grouped_matmul.mosaic_gpu_weights import group_weights
from pallas_kernels.grouped_matmul.mosaic_gpu_work import COLUMN, COUNT, FIRST, GROUP, STORED, row_items, starts_of

ROUTINGS = {  # rows, sizes, (D, F)
    "full tiles": (256, [128, 128], (128, 256)),
    "empty, odd sizes, rows of no group": (210, [130, 0, 70], (64, 320)),
    "all to one": (200, [0, 0, 200, 0], (192, 64)),
    "small groups": (150, [3, 50, 9, 1, 70], (64, 64)),
    "one row": (1, [0, 1, 0], (64, 64)),
    "nothing routed": (70, [0, 0], (64, 64)),
    "odd widths": (100, [37, 63], (70, 9)),
    "odd rows, the last ones of no group": (131, [64, 65], (64, 128)),
}


@pytest.mark.parametrize(
    ("routing", "dtype"), [*((routing, jnp.bfloat16) for routing in ROUTINGS), ("small groups", jnp.float16)]
)
def test_interpreted_kernels(routing, dtype, normal, relative_error, capfd, grouped_oracle, races):
    rows, sizes, (width, out) = ROUTINGS[routing]
    x, w, dy = normal(0, (rows, width), (len(sizes), out, width), (rows, out), dtype=dtype)
    exact = grouped_oracle(x, w, sizes, dy)
    used = sum(sizes)
    x, dy = (array.at[used:].set(jnp.nan) for array in (x, dy))  # what no group owns never matters
    on_device = jnp.asarray(sizes, jnp.int32)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        got = (
            mosaic_gpu.forward(x, w, on_device, staged=True),
            mosaic_gpu.backward_x(dy, w, on_device, staged=True),
            mosaic_gpu.backward_w(x, dy, on_device, dtype, staged=True),
        )
        got = jax.block_until_ready(got)
    said = capfd.readouterr().out
    assert races(said) == []
    if routing == "full tiles":
        assert "RACE" not in said
    for ours, truth in zip(got, exact, strict=True):
        assert (ours.shape, ours.dtype) == (truth.shape, dtype)
        # rounding the f32 sums once, to 8 or 11 bits
        assert relative_error(ours, truth) <= 0.6 * float(jnp.finfo(dtype).eps)
    assert not np.asarray(got[0], np.float32)[used:].any()
    assert not np.asarray(got[1], np.float32)[used:].any()
    assert not np.asarray(got[2], np.float32)[np.asarray(sizes) == 0].any()


@pytest.mark.parametrize("routing", ["empty, odd sizes, rows of no group", "small groups"])
def test_interpreted_sums_of_products(routing, normal, relative_error, capfd, grouped_oracle, races):
    """One kernel sums products of different depths, in the base's orientation and in that of the gradient."""
    rows, sizes, (width, out) = ROUTINGS[routing]
    x, w, low, up, dy = normal(
        4,
        (rows, width),
        (len(sizes), out, width),
        (rows, 128),
        (len(sizes), out, 128),
        (rows, out),
        dtype=jnp.bfloat16,
    )
    on_device = jnp.asarray(sizes, jnp.int32)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        y = mosaic_gpu.products((x, low), (w, up), on_device, transposed=True, staged=True)
        back = mosaic_gpu.products((dy, dy), (up, up), on_device, transposed=False, staged=True)
        y, back = jax.block_until_ready((y, back))
    assert races(capfd.readouterr().out) == []
    base, low_side = grouped_oracle(x, w, sizes, dy), grouped_oracle(low, up, sizes, dy)
    rounding = 0.6 * float(jnp.finfo(jnp.bfloat16).eps)  # the f32 sum is rounded once
    assert relative_error(y, base[0] + low_side[0]) <= rounding
    assert relative_error(back, 2 * low_side[1]) <= rounding


@pytest.mark.parametrize("routing", ["full tiles", "small groups"])
def test_interpreted_pairs_of_blocks(routing, normal, relative_error, capfd, grouped_oracle, races):
    """Blocks of a cluster that share what they read; of an odd number of tiles, one is empty."""
    rows, sizes, (width, out) = ROUTINGS[routing]
    x, w, dy = normal(3, (rows, width), (len(sizes), out, width), (rows, out), dtype=jnp.bfloat16)
    rows8 = -rows % 8
    tiles = Tiles(columns=64 if out == 64 else 128, stages=3, blocks=4, pair=True, staged=True)
    on_device = jnp.asarray(sizes, jnp.int32)
    padded = (jnp.pad(array, ((0, rows8), (0, 0))) for array in (x, dy))
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        y = group_rows((x,), (w,), on_device, transposed=True, tiles=tiles)
        dx = group_rows((dy,), (w,), on_device, transposed=False, tiles=tiles)
        dw = group_weights(*padded, on_device, dtype=jnp.bfloat16, tiles=tiles)
        got = jax.block_until_ready((y, dx, dw))
    assert races(capfd.readouterr().out) == []
    for ours, truth in zip(got, grouped_oracle(x, w, sizes, dy), strict=True):
        assert relative_error(ours, truth) <= 0.6 * float(jnp.finfo(jnp.bfloat16).eps)


@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        ({"depth": 32, "stages": 4}, jnp.bfloat16),
        ({"stores": 3}, jnp.bfloat16),
        ({"stores": 3, "late": False}, jnp.bfloat16),
        ({"pair": True, "blocks": 4}, jnp.bfloat16),
        ({"depth": 32, "stores": 4}, jnp.float32),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # inf - inf, in the interpreter's NumPy
def test_interpreted_forms_of_the_weights_gradient(form, dtype, normal, relative_error, capfd, grouped_oracle, races):
    """A tile is stored in 4 or 8 parts over fewer slots; inf and NaN in a group's rows stay in its own gradient."""
    sizes, spoiled = [3, 130, 0, 9, 1, 33, 8], [3, 5]
    x, dy = normal(5, (184, 256), (184, 64), dtype=jnp.bfloat16)
    exact = grouped_oracle(x, jnp.zeros((len(sizes), 64, 256)), sizes, dy)[2]
    start = np.cumsum([0, *sizes])
    x = x.at[start[3] : start[4]].set(jnp.inf).at[start[5] : start[6]].set(jnp.nan)
    dy = dy.at[start[3] : start[4]].set(jnp.nan).at[start[5] : start[6]].set(jnp.inf)
    tiles = Tiles(**{"columns": 256, "stages": 3, "blocks": 2, "staged": True} | form)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        got = group_weights(x, dy, jnp.asarray(sizes, jnp.int32), dtype=dtype, tiles=tiles)
        got = np.asarray(got.astype(jnp.float32))
    assert races(capfd.readouterr().out) == []
    assert np.isnan(got[spoiled]).all()
    clean = [group for group in range(len(sizes)) if group not in spoiled]
    # rounding the f32 sums once; sums of exact products in f32
    assert relative_error(got[clean], exact[clean]) <= (
        0.6 * float(jnp.finfo(dtype).eps) if dtype == jnp.bfloat16 else 1e-6
    )


@pytest.mark.parametrize("stores", range(1, 6))
@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
def test_a_part_waits_for_the_last_store_from_its_buffer(count, stores):
    buffers = [index % stores for _ in range(3) for index in range(count)]
    for place in range(2 * count, 3 * count):
        last = max((i for i in range(place) if buffers[i] == buffers[place]), default=-1)
        assert stores_behind(place % count, count, stores) == place - 1 - last


@pytest.mark.parametrize(
    ("form", "message"), [({"depth": 48}, "must be 32 or 64"), ({"stages": 2}, "at least 3 slots")]
)
def test_forms_that_the_weights_gradient_does_not_have(form, message):
    with pytest.raises(ValueError, match=message):
        group_weights(*[jnp.zeros((64, 64), jnp.bfloat16)] * 2, jnp.ones(1), dtype=jnp.bfloat16, tiles=Tiles(**form))


def test_f32_weights_get_f32_gradients(normal, relative_error, grouped_oracle):
    x, dy = normal(1, (100, 64), (100, 64), dtype=jnp.bfloat16)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        dw = mosaic_gpu.backward_w(x, dy, jnp.asarray([30, 70], jnp.int32), jnp.dtype(jnp.float32), staged=True)
    assert dw.dtype == jnp.float32
    exact = grouped_oracle(x, jnp.zeros((2, 64, 64)), [30, 70], dy)[2]
    assert relative_error(dw, exact) <= 1e-6  # f32 sums of exact products


def test_vmap_runs_one_product_after_the_other(normal, relative_error):
    x, w = normal(2, (2, 70, 64), (1, 64, 64), dtype=jnp.bfloat16)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        y = jax.vmap(lambda x: mosaic_gpu.forward(x, w, jnp.asarray([70], jnp.int32), staged=True))(x)
    exact = np.asarray(x, np.float64) @ np.asarray(w[0], np.float64).T
    assert relative_error(y, exact) <= 0.6 * float(jnp.finfo(jnp.bfloat16).eps)


@pytest.mark.parametrize(
    ("rows", "groups", "out", "width", "w_dtype"),
    [(1024, 8, 512, 256, jnp.bfloat16), (77, 3, 100, 200, jnp.float32), (8, 64, 768, 2048, jnp.bfloat16)],
)
def test_the_kernels_of_the_gpu_lower(rows, groups, out, width, w_dtype, monkeypatch):
    """Inside what models have around them: a loop over layers, each recomputed for its gradient."""
    monkeypatch.setattr("pallas_kernels._platform.compute_capability", lambda: (9, 0))
    x = jax.ShapeDtypeStruct((rows, width), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((2, groups, out, width), w_dtype)
    sizes = jax.ShapeDtypeStruct((groups,), jnp.int32)

    def loss(x, w, sizes):
        def layer(x, w):
            y = grouped_matmul(x, w, sizes, implementation="mosaic_gpu")
            return x + jnp.sum(y, axis=1, keepdims=True), None

        return jnp.sum(jax.lax.scan(jax.checkpoint(layer), x, w)[0].astype(jnp.float32))

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1)))
    lowered = gradients.trace(x, w, sizes).lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count("@mosaic_gpu_v2") == 3  # recomputed for nothing: gradients need no result


@pytest.mark.parametrize("seed", range(8))
def test_every_row_and_column_is_stored_once_or_alike(seed):
    rng = np.random.default_rng(seed)
    groups = int(rng.integers(1, 9))
    sizes = rng.choice([0, 1, 2, 5, 7, 8, 31, 63, 64, 65, 127, 128, 129, 300, 2500], groups)
    rows, columns = int(sizes.sum() + rng.choice([0, 1, 200])) or 1, int(rng.integers(1, 6))
    table = jax.jit(functools.partial(row_items, rows=rows, columns=columns))(jnp.asarray(sizes, jnp.int32))
    table = np.asarray(table)
    count = table[0, COUNT]
    assert count <= len(table)
    sizes = [*sizes, rows - sizes.sum()]
    owner = np.repeat(np.arange(groups + 1), sizes)
    stored = np.zeros((rows, columns), bool)
    for line in table[:count]:
        for half in range(2):
            first, amount = line[FIRST + half], line[STORED + half]
            assert amount in (0, 1, 2, 4, 8, 16, 32, 64)
            assert (owner[first : first + amount] == line[GROUP]).all()
            stored[first : first + amount, line[COLUMN]] = True
    assert stored.all()
    # no work in vain: no more tiles than whole ones and an own last one for each group
    assert count == columns * sum(-(-size // ROWS) for size in sizes)


def test_walk_visits_every_tile_in_bands():
    for rows, columns in ((1, 1), (3, 5), (BAND, 2), (BAND + 1, 3), (5 * BAND - 1, 4)):
        index = jnp.arange(rows * columns)
        row, column = walk(index, jnp.full_like(index, rows), jnp.full_like(index, columns))
        assert len(set(zip(row.tolist(), column.tolist()))) == rows * columns
        assert (np.diff(np.asarray(row) // BAND) >= 0).all()


def test_starts_of_groups():
    np.testing.assert_array_equal(starts_of(jnp.asarray([3, 0, 13])), [0, 3, 3, 16])


@pytest.mark.parametrize("width", [64, 192, 256, 320, 768, 1024, 2048, 2880, 14336])
def test_tiles_fit_and_waste_little(width):
    tiles = mosaic_gpu.tiles_of(width, staged=False)
    assert -(-width // tiles.columns) * tiles.columns <= 1.2 * width
    slots = 2 * 64 * (2 * HALF + tiles.columns) * tiles.stages
    assert slots + 2 * 2 * HALF * 128 <= 231_000  # of 232,448 bytes, with barriers
    assert tiles.stages >= 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": jnp.float32}, "it needs bfloat16 or float16, and x is float32"),
        ({"groups": 0}, r"there is nothing to multiply with weights of shape \(0, 4, 8\)"),
        ({}, "it needs an NVIDIA GPU"),
    ],
)
def test_refusals(change, message):
    x, w = jnp.ones((2, 8), change.get("dtype", jnp.bfloat16)), jnp.ones((change.get("groups", 3), 4, 8))
    with pytest.raises(NotImplementedError, match=f"'mosaic_gpu' refuses: {message}"):
        grouped_matmul(x, w, jnp.zeros(len(w), jnp.int32), implementation="mosaic_gpu")


def test_hopper_picks_ours(monkeypatch):
    x, w = jax.ShapeDtypeStruct((16, 64), jnp.bfloat16), jax.ShapeDtypeStruct((2, 64, 64), jnp.bfloat16)
    monkeypatch.setattr("pallas_kernels._platform.compute_capability", lambda: (9, 0))
    assert explain(x, w) == "grouped_matmul: mosaic_gpu"
    monkeypatch.setattr("pallas_kernels._platform.compute_capability", lambda: (10, 0))
    assert explain(x, w).startswith("grouped_matmul: xla (mosaic_gpu refuses: it needs Hopper")
