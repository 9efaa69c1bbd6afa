"""Times one training step (LoRA, QLoRA, full) on random weights and random tokens, beside the peers people use today.

Usage: python scripts/bench_train.py [--shape llama3.1-8b] [--base nf4] [--remat full ...] [--batch 4x2048]
           [--finetune full --optim adamw_8bit] [--fused on off] [--peers hf-liger unsloth]
       python scripts/bench_train.py ladder ...     what each kind of kernel adds, see bench_ladder.py
       python scripts/bench_train.py --only ...     (this process times gymjax alone and prints one line)

With --fused on off the step is timed with and without enable_liger_kernel; the latter is the former's peer `unfused`.

Every system runs in a process of its own, one after the other, on the same machine, the peers first; each setting's
lines go to --out (by default scripts/results/train.jsonl) as it ends. Peers need a folder for their model
(--peer-model), which is made when it is missing.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from step_shapes import SHAPES, Setting, add_options, decoder_cfg, planned_step, setting_of, trained_model  # noqa: E402

from pallas_kernels.bench import commit  # noqa: E402  (after the path)

WARM_UP, LONG = 3, 20.0  # steps before those that are timed; seconds of a first step that is timed itself, alone
METRICS = {"tok_s": True, "peak_gib": False}  # whether more is better


def compile_step(setting: Setting):
    """Compiles the trainer's own step, then makes random weights for it: (program, plan, state, frozen, batch)."""
    import jax
    import numpy as np

    from gymjax.training.compile import compile_program
    from gymjax.training.metrics import GIB, device_memory_gib
    from gymjax.training.step import init_state, split_model

    limit = device_memory_gib()
    plan, optimizer, step = planned_step(setting, None if limit is None else int(limit * GIB))
    work, rows, length = plan.work, setting.rows, setting.length
    tokens = np.random.default_rng(0).integers(3, work.cfg.vocab_size, (1, rows, length)).astype(np.int32)
    batch = {
        "tokens": tokens,
        "targets": np.roll(tokens, -1, axis=-1),
        "loss_weights": np.ones(tokens.shape, np.float32),
        "segment_ids": np.ones(tokens.shape, np.int32),
        "positions": np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape),
    }
    batch = jax.device_put(batch)
    program = compile_program(step, work.state, work.frozen, batch)
    _, params, frozen = split_model(trained_model(setting))
    return program, plan, init_state(params, optimizer, None), frozen, batch


def time_step(setting: Setting, steps: int) -> dict:
    """Compiles and times the trainer's own step.

    Returns:
        tok_s, compile_s, loss and the like; of memory peak_gib (measured), predicted_gib (the compiler's analysis),
        plan_gib (the planner's, with the remat it chose), live_gib (arrays before the first step); what the allocator
        counts before the first step, after it and at the end (in_use_gib), and its peaks so far at the former two.
    """
    import jax

    from gymjax.training.metrics import GIB, peak_flops, peak_memory_gib, step_flops

    program, plan, state, frozen, batch = compile_step(setting)
    live, memory = sum(array.nbytes for array in jax.live_arrays()), [allocator()]
    seconds, metrics = [], {}
    while len(seconds) < WARM_UP + steps and not (seconds and seconds[0] > LONG):
        started = time.perf_counter()
        state, metrics = program.call(state, frozen, batch)
        jax.block_until_ready(metrics)
        seconds.append(time.perf_counter() - started)
        memory.append(allocator())
    memory, seconds = [*memory[:2], memory[-1]], seconds[WARM_UP:] or seconds
    median = statistics.median(seconds)
    tokens, peak = setting.rows * setting.length, peak_flops()
    frozen = setting.finetune == "lora"
    flops = step_flops(decoder_cfg(setting.shape), tokens, setting.length, frozen_base=frozen)
    return {
        "tok_s": tokens / median,
        "seconds": median,
        "spread": (max(seconds) - min(seconds)) / median,
        "peak_gib": peak_memory_gib(),
        "predicted_gib": program.peak_gib,
        "plan_gib": plan.memory.peak / GIB,
        "remat": plan.remat,
        "live_gib": live / GIB,
        "in_use_gib": [each["bytes_in_use"] / GIB for each in memory],
        "peaks_gib": [each["peak_bytes_in_use"] / GIB for each in memory[:2]],
        "compile_s": program.seconds,
        "trace_s": program.traced,
        "mfu": None if peak is None else flops / median / peak,
        "loss": float(metrics["loss"]),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }


def allocator() -> dict[str, int]:
    """What the device's allocator counts, zeros where there is none (CPU)."""
    import jax

    return {"bytes_in_use": 0, "peak_bytes_in_use": 0} | (jax.local_devices()[0].memory_stats() or {})


def run_process(command: list[str], count: int = 1) -> list[dict | None]:
    """Runs one system; its lines that begin with RESULT are its measurements, None for one that failed."""
    print("+", " ".join(command), flush=True)
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or len(results) < count:
        print(f"failed with status {done.returncode}:\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}", flush=True)
    print(*results, sep="\n", flush=True)
    found: list[dict | None] = [json.loads(line.removeprefix("RESULT ")) for line in results]
    return [None if one is None or "error" in one else one for one in (found + [None] * count)[:count]]


def lines(case: str, ours: dict, peers: dict[str, dict]) -> list[dict]:
    """Result lines: each metric of our step beside each peer's; what has no peer stands by itself."""
    about = {"device": ours["device"], "jax": ours["jax"], "commit": commit()}
    about["time"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    shared = {"bench": "train", "case": case, "implementation": "gymjax"}
    alone = {"peer": None, "peer_value": None, "ratio": None}
    by_itself = ["compile_s", "mfu", *([] if peers else METRICS)]
    found = [shared | {"metric": name, "value": ours[name]} | alone | about for name in by_itself if ours[name]]
    if ours["peak_gib"]:  # how good the planner is: its ratio is measured over planned
        measured = {"peer": "measured", "peer_value": ours["peak_gib"], "ratio": ours["peak_gib"] / ours["plan_gib"]}
        found.append(shared | {"metric": "plan_gib", "value": ours["plan_gib"]} | measured | about)
    for peer, theirs in peers.items():
        for metric, more_is_better in METRICS.items():
            if ours[metric] is None:
                continue
            ratio = ours[metric] / theirs[metric] if more_is_better else theirs[metric] / ours[metric]
            values = {
                "metric": metric,
                "value": ours[metric],
                "peer": peer,
                "peer_value": theirs[metric],
                "ratio": ratio,
            }
            found.append(shared | values | about)
    return found


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    several = "full, selective, offload, none, auto, or names joined by commas; several are timed beside the same peers"
    parser.add_argument("--remat", nargs="+", default=["full"], help=several)
    parser.add_argument("--batch", nargs="+", default=["4x2048"], help="rows x tokens; several are timed in turn")
    parser.add_argument("--fused", nargs="+", choices=("on", "off"), default=["on"], help="enable_liger_kernel")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--peers", nargs="*", default=[], choices=("hf-liger", "hf", "unsloth"))
    parser.add_argument("--peer-model", default="outputs/peer_model")
    parser.add_argument("--out", default=str(ROOT / "scripts" / "results" / "train.jsonl"))
    parser.add_argument("--only", action="store_true", help="time gymjax in this process and print the result")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Times gymjax and the peers, appends lines."""
    if arguments[:1] == ["ladder"]:
        import bench_ladder

        return bench_ladder.main(arguments[1:])
    options = parse(arguments)
    if options.only:
        setting = setting_of(options, options.batch[0], options.remat[0], fused=options.fused[0] == "on")
        print("RESULT " + json.dumps(time_step(setting, options.steps)))
        return 0
    if options.peers and options.finetune == "full":
        raise SystemExit("--peers train adapters; leave them out with --finetune full")
    command = [sys.executable, __file__, "--only", "--shape", options.shape, "--base", options.base]
    command += ["--steps", str(options.steps), "--finetune", options.finetune, "--optim", options.optim]
    command += ["--attention", options.attention] if options.attention else []
    script = str(ROOT / "scripts" / "peer_step.py")
    if options.peers and not (Path(options.peer_model) / "config.json").exists():
        what = "config" if options.peers == ["hf"] and options.base == "bf16" else "make"
        subprocess.run(
            [sys.executable, script, what, options.peer_model, json.dumps(SHAPES[options.shape])], check=True
        )
    peers = {}
    for peer in options.peers:
        measured = run_process(
            [sys.executable, script, peer, options.peer_model, options.base, *options.batch], len(options.batch)
        )
        peers |= {(peer, batch): result for batch, result in zip(options.batch, measured)}
    out = Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    failed = None in peers.values()
    for batch, remat in itertools.product(options.batch, options.remat):
        beside = {peer: theirs for (peer, size), theirs in peers.items() if size == batch and theirs is not None}
        for fused in sorted(options.fused):  # "off" first, which "on" is measured against
            measured = run_process([*command, "--batch", batch, "--remat", remat, "--fused", fused])[0]
            if measured is None:
                failed = True
                continue
            found = lines(setting_of(options, batch, remat, fused=fused == "on").name, measured, beside)
            beside["unfused"] = measured
            with out.open("a") as file:
                file.writelines(json.dumps(line) + "\n" for line in found)
            print(*map(json.dumps, found), sep="\n", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
