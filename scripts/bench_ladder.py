"""Times a training step rung by rung: what flash attention, fused kernels, and LoRA and NF4 kernels each add.

Usage: python scripts/bench_train.py ladder [--shape llama3.1-8b] [--base nf4] [--batch 4x2048] [--steps 4]
           [--rungs dense flash ...] [--peers torch unsloth] [--budget SECONDS]

The same step every time, with everything recomputed in the backward pass; each rung keeps what the one below has:

    dense    dense attention; plain jnp, and a loss that holds all logits (enable_liger_kernel: false); adapters and NF4
             as XLA compiles them
    flash    flash attention
    fused    kernels for loss, norms, rotation and SwiGLU (enable_liger_kernel: true)
    kernels  kernels for adapters and NF4
    kept     what of the activations fits into memory is kept

Beside them the torch stack's rungs: transformers + PEFT + bitsandbytes with eager attention, with SDPA, with Liger; and
Unsloth. Every rung of ours, all of transformers', and Unsloth are a process each. One that fails, runs out of memory or
out of the budget is reported, the others go on. Lines go to --out (by default scripts/results/ladder.jsonl);
`python scripts/results_ladder.py` draws them.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import subprocess
import sys
import time
from pathlib import Path

import bench_train
from step_shapes import SHAPES, setting_of

from pallas_kernels._dispatch import left_to_xla
from pallas_kernels.bench import commit

ROOT = Path(__file__).resolve().parent.parent
LINEAR = ("lora_linear", "nf4_linear")


@dataclasses.dataclass(frozen=True)
class Rung:
    """One rung of ours.

    Attributes:
        attention: implementation; None for the fastest.
        fused: as in a Setting.
        plain: operations without a kernel.
        remat: what is kept for the backward pass.
        peer: the torch stack's rung that does the like.
    """

    attention: str | None
    fused: bool
    plain: tuple[str, ...]
    remat: str
    peer: str


RUNGS = {
    "dense": Rung("xla", False, LINEAR, "full", "hf-eager"),
    "flash": Rung(None, False, LINEAR, "full", "hf-sdpa"),
    "fused": Rung(None, True, LINEAR, "full", "hf-liger"),
    "kernels": Rung(None, True, (), "full", "unsloth"),
    "kept": Rung(None, True, (), "auto", "unsloth"),
}
PEERS = {"torch": ("hf-eager", "hf-sdpa", "hf-liger"), "unsloth": ("unsloth",)}
OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "out of memory", "OutOfMemory")


def time_rung(name: str, options: argparse.Namespace) -> dict:
    """Times one rung of ours in this process."""
    rung = RUNGS[name]
    setting = setting_of(options, options.batch, rung.remat, fused=rung.fused)
    setting = dataclasses.replace(setting, attention=rung.attention)
    with left_to_xla(*rung.plain):
        return bench_train.time_step(setting, options.steps)


def measure(command: list[str], seconds: float) -> list[dict]:
    """Results of a process, those it printed before it failed or was stopped among them."""
    if seconds < 20:
        print(f"no time left for: {' '.join(command)}", flush=True)
        return []
    print("+", " ".join(command), flush=True)
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, errors = process.communicate(timeout=seconds)
        failed = process.returncode != 0
    except subprocess.TimeoutExpired:
        process.kill()
        out, errors = process.communicate()
        failed = True
        print(f"stopped after {seconds:.0f} s", flush=True)
    results = [line for line in out.splitlines() if line.startswith("RESULT ")]
    print(*results, f"{time.perf_counter() - started:.0f} s", sep="\n", flush=True)
    if failed:
        cause = "out of memory" if any(word in errors for word in OUT_OF_MEMORY) else errors[-3000:]
        print(f"failed: {cause}", flush=True)
    return [json.loads(line.removeprefix("RESULT ")) for line in results]


def lines(options: argparse.Namespace, ours: dict[str, dict], peers: dict[str, dict]) -> list[dict]:
    """Result lines: every rung of ours beside the torch stack's, where that was timed."""
    about = {"jax": next((each["jax"] for each in ours.values()), None), "commit": commit()}
    about |= {"device": next((each["device"] for each in ours.values()), None)}
    about |= {"time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}
    found = []
    for name, result in ours.items():
        peer = RUNGS[name].peer
        beside = peers.get(peer)
        for metric, more_is_better in bench_train.METRICS.items():
            value, theirs = result[metric], None if beside is None else beside[metric]
            if value is None:
                continue
            ratio = None if theirs is None else value / theirs if more_is_better else theirs / value
            case = f"{options.shape}-{options.base}-{options.batch}-{name}"
            shared = {"bench": "ladder", "case": case, "implementation": "gymjax", "metric": metric, "value": value}
            versus = {"peer": None if beside is None else peer, "peer_value": theirs, "ratio": ratio}
            found.append(shared | versus | about)
    return found


def make_peer_model(options: argparse.Namespace, seconds: float) -> bool:
    """Writes the peers' model where it is missing; false where that fails."""
    if (Path(options.peer_model) / "config.json").exists():
        return True
    command = [sys.executable, str(ROOT / "scripts" / "peer_step.py"), "make", options.peer_model]
    try:
        return (
            subprocess.run([*command, json.dumps(SHAPES[options.shape])], timeout=seconds, check=False).returncode == 0
        )
    except subprocess.TimeoutExpired:
        return False


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="bench_train.py ladder", description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="llama3.1-8b")
    parser.add_argument("--base", choices=("nf4", "bf16"), default="nf4")
    parser.add_argument("--batch", default="4x2048", help="rows x tokens")
    parser.add_argument("--steps", type=int, default=4, help="timed, after three to warm up")
    parser.add_argument("--rungs", nargs="*", choices=RUNGS, default=list(RUNGS))
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=[])
    parser.add_argument("--peer-model", help="folder; default outputs/peer_model_SHAPE")
    parser.add_argument("--timeout", type=float, default=150, help="seconds for one process")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds for everything")
    parser.add_argument("--out", default=str(ROOT / "scripts" / "results" / "ladder.jsonl"))
    parser.add_argument("--only", choices=RUNGS, help="time this rung in this process and print the result")
    options = parser.parse_args(arguments)
    options.peer_model = options.peer_model or f"outputs/peer_model_{options.shape}"
    options.finetune, options.optim, options.attention = "lora", "adamw", None
    return options


def main(arguments: list[str]) -> int:
    """Times the rungs and the peers, appends lines."""
    options = parse(arguments)
    if options.only:
        print("RESULT " + json.dumps({"name": options.only} | time_rung(options.only, options)))
        return 0
    ends = time.perf_counter() + options.budget

    def left() -> float:
        return min(options.timeout, ends - time.perf_counter())

    shared = ["--shape", options.shape, "--base", options.base, "--batch", options.batch, "--steps", str(options.steps)]
    results = []
    for name in options.rungs:
        results += measure([sys.executable, bench_train.__file__, "ladder", "--only", name, *shared], left())
    if options.peers and make_peer_model(options, max(left(), 1)):
        scripts, where = ROOT / "scripts", [options.peer_model, options.base, options.batch]
        if "torch" in options.peers:
            results += measure([sys.executable, str(scripts / "peer_ladder.py"), *where, str(options.steps)], left())
        if "unsloth" in options.peers:
            timed = measure([sys.executable, str(scripts / "peer_step.py"), "unsloth", *where], left())
            results += [{"name": "unsloth"} | each for each in timed]
    done = {each["name"]: each for each in results if "error" not in each}
    expected = [*options.rungs, *(name for group in options.peers for name in PEERS[group])]
    found = lines(options, {n: each for n, each in done.items() if n in RUNGS}, done)
    out = Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in found)
    for name in expected:
        row = done.get(name)
        peak = "" if row is None or row["peak_gib"] is None else f"{row['peak_gib']:8.2f} GiB"
        print(f"{name:9s} " + ("failed" if row is None else f"{row['tok_s']:9,.0f} tokens/s {peak}"), flush=True)
    return int(any(name not in done for name in expected))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
