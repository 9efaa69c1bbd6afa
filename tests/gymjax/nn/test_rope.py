"""Rotary frequencies against the formulas written out in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from gymjax.nn.rope import RopeConfig, inverse_frequencies, rope_tables


def expected(rope, width):
    """Each pair's frequency by itself, as the papers and Llama 3.1's reference define it."""
    found = []
    for pair in range(width // 2):
        frequency = rope.theta ** (-2 * pair / width)
        wavelength = 2 * np.pi / frequency
        if rope.kind == "linear":
            frequency /= rope.factor
        elif rope.kind == "llama3":
            low, high = (rope.original_max_positions / f for f in (rope.low_freq_factor, rope.high_freq_factor))
            if wavelength > low:
                frequency /= rope.factor
            elif wavelength >= high:
                smooth = rope.original_max_positions / wavelength - rope.low_freq_factor
                smooth /= rope.high_freq_factor - rope.low_freq_factor
                frequency = (1 - smooth) * frequency / rope.factor + smooth * frequency
        found.append(frequency)
    return np.array(found)


@pytest.mark.parametrize(
    "rope",
    [RopeConfig(), RopeConfig(5e5, "linear", 4.0), RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 8192)],
    ids=lambda rope: rope.kind,
)
def test_frequencies(rope):
    np.testing.assert_allclose(inverse_frequencies(rope, 128), expected(rope, 128), rtol=1e-7)  # one f32 rounding


def test_tables_restart_with_positions():
    positions = jnp.asarray([[0, 1, 2, 0, 1]])
    cos, sin = rope_tables(positions, RopeConfig(), 8)
    angle = np.asarray(positions)[..., None] * expected(RopeConfig(), 8)
    np.testing.assert_allclose(cos, np.cos(angle), atol=1e-6)  # f32 angle and cosine
    np.testing.assert_allclose(sin, np.sin(angle), atol=1e-6)
    np.testing.assert_array_equal(cos[0, 3:], cos[0, :2])
