"""Times an operation beside its strongest peers in one run: cuDNN, tokamax and torch for attention, Liger for layers.

Usage: python scripts/bench_peers.py OP [CASE ...] [--out FILE]    (cases: pallas_kernels/OP/cases.py)

Lines go to scripts/results/OP.jsonl. Peers that are not installed, or that do not do a case, are named on the error
stream. Each implementation or peer is a process of its own with all cases: they start and compile side by side, then
take turns at the GPU, and one that hangs is stopped. Several of these programs at a time take turns too if they are
given the same folder, --turns. What is short or measured in bytes is timed by the GPU's own clock, as kernels'
durations, here and in torch. `copy` is the rate at which this run reads and writes 1 GiB, the roof of operations that
move more than they compute.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench_torch import describe, time_torch, torch_metrics
from gpu_turns import Turns

COPY, TORCH = "copy", "torch"


def tokamax_attention(q, k, v, *, causal, window, segment_ids, softcap=None, deterministic=None):
    """tokamax's Hopper kernels; they have neither documents nor, in this call, windows."""
    import tokamax

    del deterministic
    if window is not None or segment_ids is not None:
        raise NotImplementedError("not compared on windows and documents")
    return tokamax.dot_product_attention(q, k, v, is_causal=causal, logits_soft_cap=softcap, implementation="mosaic")


def tokamax_ragged_dot(x, w, group_sizes):
    """tokamax's Hopper kernels for grouped products; its weights are (E, D, F)."""
    import tokamax

    try:
        return tokamax.ragged_dot(x, w, group_sizes, implementation="mosaic")
    except Exception as error:  # whatever it refuses with, the others are still timed
        raise NotImplementedError(f"tokamax: {error}") from error


def liger_in_jax(x, scale, *, eps):
    """Liger's forward kernel for short rows."""
    from bench_liger import rms_norm

    return rms_norm(x, scale, eps=eps)


def copy_rate() -> dict[str, float]:
    """GB/s of adding 1 to 1 GiB, as a peer of operations that are measured in GB/s."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels._profile import KERNELS_APART
    from pallas_kernels.bench import device_seconds

    x = jnp.zeros(2**29, jnp.bfloat16)
    rate = 2 * x.nbytes / device_seconds(jax.jit(lambda x: x + 1).lower(x).compile(KERNELS_APART), x) / 1e9
    return {"gbps": rate, "gbps_bwd": rate}


OURS = {"flash_attention": ("mosaic_gpu", "cudnn"), "grouped_matmul": ("mosaic_gpu", "xla")}
"""What is timed of ours where not all is worth its time."""

NEEDED = {"tokamax": ("tokamax",), "liger_in_jax": ("jax_triton", "liger_kernel", "torch")}
"""Packages of JAX's peers."""

LARGE = 40 * 2**30  # bytes: ragged_dot's gradient needs two copies of the wider side for each expert


def peers_of(op: str, case, module) -> dict[str, Any]:
    """The peers that run in JAX."""
    from pallas_kernels import bench
    from pallas_kernels._case import Peer

    peers = dict(module.PEERS)
    if op == "flash_attention":
        peers = {"tokamax": Peer(tokamax_attention)}
    if op == "rms_norm" and not case.wrt:
        peers["liger_in_jax"] = Peer(liger_in_jax, lambda x, scale: (x, scale.astype(x.dtype)))
    if op == "grouped_matmul":  # without the one that takes E times the work and memory
        x, w, *_ = bench.shapes_of(case)[0]
        peers = {"tokamax": Peer(tokamax_ragged_dot, module.swapped)}
        if 4 * x.shape[0] * w.shape[0] * max(w.shape[1:]) <= LARGE:
            peers["ragged_dot"] = module.PEERS["ragged_dot"]
    for peer, needed in NEEDED.items():
        missing = [package for package in needed if importlib.util.find_spec(package) is None]
        if peer in peers and missing:
            print(f"{peer} is not timed: {', '.join(missing)} not installed", file=sys.stderr)
            del peers[peer]
    return peers


def systems_of(op: str, case, module) -> list[str]:
    """Implementations and JAX's peers that are timed on a case."""
    from pallas_kernels import bench

    return [*(OURS.get(op) or bench.existing(op)), *({} if case.function else peers_of(op, case, module))]


def time_system(op: str, cases: list, module, system: str, turns: Turns) -> None:
    """Prints {"case", "device", "metrics"}, one JSON object a line, of one implementation or peer on all its cases."""
    import jax

    from pallas_kernels import bench

    device = jax.devices()[0].device_kind
    if system == COPY:
        with turns.alone(COPY):
            print(json.dumps({"case": None, "device": device, "metrics": copy_rate()}))
        return
    peers = {case.name: None if case.function else peers_of(op, case, module).get(system) for case in cases}

    def compiled(case):
        return bench.compile_case(op, case, module, system, peers[case.name])

    at_once = 1 if any(peers.values()) else 4  # tokamax hangs when it compiles in several threads
    with ThreadPoolExecutor(at_once) as pool:
        ready = list(pool.map(compiled, cases))
    for i, case in enumerate(cases):
        programs, ready[i] = ready[i], None
        if programs is not None:
            with turns.alone(f"{case.name} {system}"):
                metrics = bench.time_case(programs, system)
            print(json.dumps({"case": case.name, "device": device, "metrics": metrics}), flush=True)


def run_process(arguments: list[str], end: float) -> list[Any]:
    """What this program printed as JSON in a process of its own, until it ended or was stopped at `end`."""
    process = subprocess.Popen([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        told, _ = process.communicate(timeout=max(1, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        told, _ = process.communicate()
        print(f"{' '.join(arguments[-2:])}: not ended in time", file=sys.stderr)
    return [json.loads(line) for line in told.splitlines()]


def measure(op: str, cases: list, module, run: Callable[..., Any], out: Path) -> None:
    """Times all systems on all cases, and appends the lines to `out`."""
    from pallas_kernels import bench

    of_case = {case.name: systems_of(op, case, module) for case in cases}
    of_system: dict[str, list] = {}
    for case in cases:
        for system in of_case[case.name]:
            of_system.setdefault(system, []).append(case)
    running = {system: run(of, "--system", system) for system, of in of_system.items()}
    if any((case.metric or module.METRIC) == "gbps" for case in cases):
        running[COPY] = run(cases[:1], "--system", COPY)
    described = describe(op, cases) if importlib.util.find_spec("torch") else []
    in_torch = run(cases[:1], "--torch", json.dumps(described)) if described else None
    told = {system: {each["case"]: each for each in future.result()} for system, future in running.items()}
    theirs = {case: times for each in (in_torch.result() if in_torch else []) for case, times in each.items()}
    device = next((each["device"] for of in told.values() for each in of.values()), None)
    for case in cases:
        metric = case.metric or module.METRIC
        found = {system: told[system].get(case.name) for system in of_case[case.name]}
        if metric == "gbps":
            found[COPY] = told[COPY].get(None)
        results = {system: each["metrics"] for system, each in found.items() if each and each["metrics"]}
        for peer, times in theirs.get(case.name, {}).items():
            results[peer] = torch_metrics(case, *times, tera=metric != "gbps")
        for line in bench.lines(op, case, results, OURS.get(op), device):
            text = json.dumps(line)
            print(text, flush=True)
            with out.open("a") as target:
                target.write(text + "\n")


def main() -> None:
    """Measures the named cases of an operation, or all, and appends their lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("op")
    parser.add_argument("case", nargs="*")
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--tiny", action="store_true", help="the tests' cases, to try this program itself on any device"
    )
    parser.add_argument("--seconds", type=float, default=600, help="for everything; what has not ended then is stopped")
    parser.add_argument("--turns", type=Path, help="the folder in which the processes arrange their turns")
    parser.add_argument("--system", help=argparse.SUPPRESS)
    parser.add_argument("--torch", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.torch:
        time_torch(json.loads(options.torch), Turns(options.turns))
        return
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several processes share the GPU's memory

    from pallas_kernels import OPS

    if options.op not in OPS:
        parser.error(f"unknown operation {options.op!r}; known: {', '.join(OPS)}")
    module = importlib.import_module(f"pallas_kernels.{options.op}.cases")
    known = {case.name: case for case in (module.TINY if options.tiny else module.CASES)}
    if unknown := set(options.case) - set(known):
        parser.error(f"unknown cases {sorted(unknown)}; known: {', '.join(known)}")
    cases = [known[name] for name in options.case or known]
    if options.system:
        time_system(options.op, cases, module, options.system, Turns(options.turns))
        return
    end = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory() as own_turns, ThreadPoolExecutor(16) as pool:
        turns = str(options.turns or own_turns)
        Path(turns).mkdir(parents=True, exist_ok=True)

        def run(of: list, *more: str):
            own = [options.op, *(case.name for case in of), "--turns", turns, *["--tiny"] * options.tiny, *more]
            return pool.submit(run_process, own, end)

        measure(options.op, cases, module, run, options.out or Path("scripts/results") / f"{options.op}.jsonl")


if __name__ == "__main__":
    main()
