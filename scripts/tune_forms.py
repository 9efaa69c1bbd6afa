"""What the tuning scripts share: several forms of one computation, timed beside each other on a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels._profile import KERNELS_APART
from pallas_kernels.bench import device_seconds, median_seconds

ROUNDS = 3


@jax.jit
def difference(got, first):
    """Relative, in the Frobenius norm; of several results of the first."""
    got, first = (jax.tree.leaves(x)[0].astype(jnp.float32) for x in (got, first))
    return jnp.linalg.norm((got - first).ravel()) / jnp.linalg.norm(first.ravel())


def seconds_of_forms(
    line: str,
    forms: Mapping[str, Callable[..., Any]],
    args: tuple[Any, ...],
    *,
    apart: float,
    also: tuple[Any, ...] | None = None,
    short: bool = False,
) -> dict[str, float]:
    """Time forms in turn, ROUNDS times, as clocks drift, and return the medians in seconds, the fastest first.

    A form whose result is further than `apart` from the first one's, relatively, has WRONG behind its name. One that
    does not compile or run is named on the error stream.

    Args:
        line: what is computed, for errors.
        forms: functions of `args` by name.
        args: arrays, or trees of them.
        apart: see there.
        also: other arguments, of the same shapes, whose results are compared too.
        short: whether a call takes the device less than it may take the host: then the GPU's own clock is asked.
    """
    clock, options = (device_seconds, KERNELS_APART) if short else (median_seconds, {})

    def compiled(named: tuple[str, Callable[..., Any]]) -> tuple[str, Any, list[Any]] | None:
        name, form = named
        try:
            run = jax.jit(form).lower(*args).compile(options)
            return name, run, [run(*each) for each in (args, also) if each is not None]
        except Exception as error:  # whatever one form does, the others are timed
            print(f"{line} {name}: {str(error)[:300]}", file=sys.stderr, flush=True)
            return None

    with ThreadPoolExecutor() as pool:
        built = [each for each in pool.map(compiled, forms.items()) if each is not None]
    runs, first = {}, None
    for name, run, results in built:
        first = first or results
        right = all(float(difference(*pair)) < apart for pair in zip(results, first, strict=True))
        name += "" if right else " WRONG"
        runs[name] = run
    times = [{name: clock(run, *args) for name, run in runs.items()} for _ in range(ROUNDS)]
    medians = {name: float(np.median([each[name] for each in times])) for name in runs}
    return dict(sorted(medians.items(), key=lambda item: item[1]))
