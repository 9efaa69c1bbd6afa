"""Oracles in float64 and the error bar that every kernel has to meet."""

from collections.abc import Callable

import jax
import numpy as np
import pytest


@pytest.fixture(scope="session")
def float64_vjp() -> Callable:
    """Evaluate a function and its gradients in float64: (function, arguments, cotangent) -> numpy arrays."""

    def evaluate(function: Callable, args: tuple, cotangent: object) -> tuple[object, tuple]:
        with jax.enable_x64(True):
            wide = tuple(np.asarray(arg, np.float64) for arg in args)
            out, pull_back = jax.vjp(function, *wide)
            cotangent = jax.tree.map(lambda c: jax.numpy.asarray(np.asarray(c, np.float64)), cotangent)
            return jax.tree.map(np.asarray, (out, pull_back(cotangent)))

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
        for ours, theirs, exact in zip(jax.tree.leaves(got), jax.tree.leaves(dense), jax.tree.leaves(truth)):
            # 1.5 is the project's bar; 1e-6 is some ulps of f32, for where the dense computation happens to be exact.
            assert relative_error(ours, exact) <= 1.5 * relative_error(theirs, exact) + 1e-6

    return check
