"""Rotary frequencies against the formulas written out in float64; tables by position and by length of document."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gymjax.nn.rope import (
    Dynamic,
    Linear,
    Llama3,
    LongRope,
    RopeConfig,
    Yarn,
    document_lengths,
    inverse_frequencies,
    rope_tables,
)

WIDTH = 12
LONG = LongRope((1.0, 1.2, 1.5, 2.0, 2.5, 3.0), (1.5, 2.0, 4.0, 9.0, 16.0, 30.0), 32, 1.25)
LENGTHS = (1, 32, 33, 100)


def expected(rope, width, length):
    """Each pair's frequency by itself, as the papers and Llama 3.1's reference define it."""
    width = int(width * rope.fraction)
    found = []
    for pair in range(width // 2):
        theta = rope.theta
        if isinstance(rope.scaling, Dynamic) and length > rope.scaling.max_positions:
            growth = rope.scaling.factor * length / rope.scaling.max_positions - (rope.scaling.factor - 1)
            theta *= growth ** (width / (width - 2))
        frequency = theta ** (-2 * pair / width)
        wavelength = 2 * math.pi / frequency
        match rope.scaling:
            case Linear(factor):
                frequency /= factor
            case Llama3(factor, low, high, original):
                if wavelength > original / low:
                    frequency /= factor
                elif wavelength >= original / high:
                    smooth = (original / wavelength - low) / (high - low)
                    frequency = (1 - smooth) * frequency / factor + smooth * frequency
            case Yarn(factor, original, _, fast, slow, truncate):
                ends = [
                    width * math.log(original / turns / 2 / math.pi) / 2 / math.log(theta) for turns in (fast, slow)
                ]
                first, last = (math.floor(ends[0]), math.ceil(ends[1])) if truncate else ends
                first, last = max(first, 0), min(last, width - 1)
                divided = min(max((pair - first) / (last - first), 0), 1)
                frequency = divided * frequency / factor + (1 - divided) * frequency
            case LongRope(short, long, original):
                frequency /= (long if length > original else short)[pair]
        found.append(frequency)
    return np.array(found)


ROPES = {
    "default": RopeConfig(),
    "partial": RopeConfig(fraction=0.5),
    "linear": RopeConfig(5e5, Linear(4.0)),
    "dynamic": RopeConfig(1e4, Dynamic(2.0, 32)),
    "llama3": RopeConfig(5e5, Llama3(8.0, 1.0, 4.0, 64)),
    "yarn": RopeConfig(1e4, Yarn(4.0, 64, 1.1)),
    "yarn-real-ends": RopeConfig(1e4, Yarn(4.0, 64, 1.1, 16.0, 2.0, truncate=False)),
    "longrope": RopeConfig(1e4, LONG),
}


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("length", LENGTHS)
def test_frequencies(name, length):
    ours = inverse_frequencies(ROPES[name], WIDTH, length)
    assert ours.dtype == np.float32
    # Exponent, power and quotient are rounded to f32, as in transformers; ln(5e5) = 13 magnifies the exponent's part.
    np.testing.assert_allclose(ours, expected(ROPES[name], WIDTH, length), rtol=1e-6)


@pytest.mark.parametrize("name", ROPES)
def test_tables_by_length(name):
    positions = jnp.broadcast_to(jnp.arange(100), (len(LENGTHS), 100))
    lengths = jnp.broadcast_to(jnp.asarray(LENGTHS)[:, None], positions.shape)
    cos, sin = rope_tables(positions, ROPES[name], WIDTH, lengths)
    for row, length in enumerate(LENGTHS):
        angle = np.arange(100)[:, None] * expected(ROPES[name], WIDTH, length)
        factor = ROPES[name].attention_factor
        np.testing.assert_allclose(cos[row], factor * np.cos(angle), atol=1e-4)  # f32 angles of up to 100
        np.testing.assert_allclose(sin[row], factor * np.sin(angle), atol=1e-4)


def test_tables_restart_with_positions():
    positions = jnp.asarray([[0, 1, 2, 0, 1]])
    cos, sin = rope_tables(positions, RopeConfig(), 8)
    angle = np.asarray(positions)[..., None] * expected(RopeConfig(), 8, 3)
    np.testing.assert_allclose(cos, np.cos(angle), atol=1e-6)  # f32 angle and cosine
    np.testing.assert_allclose(sin, np.sin(angle), atol=1e-6)
    np.testing.assert_array_equal(cos[0, 3:], cos[0, :2])


@pytest.mark.parametrize("name", ["default", "llama3", "yarn"])
def test_tables_at_long_positions(name):
    positions = np.asarray([[0, 4095, 4096, 65537, 131071]])
    cos, sin = jax.jit(lambda positions: rope_tables(positions, ROPES[name], 128))(positions)
    angle = positions[..., None] * inverse_frequencies(ROPES[name], 128).astype(np.float64)
    factor = ROPES[name].attention_factor
    np.testing.assert_allclose(
        cos, factor * np.cos(angle), atol=1e-5
    )  # some ulps of f32 are 5e-7; the rounded product alone would be off by 4e-3
    np.testing.assert_allclose(sin, factor * np.sin(angle), atol=1e-5)


def test_lengths_are_those_of_documents():
    positions = jnp.asarray([[0, 1, 2, 0, 1, 0, 0], [0, 1, 2, 3, 4, 5, 6]])
    segments = jnp.asarray([[1, 1, 1, 2, 2, 0, 0], [7, 7, 7, 7, 7, 7, 7]])
    np.testing.assert_array_equal(document_lengths(positions, segments), [[3, 3, 3, 2, 2, 1, 1], [7] * 7])
    np.testing.assert_array_equal(document_lengths(positions, None), [[3] * 7, [7] * 7])


def test_bad_tables_without_lengths():
    with pytest.raises(ValueError, match="depend on the length of a document need lengths_BT"):
        rope_tables(jnp.zeros((1, 1), jnp.int32), RopeConfig(scaling=LONG), WIDTH)
