"""Random inputs, and the error bar that every kernel has to meet.

Oracles are written in numpy float64, gradients too: they share no code with the kernels and compile nothing.
"""

import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest


@pytest.fixture(scope="session")
def normal() -> Callable:
    """Draw one array of normal numbers for each shape."""

    def draw(seed: int, *shapes: tuple[int, ...], dtype: jnp.dtype = jnp.float32) -> tuple[jax.Array, ...]:
        rng = np.random.default_rng(seed)
        return tuple(jnp.asarray(rng.standard_normal(shape, np.float32).astype(dtype)) for shape in shapes)

    return draw


@pytest.fixture(scope="session")
def out_and_grads() -> Callable:
    """Evaluate a function and the gradients of all its arguments, in one jit."""

    def evaluate(function: Callable, args: tuple, cotangent: object) -> tuple[object, tuple]:
        @jax.jit
        def run(args: tuple, cotangent: object) -> tuple[object, tuple]:
            out, pull_back = jax.vjp(function, *args)
            return out, pull_back(cotangent)

        return run(args, cotangent)

    return evaluate


@pytest.fixture(scope="session")
def relative_error() -> Callable:
    """Return the norm of the difference over the norm of the truth."""

    def error(got: object, truth: np.ndarray) -> float:
        norm = np.linalg.norm(truth)
        return float(np.linalg.norm(np.asarray(got, np.float64) - truth) / (norm if norm else 1.0))

    return error


@pytest.fixture(scope="session")
def no_worse_than_dense(relative_error: Callable) -> Callable:
    """Check each array's error against float64: at most 1.5 times that of the dense computation in the same dtype."""

    def check(got: object, dense: object, truth: object) -> None:
        leaves = (jax.tree.leaves(tree) for tree in (got, dense, truth))
        for ours, theirs, exact in zip(*leaves, strict=True):
            # 1.5 is the project's bar; 1e-6 is some ulps of f32, for where the dense computation happens to be exact.
            assert relative_error(ours, exact) <= 1.5 * relative_error(theirs, exact) + 1e-6

    return check


@pytest.fixture(scope="session")
def grouped_oracle() -> Callable:
    """Grouped products and their gradients in f64, a group at a time."""

    def oracle(x, w, sizes, dy):
        x, w, dy = (np.asarray(array, np.float64) for array in (x, w, dy))
        y, dx, dw = np.zeros((len(x), w.shape[1])), np.zeros_like(x), np.zeros_like(w)
        start = 0
        for e, size in enumerate(sizes):
            rows = slice(start, start + size)
            y[rows], dx[rows], dw[e] = x[rows] @ w[e].T, dy[rows] @ w[e], dy[rows].T @ x[rows]
            start += size
        return y, dx, dw

    return oracle


@pytest.fixture
def races():
    """Reports of races in what the interpreter said, but for two stores of results: rows stored twice are alike."""

    def found(said: str) -> list[str]:
        reports = re.split(r"RACE DETECTED\n", said)[1:]
        return [one for one in reports if one.count("  write of HostAllocationKey(memory_space_id=0,") != 2]

    return found
