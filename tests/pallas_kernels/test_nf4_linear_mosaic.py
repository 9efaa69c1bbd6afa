"""The NF4 kernels for Hopper in the GPU interpreter, with race detection, and what lowers for the GPU.

The interpreter runs no inline assembly: `staged=True` decodes by array operations instead. It runs clusters one after
another, so that no flags stand for what one block waits for. Blocks of a cluster it runs at once and knows their
barriers, but not each other's shared memory: there parts of a sum are left in memory. The assembly itself is checked
on the GPU by scripts/check_nf4.py.
"""

import math

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.lora_linear import explain as lora_explain
from pallas_kernels.lora_linear import lora_linears
from pallas_kernels.lora_linear.reference import Projection
from pallas_kernels.nf4_linear import NF4Weight, dequantize, explain, join, mosaic_gpu, nf4_linear
from pallas_kernels.nf4_linear.cases import random_weight
from pallas_kernels.nf4_linear.mosaic_gpu_join import write_edge
from pallas_kernels.nf4_linear.mosaic_gpu_shares import Shares
from pallas_kernels.nf4_linear.mosaic_gpu_turned_tiles import TurnedTiles, suitable_turned


def make_weight(shape: tuple[int, int], *, leading: tuple[int, ...] = (), double_quant: bool = True) -> NF4Weight:
    """Every byte occurs, and scales of all sizes."""
    rng = np.random.default_rng(shape[0])
    size = math.prod(shape)
    blocks = size // 64
    codes = np.resize(rng.permutation(256).astype(np.uint8), (*leading, size // 2))
    if not double_quant:
        return NF4Weight(codes, rng.lognormal(0, 5, (*leading, blocks)).astype(np.float32), None, None, shape)
    absmax = rng.integers(0, 256, (*leading, blocks), dtype=np.uint8)
    nested = rng.lognormal(0, 5, (*leading, -(-blocks // 256))).astype(np.float32)
    return NF4Weight(codes, absmax, nested, rng.normal(size=leading).astype(np.float32), shape)


def interpreted(w: NF4Weight, dtype: str, capfd: pytest.CaptureFixture, **options) -> np.ndarray:
    arrays = (None if x is None else jnp.asarray(x) for x in (w.codes, w.absmax, w.nested_absmax, w.offset))
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        got = np.asarray(mosaic_gpu.dequantize(*arrays, w.shape, dtype, staged=True, **options))
    assert "RACE" not in capfd.readouterr().out  # the interpreter goes on after it has said so
    return got


CASES = {
    "a tile of long rows": (make_weight((4, 2048)), "bfloat16"),
    "rows of several tiles, two nested blocks": (make_weight((16, 3072)), "bfloat16"),
    "one block a row": (make_weight((256, 64)), "float16"),
    "no double quantization": (make_weight((64, 384), double_quant=False), "bfloat16"),
    "stacked layers": (make_weight((16, 1024), leading=(2, 3)), "bfloat16"),
}


@pytest.mark.parametrize("name", CASES)
def test_interpreted_dequantization_is_exact(name: str, capfd: pytest.CaptureFixture) -> None:
    w, dtype = CASES[name]
    got, want = interpreted(w, dtype, capfd), np.asarray(dequantize(w, dtype))
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got.view(np.uint16), want.view(np.uint16))  # bit for bit: no tolerance


def test_a_wider_result_has_the_weight_in_its_first_columns(capfd: pytest.CaptureFixture) -> None:
    w = make_weight((64, 256))
    got = interpreted(w, "bfloat16", capfd, room=32)
    assert got.shape == (64, 256 + 32)
    np.testing.assert_array_equal(got[:, :256], dequantize(w))


def test_joining_is_concatenating() -> None:
    w, more = make_weight((64, 256)), jnp.ones((64, 16), jnp.bfloat16)
    np.testing.assert_array_equal(join(w, more), np.concatenate([dequantize(w), more], axis=1))


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pallas_kernels._platform.compute_capability", lambda: (9, 0))
    monkeypatch.setattr("pallas_kernels._platform.miscompiles", lambda: None)


def lowered(function, *args) -> str:
    return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.usefixtures("hopper")
def test_the_kernels_of_the_gpu_lower() -> None:
    """What the interpreter cannot run, by the public functions, inside a scan over layers and under vmap too."""
    w = make_weight((64, 2048))
    stacked = make_weight((16, 1024), leading=(3,))
    assert lowered(dequantize, w).count("@mosaic_gpu_v2") == 1
    assert lowered(dequantize, stacked).count("@mosaic_gpu_v2") == 1
    assert lowered(jax.vmap(dequantize), stacked).count("@mosaic_gpu_v2") == 1
    text = lowered(join, w, jnp.zeros((64, 16), jnp.bfloat16))
    assert text.count("@mosaic_gpu_v2") == 2  # the weight, and what is written beside it in place
    assert "concatenate" not in text
    assert "stablehlo.concatenate" not in text

    def step(x: jax.Array, ws: NF4Weight) -> jax.Array:
        def layer(h: jax.Array, w: NF4Weight) -> tuple[jax.Array, None]:
            return nf4_linear(h, w) @ jnp.ones((16, 1024), h.dtype), None

        return jax.grad(lambda x: jax.lax.scan(jax.checkpoint(layer), x, ws)[0].var())(x)

    assert lowered(step, jnp.ones((8, 1024), jnp.bfloat16), stacked).count("@mosaic_gpu_v2") >= 2


def test_refusals_say_why(monkeypatch: pytest.MonkeyPatch, hopper: None) -> None:
    assert explain() == explain(make_weight((64, 2048))) == "nf4_linear: mosaic_gpu"
    for w, dtype, reason in (
        (make_weight((64, 2048)), "float32", "it makes bfloat16 or float16, and the dtype is float32"),
        (make_weight((64, 96)), "bfloat16", "a row must be whole blocks of 64, and has 96 elements"),
        (make_weight((6, 2048)), "bfloat16", "the rows of a weight of width 2048 must be a multiple of 4, and are 6"),
        (make_weight((128, 64), leading=(2,)), "bfloat16", "stacked weights must have a multiple of 16384 elements"),
        (NF4Weight(np.zeros(512, np.uint8), np.ones(32, np.float32), None, None, (1, 1024), 32), "bfloat16", "blocks"),
    ):
        assert explain(w, dtype).startswith(f"nf4_linear: xla (mosaic_gpu refuses: {reason}")
        with pytest.raises(NotImplementedError, match=f"'mosaic_gpu' refuses: {reason}"):
            dequantize(w, dtype, implementation="mosaic_gpu")
    monkeypatch.setattr("jax.device_count", lambda: 2)
    assert "it runs on one device, as XLA cannot split its work, and there are 2" in explain()
    monkeypatch.setattr("pallas_kernels._platform.compute_capability", lambda: (8, 0))
    assert "it needs Hopper (compute capability 9.0); this GPU has (8, 0)" in explain()


def test_random_weights_of_real_models_are_accepted(hopper: None) -> None:
    for shape in ((14336, 4096), (4096, 14336), (1024, 4096), (28672, 8192), (18944, 3584), (896, 4864), (256, 2048)):
        assert explain(jax.eval_shape(lambda shape=shape: random_weight(jax.random.key(0), shape))) == (
            "nf4_linear: mosaic_gpu"
        )


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize(
    ("shape", "rows", "rank", "tiles"),
    [
        ((256, 384), 70, 0, TurnedTiles(rows=64, stages=2, unit=None, pair=False, blocks=3, staged=True)),  # ragged
        ((256, 256), 200, 16, TurnedTiles(rows=128, stages=3, blocks=4, staged=True)),  # blocks share x's tiles
        ((384, 128), 64, 80, TurnedTiles(rows=64, pair=False, blocks=1, staged=True)),  # two steps and an adapter's two
        ((256, 1024), 100, 16, TurnedTiles(rows=64, blocks=6, staged=True)),  # tiles of two parts and of three
        ((512, 512), 128, 80, TurnedTiles(rows=64, unit=4, pair=False, blocks=3, staged=True)),
        ((256, 512), 200, 16, TurnedTiles(rows=128, unit=None, parts=2, staged=True)),  # clusters of two by two
        ((512, 512), 100, 80, TurnedTiles(rows=128, unit=None, parts=4, pair=False, staged=True)),
        ((512, 256), 70, 0, TurnedTiles(rows=64, unit=None, parts=2, pair=False, staged=True)),  # eight clusters of two
    ],
)
def test_interpreted_products(
    shape: tuple[int, int],
    rows: int,
    rank: int,
    tiles: TurnedTiles,
    transpose: bool,
    capfd: pytest.CaptureFixture,
) -> None:
    w = random_weight(jax.random.key(0), shape)
    depth, width = shape if transpose else shape[::-1]
    draws = jax.random.split(jax.random.key(1), 3)
    x, low = (jax.random.normal(key, (rows, n), jnp.bfloat16) for key, n in zip(draws, (depth, rank), strict=False))
    up = jax.random.normal(draws[2], (rank, width) if transpose else (width, rank), jnp.bfloat16)
    packed = (w.codes, w.absmax, w.nested_absmax, w.offset)
    extra = (low, up) if rank else None
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        got = mosaic_gpu.fused(x, packed, shape, transpose=transpose, extra=extra, tiles=tiles)
        got = np.asarray(got, np.float64)
    # It knows nothing of the flag between a cluster's part of a sum and another's reading it: clusters run one by one.
    races = capfd.readouterr().out.split("RACE DETECTED")[1:]
    flags = isinstance(tiles, TurnedTiles) and tiles.parts == 1
    assert not [race for race in races if not flags or "(leave_part)" not in race or "(add_part)" not in race]
    dense = np.asarray(dequantize(w), np.float64)
    want = np.asarray(x, np.float64) @ (dense if transpose else dense.T)
    want += np.asarray(low, np.float64) @ np.asarray(up if transpose else up.T, np.float64)
    # The sum is in f32 and rounded once to bf16: at most half an ulp, 2^-9 of each element, and some f32 ulps.
    np.testing.assert_allclose(got, want, rtol=2**-8, atol=1e-5 * np.abs(want).max())


def test_turned_tiles_keep_the_multiprocessors_at_work() -> None:
    for rows, depth, width, tiles in (
        (512, 4096, 14336, TurnedTiles(unit=None)),  # two rounds of whole tiles: a cut takes longer than what it spares
        (512, 14336, 4096, TurnedTiles(unit=None, parts=2, pair=False)),  # 64 clusters of two; of four, 31 fit
        (1024, 14336, 4096, TurnedTiles(unit=None)),
        (256, 14336, 4096, TurnedTiles(unit=56)),
        (128, 14336, 4096, TurnedTiles(rows=128, stages=8, unit=56)),
        (512, 13824, 5120, TurnedTiles()),  # 40 tiles, for which no number of parts fills the multiprocessors
        (100, 4096, 14336, TurnedTiles(rows=128, stages=8, unit=None)),
        (64, 4096, 14336, TurnedTiles(rows=64, stages=8, unit=None)),
        (64, 128, 256, TurnedTiles(rows=64, stages=8)),  # two steps, which cannot be parted
        (2048, 4096, 896, TurnedTiles(unit=None, parts=2, pair=False)),
    ):
        assert suitable_turned(rows, depth, width) == tiles, (rows, depth, width)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize(("unit", "parts"), [(2, 1), (None, 1), (None, 2)])
def test_the_turned_product_lowers(transpose: bool, unit: int | None, parts: int) -> None:
    w = random_weight(jax.random.key(0), (256, 256))
    x, low, up = (
        jnp.ones((70, 256), jnp.bfloat16),
        jnp.ones((70, 16), jnp.bfloat16),
        jnp.ones((256, 16), jnp.bfloat16),
    )
    extra = low, up.T if transpose else up
    packed = (w.codes, w.absmax, w.nested_absmax, w.offset)

    def product(x: jax.Array) -> jax.Array:
        tiles = TurnedTiles(unit=unit, parts=parts)
        return mosaic_gpu.fused(x, packed, w.shape, transpose=transpose, extra=extra, tiles=tiles)

    text = lowered(product, x)
    assert text.count("@mosaic_gpu_v2") == 1
    assert "stablehlo.dot_general" not in text  # the adapter's product is the kernel's too
    for tiles, reason in (
        (TurnedTiles(unit=6), "the sum's length 256 of 384"),
        (TurnedTiles(unit=1), "of 64 and of 128"),
        (TurnedTiles(parts=4), "of 64 and of 128"),
        (TurnedTiles(rows=64, parts=4), "in 4 parts"),
        (TurnedTiles(parts=2, stages=3), "3 stages at least 4"),
    ):
        with pytest.raises(ValueError, match=reason):
            mosaic_gpu.fused(x, packed, w.shape, transpose=transpose, tiles=tiles)


def test_shares_are_even_and_know_where_a_step_is() -> None:
    for items, steps, unit, blocks, tiles in (
        (112, 64, 2, 66, 3),
        (32, 224, 2, 66, 2),
        (32, 224, 112, 66, 1),
        (3, 4, 4, 8, 1),  # whole tiles
        (5, 6, 2, 7, 2),
        (2, 8, 2, 66, 1),
    ):
        shares = Shares(items, steps, unit, blocks)
        starts = [shares.start(piece) for piece in range(shares.pieces + 1)]
        lengths = np.diff(starts)
        assert starts[-1] == items * steps
        assert lengths.max() - lengths.min() <= unit
        assert lengths.max() == shares.longest
        assert shares.tiles == tiles
        assert shares.cut == any(start % steps for start in starts)
        own = np.repeat(np.arange(shares.pieces), lengths)
        np.testing.assert_array_equal(jax.vmap(shares.piece_of)(jnp.arange(items * steps)), own)
        np.testing.assert_array_equal(jax.vmap(shares.start)(jnp.arange(shares.pieces + 1)), starts)


@pytest.mark.usefixtures("hopper")
def test_few_rows_decode_inside_the_product() -> None:
    w = random_weight(jax.random.key(0), (256, 256))

    def gradient(x: jax.Array) -> jax.Array:
        return jax.grad(lambda x: nf4_linear(x, w).var())(x)

    for rows, products in ((7, 0), (64, 0), (mosaic_gpu.FUSED_ROWS, 0), (mosaic_gpu.FUSED_ROWS + 1, 2)):
        text = lowered(gradient, jnp.ones((rows, 256), jnp.bfloat16))
        assert text.count("@mosaic_gpu_v2") == 2
        assert text.count("stablehlo.dot_general") == products


@pytest.mark.usefixtures("hopper")
def test_layers_with_adapters_decode_inside_their_products_or_beside_the_adapters() -> None:
    ws = [random_weight(jax.random.key(0), (out, 256)) for out in (512, 256)]
    layers = [Projection(w, jnp.ones((16, 256)), jnp.ones((w.shape[0], 16)), jnp.float32(2)) for w in ws]
    layers[1] = layers[1]._replace(a=None, b=None)

    def gradient(x: jax.Array) -> jax.Array:
        return jax.grad(lambda x: sum(y.var() for y in lora_linears(x, layers)))(x)

    few, many = (lowered(gradient, jnp.ones((rows, 256), jnp.bfloat16)) for rows in (64, 4096))
    assert few.count("@mosaic_gpu_v2") == 4  # each weight in each direction; adapters' few rows are XLA's
    # Each weight in each direction; the adapted product in each, the first with the low product; that of the gradient.
    assert many.count("@mosaic_gpu_v2") == 7
    assert "dynamic_update_slice" not in few + many  # by kernels too, as XLA's fails on what a kernel has just made
    assert lora_explain(ws) == "lora_linear: mosaic_gpu"
    assert lora_explain(ws, rows=8) == "lora_linear: mosaic_gpu"
    assert "at least 1024 rows, and x has 8" in lora_explain([jnp.ones((8, 8))], rows=8)


def test_vmap_over_rows_and_over_weights_is_one_call_or_a_loop(hopper: None) -> None:
    w = random_weight(jax.random.key(0), (128, 128))
    x = jnp.ones((3, 8, 128), jnp.bfloat16)
    text = lowered(jax.vmap(nf4_linear, in_axes=(0, None)), x, w)
    assert text.count("@mosaic_gpu_v2") == 1
    assert "stablehlo.while" not in text
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), w)
    assert "stablehlo.while" in lowered(jax.vmap(nf4_linear), x, stacked)


@pytest.mark.parametrize(("whole", "more"), [((24, 48), (24, 16)), ((520, 64), (520, 48)), ((288, 768), (288, 272))])
def test_interpreted_edge_is_written_in_place(whole, more, capfd: pytest.CaptureFixture) -> None:
    rng = np.random.default_rng(0)
    large, small = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in (whole, more))
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        got = write_edge(large, small)
    assert "RACE" not in capfd.readouterr().out
    np.testing.assert_array_equal(got, np.concatenate([large[:, : -more[1]], small], axis=1))
