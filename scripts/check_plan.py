"""Compares planned memory with the compiler's analysis and, on a GPU, with what was measured, setting by setting.

Usage: python scripts/check_plan.py [--steps 2] [--offline] [SETTING ...]       (a setting: shape,base,batch,remat)

Each setting runs in a process of its own: a step of bench_train.py on random weights, with the attention that packed
rows take (--attention names another). A setting that fails is named, and the others go on. With --offline the step is
compiled for an H200 on any machine (compile_step.py) and nothing is measured; with
XLA_FLAGS=--xla_gpu_enable_triton_gemm=false it has the matrix products that tuning mostly picks.

Columns: planned, the compiler's (XLA), measured, and by how much the plan is off the last one there is; then what the
arrays take before the first step, what the allocator counts for them, at the end again, and its peaks after compiling
and after one step: they say whether a difference is the allocator's waste, grew with the steps, or comes from tuning.
Exit status 1 where a setting failed or a plan is more than BAR off.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent
SETTINGS = (
    "llama3.1-8b,nf4,4x2048,full",
    "llama3.1-8b,nf4,4x2048,offload",
    "llama3.1-8b,nf4,4x2048,selective",
    "llama3.1-8b,nf4,4x2048,auto",
    "llama3.1-8b,nf4,16x2048,full",
    "llama3.1-8b,nf4,16x2048,auto",
    "llama3.1-8b,nf4,1x8192,attention,attention_lse,q,k,v",
    "llama3.1-8b,nf4,1x32768,offload",
    "llama3.1-8b,bf16,4x2048,none",
    "llama2-7b,nf4,4x2048,full",
    "llama2-7b,bf16,8x1024,gate",
    "llama3.1-70b,nf4,1x4096,full",
)
BAR = 0.05


def run(setting: str, steps: int, attention: str, offline: bool) -> dict | None:
    """A setting's numbers; None where it failed."""
    shape, base, batch, remat = setting.split(",", 3)
    options = ["--shape", shape, "--base", base, "--batch", batch, "--remat", remat, "--attention", attention]
    script = ["compile_step.py", "--json"] if offline else ["bench_train.py", "--only", "--steps", str(steps)]
    command = [sys.executable, str(SCRIPTS / script[0]), *script[1:], *options]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600, env=os.environ)
    except subprocess.TimeoutExpired:
        print(f"{setting}: not done after 600 s", flush=True)
        return None
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not results:
        last = "\n  ".join((done.stderr or done.stdout).strip().splitlines()[-4:])
        print(f"{setting}: failed with status {done.returncode}\n  {last}", flush=True)
        return None
    return json.loads(results[-1].removeprefix("RESULT "))


def off(result: dict) -> float:
    """How far the plan is off what was measured, or where nothing was, the compiler's analysis."""
    truth = result.get("peak_gib") or result["predicted_gib"]
    return result["plan_gib"] / truth - 1


def row(setting: str, result: dict) -> str:
    """One line of the table."""
    before, _, after = result.get("in_use_gib", (None,) * 3)
    shown = [result.get(name) for name in ("plan_gib", "predicted_gib", "peak_gib", "live_gib")]
    shown += [before, after, *result.get("peaks_gib", (None, None))]
    planned, predicted, measured, *counted = (f"{value:8.2f}" if value else f"{'-':>8}" for value in shown)
    speed = f"{result['tok_s']:8.0f} tok/s" if result.get("tok_s") else ""
    chosen = f" -> {result['remat']}" if setting.endswith("auto") else ""
    return f"{setting:<54}{planned}{predicted}{measured} {off(result):+7.1%}{''.join(counted)} {speed}{chosen}"


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("settings", nargs="*", default=SETTINGS)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--attention", default="mosaic_gpu", choices=("mosaic_gpu", "cudnn", "xla"))
    parser.add_argument("--offline", action="store_true")
    options = parser.parse_args()
    columns = "".join(f"{name:>8}" for name in ("planned", "XLA", "peak"))
    counted = "".join(f"{name:>8}" for name in ("live", "in use", "at end", "compile", "1 step"))
    print(f"{'setting (GiB)':<54}{columns} {'off':>7}{counted}")
    found = {}
    for setting in options.settings:
        result = run(setting, options.steps, options.attention, options.offline)
        if result is not None:
            found[setting] = result
            print(row(setting, result), flush=True)
    far = [setting for setting, result in found.items() if abs(off(result)) > BAR]
    failed = len(options.settings) - len(found)
    print(f"{len(found)} settings, {len(found) - len(far)} within {BAR:.0%}; {failed} failed")
    return int(bool(far or failed))


if __name__ == "__main__":
    sys.exit(main())
