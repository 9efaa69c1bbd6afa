"""Measure an operation against its peers: `python -m pallas_kernels.bench OP [CASE ...] [--tiny] [--out [FILE]]`.

Prints one JSON object a line. Every implementation that accepts the case is compared with every other and with the
peers in the operation's cases.py, all timed in this run on random data, warm, median of many. What is short or
measured in bytes is timed by the GPU's own clock, as the host's part of a call may be longer. A ratio above 1 means
that the implementation is better than the peer. Refusals go to the error stream.
"""

import argparse
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
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np

from pallas_kernels import OPS
from pallas_kernels._case import Case, Peer
from pallas_kernels._profile import KERNELS_APART, SETTLED, kernel_seconds

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
) -> dict[str, dict[str, float]]:
    """Metrics of each implementation and peer of one case; all are compiled side by side before any is timed.

    Args:
        op: as `measure`'s, with case, module, implementations and peers.
        case: see op.
        module: see op.
        implementations: see op.
        peers: see op.
    """
    every = dict.fromkeys(existing(op) if implementations is None else implementations, None)
    every |= (module.PEERS if peers is None else peers) if case.function is None else {}

    def compiled(named: tuple[str, Peer | None]) -> Compiled | None:
        return compile_case(op, case, module, *named)

    with ThreadPoolExecutor(max(1, len(every))) as pool:
        built = dict(zip(every, pool.map(compiled, every.items()), strict=True))
    timed = {name: time_case(programs, name) for name, programs in built.items() if programs is not None}
    return {name: metrics for name, metrics in timed.items() if metrics is not None}


@dataclass(frozen=True)
class Compiled:
    """Programs of one implementation or peer for one case.

    Attributes:
        case: what they compute.
        metric: "tflops" or "gbps".
        arguments: makes (positional arguments as the programs want them, keyword arrays).
        cotangent: makes one of the result; None without a gradient.
        programs: see `_programs`.
    """

    case: Case
    metric: str
    arguments: jax.stages.Compiled
    cotangent: jax.stages.Compiled | None
    programs: dict[str, jax.stages.Compiled]


def compile_case(op: str, case: Case, module: ModuleType, name: str, peer: Peer | None = None) -> Compiled | None:
    """Compile a case for the implementation of that name, or for a peer; None, and a line on stderr, if it refuses."""
    peer = Peer(_bind(op, case.function or op, name)) if peer is None else peer
    metric = case.metric or module.METRIC
    try:
        return _compile(case, peer, metric)
    except _FAILURES as error:
        _say(case, name, error)
        return None


def time_case(compiled: Compiled, name: str) -> dict[str, float] | None:
    """Metrics of what was compiled; None, and a line on stderr, if it fails."""
    try:
        return _metrics(compiled)
    except _FAILURES as error:
        _say(compiled.case, name, error)
        return None


def _say(case: Case, name: str, error: Exception) -> None:
    print(f"{case.name} {name}: {str(error)[:2000]}", file=sys.stderr)


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


def _compile(case: Case, peer: Peer, metric: str) -> Compiled:
    make, static = _maker(case)

    def arguments(key: jax.Array) -> tuple[tuple, dict[str, jax.Array]]:
        args, arrays = make(key)
        return peer.prepare(*args), arrays

    lowered = jax.jit(arguments).lower(jax.random.key(0))
    prepared, arrays = _shapes(lowered.out_info)

    def forward(args: tuple, arrays: dict[str, jax.Array]) -> Any:
        return peer.call(*args, **arrays, **static)

    out, programs = _programs(case, forward, prepared, arrays, metric)
    cotangent = jax.jit(lambda out: jax.tree.map(_normal, out)).lower(out).compile() if case.wrt else None
    return Compiled(case, metric, lowered.compile(), cotangent, programs)


def _programs(
    case: Case, forward: Callable[..., Any], prepared: tuple, kwargs: dict[str, Any], metric: str
) -> tuple[Any, dict[str, jax.stages.Compiled]]:
    """Shapes of the result, and what is compiled from shapes.

    "forward"; with a gradient "both", and each of the case's parts; of operations measured in bytes, whose two passes a
    compiler would make one where nothing is between them, "keep" (the forward pass and what it keeps) and "backward".
    """

    def keep(args: tuple, arrays: dict[str, jax.Array], wrt: tuple[int, ...]) -> Any:
        def of_wrt(*values: jax.Array) -> Any:
            replaced = dict(zip(wrt, values, strict=True))
            return forward(tuple(replaced.get(i, arg) for i, arg in enumerate(args)), arrays)

        return jax.vjp(of_wrt, *(args[i] for i in wrt))

    def both(args: tuple, arrays: dict[str, jax.Array], cotangent: Any, wrt: tuple[int, ...]) -> Any:
        out, pull_back = keep(args, arrays, wrt)
        return out, pull_back(cotangent)

    options = KERNELS_APART if _clock(case, metric) is device_seconds else {}
    lowered = jax.jit(forward).lower(prepared, kwargs)
    out = _shapes(lowered.out_info)
    programs = {"forward": lowered.compile(options)}
    if not case.wrt:
        return out, programs
    if metric == "gbps":
        kept = jax.jit(functools.partial(keep, wrt=case.wrt)).lower(prepared, kwargs)
        backward = jax.jit(lambda pull_back, cotangent: pull_back(cotangent)).lower(_shapes(kept.out_info[1]), out)
        return out, programs | {"keep": kept.compile(), "backward": backward.compile(options)}
    inputs = prepared, kwargs, out
    programs["both"] = jax.jit(functools.partial(both, wrt=case.wrt)).lower(*inputs).compile(options)
    for part, (position, _) in case.parts.items():

        def gradient(args: tuple, arrays: dict[str, jax.Array], cotangent: Any, position: int = position) -> Any:
            return both(args, arrays, cotangent, (position,))[1]  # the compiler drops the forward where it can

        try:
            programs[part] = jax.jit(gradient).lower(*inputs).compile(options)
        except _FAILURES as error:
            _say(case, part, error)
    return out, programs


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def _metrics(compiled: Compiled) -> dict[str, float]:
    """Time what `_programs` made; the memory is that of the last pass."""
    case, metric, programs = compiled.case, compiled.metric, compiled.programs
    clock = _clock(case, metric)
    args, arrays = jax.block_until_ready(compiled.arguments(jax.random.key(0)))
    seconds = clock(programs["forward"], args, arrays)
    alone = {"gbps": case.bytes / seconds / 1e9} if metric == "gbps" else {"tflops_fwd": case.flops / seconds / 1e12}
    if compiled.cotangent is None:
        return alone | {"peak_gib": _bytes(programs["forward"]) / 2**30}
    cotangent = compiled.cotangent(programs["forward"](args, arrays))
    if metric == "gbps":
        _, pull_back = programs["keep"](args, arrays)
        seconds = clock(programs["backward"], pull_back, cotangent)
        alone["gbps_bwd"] = (case.bytes_fwd_bwd - case.bytes) / seconds / 1e9
        return alone | {"peak_gib": _bytes(programs["backward"]) / 2**30}
    seconds = clock(programs["both"], args, arrays, cotangent)
    alone["tflops_fwd_bwd"] = case.flops_fwd_bwd / seconds / 1e12
    for part, (_, flops) in case.parts.items():
        if part in programs:
            alone[part] = flops / clock(programs[part], args, arrays, cotangent) / 1e12
    return alone | {"peak_gib": _bytes(programs["both"]) / 2**30}


def _clock(case: Case, metric: str) -> Callable[..., float]:
    """What times the case's programs: seconds a call."""
    return device_seconds if metric == "gbps" or case.short else median_seconds


def _normal(leaf: jax.Array) -> jax.Array:
    return jax.random.normal(jax.random.key(1), leaf.shape, leaf.dtype)


def median_seconds(compiled: Callable[..., Any], *args: Any) -> float:
    """Time batches of calls of at least 20 ms, after warming up; the median of ten batches, or of 2 s, per call.

    A GPU has had SETTLED seconds of calls by then.
    """
    start = time.perf_counter()
    jax.block_until_ready(compiled(*args))
    if time.perf_counter() - start < 0.2:
        jax.block_until_ready([compiled(*args) for _ in range(2)])
        start = time.perf_counter()
        jax.block_until_ready(compiled(*args))
    once = time.perf_counter() - start
    calls = int(np.clip(0.02 / once, 1, 50))

    def batch() -> float:
        start = time.perf_counter()
        for _ in range(calls - 1):
            compiled(*args)
        jax.block_until_ready(compiled(*args))
        return (time.perf_counter() - start) / calls

    end = time.perf_counter() + (SETTLED if jax.default_backend() == "gpu" else 0)
    while time.perf_counter() < end:
        batch()
    times = [batch() for _ in range(int(np.clip(2 / (calls * once), 3, 10)))]
    return float(np.median(times))


def device_seconds(compiled: Callable[..., Any], *args: Any) -> float:
    """Time a call by the GPU's own clock (`_profile.kernel_seconds`), on other devices by the host's."""
    return (kernel_seconds if jax.default_backend() == "gpu" else median_seconds)(compiled, *args)


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
