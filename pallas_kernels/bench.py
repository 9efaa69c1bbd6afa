"""Measure an operation against its peers: `python -m pallas_kernels.bench OP [CASE ...] [--tiny] [--out [FILE]]`.

Prints one JSON object a line. Every implementation that accepts the case is compared with every other and with the
peers in the operation's cases.py, all timed in this run on random data, warm, median of many. A ratio above 1 means
that the implementation is better than the peer. Refusals go to the error stream.
"""

import argparse
import importlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    measured: Mapping[str, dict[str, float]] | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield the result lines of one case: each implementation against each peer, for each metric.

    Args:
        op: name of the operation.
        case: what is timed.
        module: the operation's cases.py.
        implementations: of ours that are timed; None for all that exist.
        peers: timed here too; None for those of the module, which are the operation's own function's.
        measured: metrics of peers that another program timed in the same run.
    """
    args, arrays, static = build(case)
    implementations = implementations or [name for name, file in _FILES.items() if (_ROOT / op / file).exists()]
    results = dict(measured or {})
    peers = (module.PEERS if peers is None else peers) if case.function is None else {}
    ours = {name: Peer(_bind(op, case.function or op, name)) for name in implementations}
    for name, peer in (ours | dict(peers)).items():
        try:
            results[name] = _metrics(case, peer, args, arrays, static, case.metric or module.METRIC)
        except _FAILURES as error:
            print(f"{case.name} {name}: {str(error)[:2000]}", file=sys.stderr)
    about = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "commit": commit(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    for name, peer in itertools.product(implementations, results):
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
    static = {}

    def make(key: jax.Array) -> tuple[tuple[Any, ...], dict[str, jax.Array]]:
        args, kwargs = case.args(key)
        static.update({name: value for name, value in kwargs.items() if not isinstance(value, jax.Array)})
        return args, {name: value for name, value in kwargs.items() if name not in static}

    args, arrays = jax.jit(make)(jax.random.key(0))
    return args, arrays, static


def _select(module: ModuleType, names: list[str], tiny: bool) -> list[Case]:
    known = {case.name: case for case in (module.TINY if tiny else module.CASES)}
    for name in names:
        if name not in known:
            raise SystemExit(f"{module.__name__} has no case {name!r}; name one of {', '.join(known)}")
    return [known[name] for name in names or known]


def _bind(op: str, name: str, implementation: str) -> Callable[..., Any]:
    function = getattr(importlib.import_module(f"pallas_kernels.{op}"), name)
    return lambda *args, **kwargs: function(*args, **kwargs, implementation=implementation)


def _metrics(
    case: Case, peer: Peer, args: tuple, arrays: dict[str, jax.Array], static: dict[str, Any], metric: str
) -> dict[str, float]:
    """Time forward, and forward with backward; return the metrics of both and the memory of the latter."""
    args = jax.block_until_ready(peer.prepare(*args))

    def forward(args: tuple, arrays: dict[str, jax.Array]) -> Any:
        return peer.call(*args, **arrays, **static)

    def forward_backward(args: tuple, arrays: dict[str, jax.Array], cotangent: Any) -> Any:
        def of_wrt(*wrt: jax.Array) -> Any:
            replaced = dict(zip(case.wrt, wrt, strict=True))
            return forward(tuple(replaced.get(i, arg) for i, arg in enumerate(args)), arrays)

        out, pull_back = jax.vjp(of_wrt, *(args[i] for i in case.wrt))
        return out, pull_back(cotangent)

    fwd = jax.jit(forward).lower(args, arrays).compile()
    out = fwd(args, arrays)
    seconds = median_seconds(fwd, args, arrays)
    work, work_both, unit = (case.flops, case.flops_fwd_bwd, 1e12)
    if metric == "gbps":
        work, work_both, unit = (case.bytes, case.bytes_fwd_bwd, 1e9)
    alone, together = ("gbps", "gbps_fwd_bwd") if metric == "gbps" else ("tflops_fwd", "tflops_fwd_bwd")
    if not case.wrt:
        return {alone: work / seconds / unit, "peak_gib": _bytes(fwd) / 2**30}
    cotangent = jax.tree.map(lambda o: jax.random.normal(jax.random.key(1), o.shape, o.dtype), out)
    both = jax.jit(forward_backward).lower(args, arrays, cotangent).compile()
    seconds_both = median_seconds(both, args, arrays, cotangent)
    rates = {alone: work / seconds / unit, together: work_both / seconds_both / unit}
    for part, (position, flops) in case.parts.items():

        def gradient(args: tuple, arrays: dict[str, jax.Array], cotangent: Any, position: int = position) -> Any:
            def of_one(arg: jax.Array) -> Any:
                return forward((*args[:position], arg, *args[position + 1 :]), arrays)

            return jax.vjp(of_one, args[position])[1](cotangent)  # the compiler drops the forward pass where it can

        try:
            program = jax.jit(gradient).lower(args, arrays, cotangent).compile()
            rates[part] = flops / median_seconds(program, args, arrays, cotangent) / 1e12
        except _FAILURES as error:
            print(f"{case.name} {part}: {error}", file=sys.stderr)
    return rates | {"peak_gib": _bytes(both) / 2**30}


def median_seconds(compiled: Callable[..., Any], *args: Any) -> float:
    """Time batches of calls of at least 20 ms, after warming up; the median of ten batches, per call."""
    jax.block_until_ready([compiled(*args) for _ in range(3)])
    start = time.perf_counter()
    jax.block_until_ready(compiled(*args))
    calls = int(np.clip(0.02 / (time.perf_counter() - start), 1, 50))
    times = []
    for _ in range(10):
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
