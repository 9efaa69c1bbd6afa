"""Times the cold compile of a training step on a GPU, in several ways, and the step itself where a way may change it.

Usage: python scripts/time_compile.py [--shape llama3.1-8b] [--base nf4] [--remat selective] [--batch 4x2048]
           [--ways ahead alone ...] [--steps 4] [--timeout 60] [--budget 150]

Each way runs in a process of its own without any cache, one after the other; one that fails or takes too long is named,
and the others go on. Columns: seconds of tracing and lowering, of XLA (kernels included), of both; then what a step
takes, the median of --steps, and the loss after them, which tells whether the ways compute the same.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from step_shapes import Setting, add_options, setting_of  # noqa: E402  (after the path)

# Whether kernels are compiled ahead, in threads, and flags of XLA's.
WAYS = {
    "ahead": (True, ""),
    "alone": (False, ""),
    # Fusions are the emitter's that XLA takes for best, untried.
    "fusions": (True, "--xla_gpu_experimental_enable_fusion_autotuner=false"),
    # Products are cuBLAS', tuned among its algorithms.
    "no-triton": (True, "--xla_gpu_enable_triton_gemm=false"),
    # Nothing is tried out.
    "level0": (True, "--xla_gpu_autotune_level=0"),
}


def time_way(setting: Setting, ahead: bool, steps: int) -> dict:
    """Compiles and times a step in this process."""
    import jax
    from bench_train import compile_step

    without = mock.patch("gymjax.training.compile.kernels_ahead", return_value=contextlib.nullcontext())
    with contextlib.nullcontext() if ahead else without:
        program, _, state, frozen, batch = compile_step(setting)
    seconds, losses = [], []
    for _ in range(steps + 1):
        started = time.perf_counter()
        state, metrics = program.call(state, frozen, batch)
        losses.append(float(jax.block_until_ready(metrics)["loss"]))
        seconds.append(time.perf_counter() - started)
    return {
        "traced": program.traced,
        "xla": program.seconds - program.traced,
        "total": program.seconds,
        "step_ms": 1e3 * statistics.median(seconds[1:]),
        "loss": losses[-1],
    }


def run_way(way: str, arguments: list[str], timeout: float) -> dict | None:
    """Runs one way in a process of its own; None where it failed."""
    environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {WAYS[way][1]}".strip()
    command = [sys.executable, __file__, "--only", way, *arguments]
    try:
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=timeout, env=environment, cwd=ROOT
        )
    except subprocess.TimeoutExpired:
        print(f"{way}: not done after {timeout:.0f} s", flush=True)
        return None
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not results:
        last = "\n  ".join((done.stderr or done.stdout).strip().splitlines()[-4:])
        print(f"{way}: failed with status {done.returncode}\n  {last}", flush=True)
        return None
    return json.loads(results[-1].removeprefix("RESULT "))


def main(arguments: list[str]) -> int:
    """Runs the ways and prints a line for each as it ends."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    parser.add_argument("--remat", default="selective", help="full, selective, offload, none or names joined by commas")
    parser.add_argument("--batch", default="4x2048", help="rows x tokens")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--steps", type=int, default=4, help="timed after a first one")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for a way")
    parser.add_argument(
        "--budget", type=float, default=150.0, help="seconds in all; a way that may not fit is left out"
    )
    parser.add_argument("--only", choices=WAYS, help="time this way in this process and print the result")
    options = parser.parse_args(arguments)
    setting = setting_of(options, options.batch, options.remat)
    if options.only:
        print("RESULT " + json.dumps(time_way(setting, WAYS[options.only][0], options.steps)))
        return 0
    print(f"{setting.name}, {os.cpu_count()} CPUs")
    print(f"{'way':<12}{'traced, s':>11}{'XLA, s':>9}{'both, s':>9}{'step, ms':>10}{'loss':>9}", flush=True)
    started, longest, failed = time.perf_counter(), 0.0, 0
    for way in options.ways:
        begun = time.perf_counter()
        if begun - started + longest > options.budget:
            print(f"{way}: left out, --budget {options.budget:.0f}")
            continue
        found = run_way(way, arguments, options.timeout)
        longest, failed = max(longest, time.perf_counter() - begun), failed + (found is None)
        if found is not None:
            seconds = f"{found['traced']:>11.2f}{found['xla']:>9.2f}{found['total']:>9.2f}"
            print(f"{way:<12}{seconds}{found['step_ms']:>10.1f}{found['loss']:>9.4f}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
