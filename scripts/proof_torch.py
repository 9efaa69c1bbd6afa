"""The torch side of proof_qlora.py: transformers + PEFT + bitsandbytes from the same start on the same rows.

Usage: python scripts/proof_torch.py FOLDER OUT.json

FOLDER is proof_qlora.py's: settings.json, model/, adapter/, rows.npz. bitsandbytes packs the weights as it loads them.
Computation as in transformers' Trainer: bf16 by autocast, the adapter and AdamW in f32.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import numpy as np
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, get_cosine_schedule_with_warmup

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def load(folder: Path, settings: dict):
    """The base, packed, with the adapter that the other side starts from."""
    dtype = torch.bfloat16 if settings["precision"] == "bf16" else torch.float32
    packed = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    base = AutoModelForCausalLM.from_pretrained(
        folder / "model", quantization_config=packed, dtype=dtype, device_map={"": DEVICE}, attn_implementation="sdpa"
    )
    base.config.use_cache = False
    return PeftModel.from_pretrained(base, folder / "adapter", is_trainable=True).train()


def mixed(settings: dict):
    """The Trainer's mixed precision."""
    return torch.autocast(DEVICE, torch.bfloat16) if settings["precision"] == "bf16" else contextlib.nullcontext()


def row_loss(model, rows: np.ndarray, settings: dict) -> torch.Tensor:
    """Mean next-token loss of rows (B, T + 1)."""
    tokens = torch.from_numpy(rows.astype(np.int64)).to(DEVICE)
    with mixed(settings):
        logits = model(input_ids=tokens[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


@torch.no_grad()
def evaluate(model, rows: np.ndarray, settings: dict) -> float:
    """Mean loss of the held-out rows.

    The model stays in training mode, which without dropout computes the same: in eval() bitsandbytes repacks weights on
    CPUs with AVX512-BF16 for good, rounds their block scales, and gives no gradient afterwards.
    """
    batches = np.split(rows, len(rows) // settings["rows"])
    losses = [float(row_loss(model, batch, settings)) for batch in batches]
    return float(np.mean(losses))


def train(folder: Path) -> dict:
    """Losses and gradient norms of every step, held-out losses before and after."""
    settings = json.loads((folder / "settings.json").read_text())
    given = np.load(folder / "rows.npz")
    model = load(folder, settings)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(
        trained,
        lr=settings["learning_rate"],
        betas=(settings["adam_beta1"], settings["adam_beta2"]),
        eps=settings["adam_epsilon"],
        weight_decay=settings["weight_decay"],
    )
    schedule = get_cosine_schedule_with_warmup(optimizer, settings["warmup_steps"], settings["steps"])
    before = evaluate(model, given["evaluation"], settings)
    losses, norms, seconds = [], [], []
    for batch in given["train"].reshape(settings["steps"], settings["rows"], -1):
        started = time.perf_counter()
        loss = row_loss(model, batch, settings)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, settings["max_grad_norm"])))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
        seconds.append(time.perf_counter() - started)
        if len(losses) % 25 == 0:
            print(f"step {len(losses)}: loss {losses[-1]:.4f}", flush=True)
    return {
        "losses": losses,
        "norms": norms,
        "seconds": seconds,
        "eval_before": before,
        "eval_after": evaluate(model, given["evaluation"], settings),
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu",
    }


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(train(Path(sys.argv[1]))))
