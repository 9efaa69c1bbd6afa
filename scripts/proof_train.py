"""gymjax' side of proof_qlora.py: the trainer's own step from a given start on given rows.

Usage: python scripts/proof_train.py FOLDER nf4|bf16 OUT.json [xla]

With "xla" every operation is left to XLA, for telling a kernel's fault from another.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import jax
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from gymjax.checkpoint.hf import open_folder  # noqa: E402  (after the path)
from gymjax.checkpoint.peft import load_adapter  # noqa: E402
from gymjax.checkpoint.weights import load_decoder  # noqa: E402
from gymjax.config import OptimConfig  # noqa: E402
from gymjax.models import decoder_config  # noqa: E402
from gymjax.optim.build import build  # noqa: E402
from gymjax.training.step import StepSettings, init_state, make_eval_step, make_step, split_model  # noqa: E402
from pallas_kernels import OPS  # noqa: E402
from pallas_kernels._dispatch import left_to_xla  # noqa: E402

OPTIM = ("learning_rate", "adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay", "max_grad_norm", "warmup_steps")


def batch_of(rows: np.ndarray) -> dict[str, np.ndarray]:
    """A microbatch of whole rows (B, T + 1): every token is trained."""
    tokens = rows[:, :-1]
    return {
        "tokens": tokens,
        "targets": rows[:, 1:],
        "loss_weights": np.ones(tokens.shape, np.float32),
        "segment_ids": np.ones(tokens.shape, np.int32),
        "positions": np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape),
    }


def load(folder: Path, base: str, precision: str):
    """The base, packed or not, with the adapter that the other side starts from."""
    source = open_folder(folder / "model")
    dtype = "bfloat16" if precision == "bf16" else "float32"
    model = load_decoder(decoder_config(source.config), source, dtype=dtype, quantize_nf4=base == "nf4")
    load_adapter(model, folder / "adapter")
    return model


def train(folder: Path, base: str) -> dict:
    """Losses and gradient norms of every step, held-out losses before and after."""
    settings = json.loads((folder / "settings.json").read_text())
    given = np.load(folder / "rows.npz")
    optim = OptimConfig(lr_scheduler_type="cosine", **{name: settings[name] for name in OPTIM})
    graphdef, params, frozen = split_model(load(folder, base, settings["precision"]))
    optimizer = build(optim, settings["steps"], params)
    chosen = StepSettings(seed=0, max_grad_norm=optim.max_grad_norm, packed=False)
    step = jax.jit(make_step(graphdef, optimizer, chosen), donate_argnums=0)
    eval_step = jax.jit(make_eval_step(graphdef, chosen))

    def evaluate(params) -> float:
        batches = np.split(given["evaluation"], len(given["evaluation"]) // settings["rows"])
        sums = [eval_step(params, frozen, batch_of(rows)) for rows in batches]
        return sum(float(loss) for loss, _ in sums) / sum(float(weight) for _, weight in sums)

    state = init_state(params, optimizer, None)
    before = evaluate(state.params)
    losses, norms, seconds = [], [], []
    for rows in given["train"].reshape(settings["steps"], settings["rows"], -1):
        batch = {name: value[None] for name, value in batch_of(rows).items()}
        started = time.perf_counter()
        state, metrics = step(state, frozen, batch)
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
        seconds.append(time.perf_counter() - started)
        if len(losses) % 25 == 0:
            print(f"step {len(losses)}: loss {losses[-1]:.4f}", flush=True)
    return {
        "losses": losses,
        "norms": norms,
        "seconds": seconds,
        "eval_before": before,
        "eval_after": evaluate(state.params),
        "device": jax.devices()[0].device_kind,
    }


if __name__ == "__main__":
    with left_to_xla(*(OPS if sys.argv[4:] == ["xla"] else ())):
        Path(sys.argv[3]).write_text(json.dumps(train(Path(sys.argv[1]), sys.argv[2])))
