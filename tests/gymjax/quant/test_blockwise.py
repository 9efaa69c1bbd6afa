"""8-bit block-wise quantization against its definition in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gymjax.quant.blockwise import BLOCK, MAPS, dequantize, quantize, zeros
from pallas_kernels.nf4_linear import DYNAMIC_CODE

SHAPES = [((512,), 0), ((3, 256), 0), ((5, 100), 0), ((2, 7, 13), 1), ((2, 4, 512), 1), ((2, 300, 16), 1), ((1,), 0)]


def by_definition(x, values, leading):
    """Codes and absmax of every block, tensor by tensor, in f64."""
    codes, absmax = [], []
    for tensor in x.reshape(-1, *x.shape[leading:]) if leading else [x]:
        flat = tensor.reshape(-1).astype(np.float64)
        for start in range(0, flat.size, BLOCK):
            block = flat[start : start + BLOCK]
            largest = np.abs(block).max()
            absmax.append(largest)
            codes.append(np.abs(block[:, None] / (largest or 1) - values.astype(np.float64)).argmin(1))
    return np.concatenate(codes), np.array(absmax)


@pytest.mark.parametrize("kind", ["signed", "unsigned"])
@pytest.mark.parametrize(("shape", "leading"), SHAPES, ids=str)
def test_every_code_is_the_nearest(shape, leading, kind):
    rng = np.random.default_rng(sum(shape))
    x = (rng.normal(size=shape) * np.exp(3 * rng.normal(size=shape))).astype(np.float32)
    x = np.abs(x) if kind == "unsigned" else x
    q = quantize(jnp.asarray(x), kind, leading=leading)
    codes, absmax = by_definition(x, MAPS[kind], leading)
    np.testing.assert_array_equal(np.asarray(q.absmax).reshape(-1), absmax.astype(np.float32))
    # f32 division may put a value on the other side of a midpoint: rarely, and then to the neighbour
    difference = np.abs(np.asarray(q.codes).reshape(-1).astype(int) - codes)
    assert difference.max() <= 1
    assert (difference > 0).mean() <= 0.01
    assert q.codes.shape == shape
    back = np.asarray(dequantize(q))
    assert back.shape == shape
    if kind == "unsigned":  # what has been rounded stays; the signed map lacks -1, so that its blocks can shrink
        np.testing.assert_array_equal(np.asarray(dequantize(quantize(jnp.asarray(back), kind, leading=leading))), back)


@pytest.mark.parametrize(("shape", "leading"), SHAPES, ids=str)
def test_zeros_stay_zeros(shape, leading):
    for q in (zeros(shape, "signed", leading=leading), quantize(jnp.zeros(shape), "signed", leading=leading)):
        assert not np.asarray(dequantize(q)).any()
    made = jax.eval_shape(lambda x: quantize(x, "signed", leading=leading), jnp.zeros(shape))
    assert jax.tree.map(jnp.shape, made) == jax.tree.map(jnp.shape, zeros(shape, "signed", leading=leading))


def test_maps():
    np.testing.assert_array_equal(MAPS["signed"], DYNAMIC_CODE)
    for values in MAPS.values():
        assert values.shape == (256,)
        assert values[-1] == 1
        assert (np.diff(values) > 0).all()
    assert MAPS["unsigned"][0] == 0


def test_a_value_half_way_takes_the_lower_code():
    values = MAPS["unsigned"]
    middle = np.float32(0.5) * (values[100] + values[101])
    q = quantize(jnp.asarray([1.0, middle], jnp.float32), "unsigned")
    assert int(q.codes[1]) == 100


@pytest.mark.parametrize("kind", ["signed", "unsigned"])
def test_the_guess_is_put_right_at_every_midpoint(kind):
    """Codes beside every midpoint, value and decade's end equal a search among the midpoints."""
    middles = np.float32(0.5) * (MAPS[kind][:-1] + MAPS[kind][1:])
    ends = np.float32(10.0) ** -np.arange(8, dtype=np.float32)
    points = [middles, MAPS[kind], ends, np.random.default_rng(0).uniform(0, 1, 4096).astype(np.float32)]
    points = np.concatenate(points)
    points = np.concatenate([points, np.nextafter(points, np.float32(2)), np.nextafter(points, np.float32(-2))])
    points = np.concatenate([points, -points]) if kind == "signed" else points[points >= 0]
    points = points[np.abs(points) <= 1]
    rows = np.ones((len(points), BLOCK), np.float32)  # the rest of a block makes its absmax 1
    rows[:, 0] = points
    codes = np.asarray(quantize(jnp.asarray(rows), kind).codes)[:, 0]
    np.testing.assert_array_equal(codes, np.searchsorted(middles, points, side="left"))
