"""Times an operation beside its strongest peers in one run: cuDNN, tokamax and torch for attention, Liger for layers.

Usage: python scripts/bench_peers.py OP [CASE ...] [--out FILE]    (cases: pallas_kernels/OP/cases.py)

Lines go to scripts/results/OP.jsonl. Peers that are not installed, or that do not do a case, are named on the error
stream. Each implementation of a case is a process of its own, and torch with all cases is one more: they start and
compile side by side, then take turns at the GPU, and one that hangs is stopped. `copy` is the rate at which this run
reads and writes 1 GiB, the roof of operations that move more than they compute.
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


def copy_rate() -> dict[str, float]:
    """GB/s of adding 1 to 1 GiB, as a peer of operations that are measured in GB/s."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.bench import median_seconds

    x = jnp.zeros(2**29, jnp.bfloat16)
    rate = 2 * x.nbytes / median_seconds(jax.jit(lambda x: x + 1).lower(x).compile(), x) / 1e9
    return {"gbps": rate, "gbps_bwd": rate}


OURS = {"flash_attention": ("mosaic_gpu", "cudnn"), "grouped_matmul": ("mosaic_gpu", "xla")}
"""What is timed of ours where not all is worth its time."""

LARGE = 32 * 2**30  # bytes: ragged_dot's gradient needs two f32 copies of the wider side for each expert


def peers_of(op: str, case, module) -> dict[str, Any]:
    """The peers that run in JAX."""
    from pallas_kernels import bench
    from pallas_kernels._case import Peer

    peers = dict(module.PEERS)
    if op == "flash_attention":
        peers = {"tokamax": Peer(tokamax_attention)}
    if op == "grouped_matmul":  # without the one that takes E times the work and memory
        x, w, *_ = bench.shapes_of(case)[0]
        peers = {"tokamax": Peer(tokamax_ragged_dot, module.swapped)}
        if 8 * x.shape[0] * w.shape[0] * max(w.shape[1:]) <= LARGE:
            peers["ragged_dot"] = module.PEERS["ragged_dot"]
    if "tokamax" in peers and importlib.util.find_spec("tokamax") is None:
        print("tokamax is not installed and not timed", file=sys.stderr)
        del peers["tokamax"]
    return peers


def systems_of(op: str, case, module) -> list[str]:
    """Implementations and JAX's peers that are timed on a case."""
    from pallas_kernels import bench

    return [*(OURS.get(op) or bench.existing(op)), *({} if case.function else peers_of(op, case, module))]


def time_system(op: str, case, module, system: str, turns: Turns) -> None:
    """Prints {"device": its name, "metrics": of one implementation or peer on a case} as one JSON object."""
    import jax

    from pallas_kernels import bench

    if system == COPY:
        with turns.alone():
            print(json.dumps({"device": jax.devices()[0].device_kind, "metrics": copy_rate()}))
        return
    peers = {} if case.function else peers_of(op, case, module)
    is_peer = system in peers
    timed = {"implementations": () if is_peer else (system,), "peers": {system: peers[system]} if is_peer else {}}
    results = bench.rates(op, case, module, **timed, alone=turns.alone())
    print(json.dumps({"device": jax.devices()[0].device_kind, "metrics": results.get(system)}))


def run_process(arguments: list[str], end: float) -> Any:
    """What this program printed as JSON in a process of its own, None where it failed or had not ended at `end`."""
    try:
        patience = max(1, end - time.monotonic())
        done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, timeout=patience)
    except subprocess.TimeoutExpired:
        print(f"{' '.join(arguments[:4])}: not ended in time", file=sys.stderr)
        return None
    if done.returncode or done.stderr.startswith(arguments[1]):
        print(f"{' '.join(arguments[:4])}: {done.stderr.strip()[-500:]}", file=sys.stderr)
    return None if done.returncode else json.loads(done.stdout.splitlines()[-1])


def measure(op: str, cases: list, module, run: Callable[..., Any], out: Path) -> None:
    """Starts everything, and appends each case's lines to `out` when all its systems have ended."""
    from pallas_kernels import bench

    described = describe(op, cases) if importlib.util.find_spec("torch") else []
    in_torch = run(cases[0].name, TORCH, "--torch", json.dumps(described)) if described else None
    copied = run(cases[0].name, COPY) if any((case.metric or module.METRIC) == "gbps" for case in cases) else None
    timed = {case.name: {system: run(case.name, system) for system in systems_of(op, case, module)} for case in cases}
    for case in cases:
        metric = case.metric or module.METRIC
        told = {system: future.result() for system, future in timed[case.name].items()}
        if copied is not None and metric == "gbps":
            told[COPY] = copied.result()
        results = {system: each["metrics"] for system, each in told.items() if each and each["metrics"]}
        theirs = (in_torch and in_torch.result()) or {}
        for peer, times in theirs.get(case.name, {}).items():
            results[peer] = torch_metrics(case, *times, tera=metric != "gbps")
        device = next((each["device"] for each in told.values() if each), None)
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
    parser.add_argument("--processes", type=int, default=32, help="that compile side by side")
    parser.add_argument("--seconds", type=float, default=600, help="for everything; what has not ended then is stopped")
    parser.add_argument("--turns", type=Path, help=argparse.SUPPRESS)
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
        time_system(options.op, cases[0], module, options.system, Turns(options.turns))
        return
    end = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory() as turns, ThreadPoolExecutor(options.processes) as pool:

        def run(case: str, system: str, *more: str):
            own = [options.op, case, "--system", system, "--turns", turns, *["--tiny"] * options.tiny, *more]
            return pool.submit(run_process, own, end)

        measure(options.op, cases, module, run, options.out or Path("scripts/results") / f"{options.op}.jsonl")


if __name__ == "__main__":
    main()
