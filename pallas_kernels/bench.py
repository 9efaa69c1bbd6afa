"""Measure an operation against its peers: `python -m pallas_kernels.bench OP [CASE ...] [--tiny] [--out [FILE]]`.

Prints one JSON object a line. Every implementation that accepts the case is compared with every other and with the
peers in the operation's cases.py, all timed in this run on random data, warm, median of many. A ratio above 1 means
that the implementation is better than the peer. Refusals go to the error stream.
"""

import argparse
import contextlib
import functools
import importlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np

from pallas_kernels import OPS
from pallas_kernels._case import Case, Peer

_FILES = {"mosaic_gpu": "mosaic_gpu.py", "jax_triton": "jax_triton.py", "cudnn": "cudnn.py", "xla": "reference.py"}
_ROOT = Path(__file__).parent
_LESS_IS_BETTER = ("peak_gib",)
# Refuses, or out of memory; peers refuse with what they like. The others are timed all the same.
_FAILURES = (NotImplementedError, ValueError, TypeError, AssertionError, ExceptionGroup, jax.errors.JaxRuntimeError)


def main(argv: list[str] | None = None) -> None:
    """Run the bench that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.bench", description=__doc__.splitlines()[0])
    parser.add_argument("op", choices=OPS)
    parser.add_argument("case", nargs="*", help="names from the operation's cases.py; none for all")
    parser.add_argument("--tiny", action="store_true", help="run the tests' tiny cases, quick on any device")
    parser.add_argument("--out", nargs="?", const="", help="append to FILE, or to scripts/results/OP.jsonl")
    options = parser.parse_args(argv)
    module = importlib.import_module(f"pallas_kernels.{options.op}.cases")
    cases = _select(module, options.case, options.tiny)
    out = Path(options.out) if options.out else Path("scripts/results") / f"{options.op}.jsonl"
    for case in cases:
        for line in measure(options.op, case, module):
            text = json.dumps(line)
            print(text, flush=True)
            if options.out is not None:
                out.parent.mkdir(parents=True, exist_ok=True)
                with out.open("a") as file:
                    file.write(text + "\n")


def measure(
    op: str,
    case: Case,
    module: ModuleType,
    *,
    implementations: Sequence[str] | None = None,
    peers: Mapping[str, Peer] | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield the result lines of one case: each implementation against each peer, for each metric.

    Args:
        op: name of the operation.
        case: what is timed.
        module: the operation's cases.py.
        implementations: of ours that are timed; None for all that exist.
        peers: timed here too; None for those of the module, which are the operation's own function's.
    """
    yield from lines(op, case, rates(op, case, module, implementations=implementations, peers=peers), implementations)


def rates(
    op: str,
    case: Case,
    module: ModuleType,
    *,
    implementations: Sequence[str] | None = None,
    peers: Mapping[str, Peer] | None = None,
    alone: AbstractContextManager[Any] | None = None,
) -> dict[str, dict[str, float]]:
    """Metrics of each implementation and peer of one case; all are compiled side by side before any is timed.

    Args:
        op: as `measure`'s, with case, module, implementations and peers.
        case: see op.
        module: see op.
        implementations: see op.
        peers: see op.
        alone: entered once all is compiled, for as long as the device is in use.
    """
    shapes, kwargs, static = shapes_of(case)
    peers = (module.PEERS if peers is None else peers) if case.function is None else {}
    ours = {name: Peer(_bind(op, case.function or op, name)) for name in implementations or existing(op)}

    def build_programs(named: tuple[str, Peer]) -> Any:
        try:
            return _programs(case, named[1], shapes, kwargs, static)
        except _FAILURES as error:
            return error

    every = ours | dict(peers)
    with ThreadPoolExecutor(max(1, len(every))) as pool:
        built = dict(zip(every, pool.map(build_programs, every.items()), strict=True))
    results = {}
    with alone or contextlib.nullcontext():
        args, arrays, _ = build(case)
        for name, programs in built.items():
            try:
                if isinstance(programs, Exception):
                    raise programs
                results[name] = _metrics(case, every[name], programs, args, arrays, case.metric or module.METRIC)
            except _FAILURES as error:
                print(f"{case.name} {name}: {str(error)[:2000]}", file=sys.stderr)
    return results


def existing(op: str) -> list[str]:
    """Names of an operation's implementations."""
    return [name for name, file in _FILES.items() if (_ROOT / op / file).exists()]


def lines(
    op: str,
    case: Case,
    results: Mapping[str, Mapping[str, float]],
    implementations: Sequence[str] | None = None,
    device: str | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield the lines of what was timed in one run; `device` names it where this process has none."""
    about = {
        "device": device or jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "commit": commit(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    for name, peer in itertools.product(implementations or existing(op), results):
        if name in results and peer != name:
            for metric, value in results[name].items():
                if metric not in results[peer]:
                    continue
                other = results[peer][metric]
                ratio = other / value if metric in _LESS_IS_BETTER else value / other
                line = {"bench": op, "case": case.name, "implementation": name, "metric": metric, "value": value}
                yield line | {"peer": peer, "peer_value": other, "ratio": ratio} | about


def build(case: Case) -> tuple[tuple[Any, ...], dict[str, jax.Array], dict[str, Any]]:
    """Make a case's arguments in one jit: positional arguments, keyword arrays, other keyword arguments."""
    make, static = _maker(case)
    args, arrays = jax.jit(make)(jax.random.key(0))
    return args, arrays, static


def shapes_of(case: Case) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]:
    """What `build` makes, with shapes in place of arrays."""
    make, static = _maker(case)
    args, arrays = jax.eval_shape(lambda: make(jax.random.key(0)))  # no array is made
    return args, arrays, static


def _maker(case: Case) -> tuple[Callable[..., Any], dict[str, Any]]:
    """A traceable function from a key to arguments and keyword arrays, and what it fills with other arguments."""
    static: dict[str, Any] = {}

    def make(key: jax.Array) -> tuple[tuple[Any, ...], dict[str, jax.Array]]:
        args, kwargs = case.args(key)
        static.update({name: value for name, value in kwargs.items() if not isinstance(value, jax.Array)})
        return args, {name: value for name, value in kwargs.items() if name not in static}

    return make, static


def _select(module: ModuleType, names: list[str], tiny: bool) -> list[Case]:
    known = {case.name: case for case in (module.TINY if tiny else module.CASES)}
    for name in names:
        if name not in known:
            raise SystemExit(f"{module.__name__} has no case {name!r}; name one of {', '.join(known)}")
    return [known[name] for name in names or known]


def _bind(op: str, name: str, implementation: str) -> Callable[..., Any]:
    function = getattr(importlib.import_module(f"pallas_kernels.{op}"), name)
    return lambda *args, **kwargs: function(*args, **kwargs, implementation=implementation)


def _programs(
    case: Case, peer: Peer, shapes: tuple, kwargs: dict[str, Any], static: dict[str, Any]
) -> dict[str, jax.stages.Compiled]:
    """Compiled from shapes: "forward", where it has a gradient "both", and each of the case's parts."""
    prepared = jax.eval_shape(peer.prepare, *shapes)

    def forward(args: tuple, arrays: dict[str, jax.Array]) -> Any:
        return peer.call(*args, **arrays, **static)

    def gradients(args: tuple, arrays: dict[str, jax.Array], cotangent: Any, wrt: tuple[int, ...]) -> Any:
        def of_wrt(*values: jax.Array) -> Any:
            replaced = dict(zip(wrt, values, strict=True))
            return forward(tuple(replaced.get(i, arg) for i, arg in enumerate(args)), arrays)

        out, pull_back = jax.vjp(of_wrt, *(args[i] for i in wrt))
        return out, pull_back(cotangent)

    lowered = jax.jit(forward).lower(prepared, kwargs)
    programs = {"forward": lowered.compile()}
    if not case.wrt:
        return programs
    inputs = prepared, kwargs, jax.tree.map(lambda o: jax.ShapeDtypeStruct(o.shape, o.dtype), lowered.out_info)
    programs["both"] = jax.jit(functools.partial(gradients, wrt=case.wrt)).lower(*inputs).compile()
    for part, (position, _) in case.parts.items():

        def gradient(args: tuple, arrays: dict[str, jax.Array], cotangent: Any, position: int = position) -> Any:
            return gradients(args, arrays, cotangent, (position,))[1]  # the compiler drops the forward where it can

        try:
            programs[part] = jax.jit(gradient).lower(*inputs).compile()
        except _FAILURES as error:
            print(f"{case.name} {part}: {error}", file=sys.stderr)
    return programs


def _metrics(
    case: Case, peer: Peer, programs: dict[str, jax.stages.Compiled], args: tuple, arrays: dict[str, Any], metric: str
) -> dict[str, float]:
    """Time forward, and forward with backward; return the metrics of both and the memory of the latter."""
    args = jax.block_until_ready(peer.prepare(*args))
    out = programs["forward"](args, arrays)
    seconds = median_seconds(programs["forward"], args, arrays)
    work, work_both, unit = (case.flops, case.flops_fwd_bwd, 1e12)
    if metric == "gbps":
        work, work_both, unit = (case.bytes, case.bytes_fwd_bwd, 1e9)
    alone, together = ("gbps", "gbps_fwd_bwd") if metric == "gbps" else ("tflops_fwd", "tflops_fwd_bwd")
    if not case.wrt:
        return {alone: work / seconds / unit, "peak_gib": _bytes(programs["forward"]) / 2**30}
    cotangent = jax.tree.map(lambda o: jax.random.normal(jax.random.key(1), o.shape, o.dtype), out)
    del out
    seconds_both = median_seconds(programs["both"], args, arrays, cotangent)
    result = {alone: work / seconds / unit, together: work_both / seconds_both / unit}
    for part, (_, flops) in case.parts.items():
        if part in programs:
            result[part] = flops / median_seconds(programs[part], args, arrays, cotangent) / 1e12
    return result | {"peak_gib": _bytes(programs["both"]) / 2**30}


def median_seconds(compiled: Callable[..., Any], *args: Any) -> float:
    """Time batches of calls of at least 20 ms, after warming up; the median of ten batches, or of 2 s, per call."""
    start = time.perf_counter()
    jax.block_until_ready(compiled(*args))
    if time.perf_counter() - start < 0.2:
        jax.block_until_ready([compiled(*args) for _ in range(2)])
        start = time.perf_counter()
        jax.block_until_ready(compiled(*args))
    once = time.perf_counter() - start
    calls = int(np.clip(0.02 / once, 1, 50))
    times = []
    for _ in range(int(np.clip(2 / (calls * once), 3, 10))):
        start = time.perf_counter()
        for _ in range(calls - 1):
            compiled(*args)
        jax.block_until_ready(compiled(*args))
        times.append((time.perf_counter() - start) / calls)
    return float(np.median(times))


def _bytes(compiled: jax.stages.Compiled) -> float:
    """Add up what the program's arguments, results and temporary buffers take, as the compiler planned them."""
    memory: Any = compiled.memory_analysis()
    return memory.temp_size_in_bytes + memory.argument_size_in_bytes + memory.output_size_in_bytes


def commit() -> str:
    """Name the checked-out commit, "-dirty" where tracked files differ; GYMJAX_COMMIT says it where git cannot."""
    if "GYMJAX_COMMIT" in os.environ:
        return os.environ["GYMJAX_COMMIT"]
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, cwd=_ROOT, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


if __name__ == "__main__":
    main()
