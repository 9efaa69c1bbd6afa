"""The tanh of capped scores against float64: in array operations, and in the assembly of the real kernels."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.flash_attention import mosaic_gpu_tanh

# The approximations are right to 1.6e-7, a result of f32 to 6e-8, and what lies between takes a few roundings.
ABSOLUTE, RELATIVE = 5e-7, 1.1e-6


def arguments() -> np.ndarray:
    small = np.logspace(-30, 0, 3001)
    return np.concatenate([np.linspace(-10, 10, 20001), small, -small, [0.0, 30.0, -30.0, 1e6, -1e6]])


def assert_right(result, exact):
    result = np.asarray(result, np.float64)
    np.testing.assert_allclose(result, exact, rtol=0, atol=ABSOLUTE)
    np.testing.assert_allclose(result, exact, rtol=RELATIVE, atol=1e-37)  # the smallest f32 are flushed to 0
    assert np.abs(result).max() <= 1 + 2**-22  # so that 1 - tanh**2 is at worst a rounding below 0


def run(assembly: str, source: np.ndarray) -> np.ndarray:
    """What an element's PTX makes of an array of them, in f32."""
    registers = {"$1": source}
    operations = {
        "mov": lambda a: a,
        "mul": lambda a, b: a * b,
        "fma": lambda a, b, c: (a.astype(np.float64) * b + c).astype(np.float32),
        "min": np.minimum,  # as the assembly's, these keep a NaN
        "max": np.maximum,
        "rcp": lambda a: np.float32(1) / a,
        "ex2": np.exp2,
    }

    def value(name: str) -> np.ndarray:
        if not name.startswith("0f"):
            return registers[name]
        return np.full_like(source, np.frombuffer(bytes.fromhex(name[2:]), ">f4")[0])

    for line in re.split("[{};]", assembly):
        if line.strip() and not line.strip().startswith(".reg"):
            operation, target, *sources = re.split(r"[ ,]+", line.strip())
            with np.errstate(over="ignore", under="ignore", invalid="ignore"):
                registers[target] = operations[operation.split(".")[0]](*map(value, sources))
    return registers["$0"]


def test_array_operations():
    x = arguments()
    result = mosaic_gpu_tanh.tanh(jnp.asarray(x, jnp.float32), 1.0, staged=True)
    assert_right(result, np.tanh(x.astype(np.float32).astype(np.float64)))
    assert np.isnan(mosaic_gpu_tanh.tanh(jnp.float32(np.nan), 1.0, staged=True))
    powers = mosaic_gpu_tanh.power_of_tanh(jnp.asarray(x, jnp.float32), 1.0, 20.0, staged=True)
    np.testing.assert_allclose(powers, np.exp2(20.0 * np.asarray(result, np.float64)), rtol=3e-6)  # an exponent's ulp


@pytest.mark.parametrize("scale", [1e-7, 1e-4, 2.01e-4, 0.0625 / 50, 0.125 / 5, 1.0, 900.0, 3e4])
def test_assembly(scale):
    """Scales whose powers the coefficients hold, and others."""
    products = (arguments() / scale).astype(np.float32)
    exact = np.tanh(products.astype(np.float64) * scale)
    size = np.abs(products.astype(np.float64) * scale)
    for way, limit in (
        (mosaic_gpu_tanh._small, mosaic_gpu_tanh.SMALL_LIMIT),
        (mosaic_gpu_tanh._middle, mosaic_gpu_tanh.MIDDLE_LIMIT),
        (mosaic_gpu_tanh._rational, np.inf),
    ):
        within = size <= limit
        assert_right(run(way(scale), products[within]), exact[within])
        assert_right(run(way(scale, 20.0), products[within]) / 20.0, exact[within])
        power = run(mosaic_gpu_tanh._power(way(scale, 20.0)), products[within])
        np.testing.assert_array_equal(power, np.exp2(run(way(scale, 20.0), products[within])))
    nan = np.full(1, np.nan, np.float32)
    assert np.isnan(run(mosaic_gpu_tanh._rational(scale), nan)).all()
