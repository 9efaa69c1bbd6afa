"""Twenty updates of an adapter here and in PEFT, from the same start on the same batches, lose the same."""

import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gymjax.adapters.lora import LoraSpec, attach
from gymjax.adapters.select import train_modules
from gymjax.adapters.svd_start import EXACT, SvdStart, split_weight
from gymjax.checkpoint.hf import open_folder, save_folder
from gymjax.checkpoint.peft import save_adapter
from gymjax.checkpoint.weights import load_decoder
from gymjax.config import OptimConfig
from gymjax.models import decoder_config
from gymjax.optim.build import build
from gymjax.training.step import StepSettings, init_state, make_step, split_model

pytestmark = pytest.mark.interop

BASE = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "model_type": "llama",
}
CASES = {
    "lora": (BASE, LoraSpec(rank=16, alpha=32), ()),
    "rslora-qwen2": (BASE | {"model_type": "qwen2"}, LoraSpec(rank=8, alpha=16, use_rslora=True), ()),
    "dora-qwen2": (BASE | {"model_type": "qwen2"}, LoraSpec(rank=8, alpha=16, use_dora=True), ()),
    # gate and up are one adapter in PEFT, whose two halves it mixes as it trains; down is what both can train alike
    "experts": (
        BASE | {"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2, "eos_token_id": None},
        LoraSpec(rank=8, alpha=16, targets=("q_proj", "v_proj", "o_proj", "down_proj")),
        (),
    ),
    "trained-tied-embedding": (BASE | {"tie_word_embeddings": True}, LoraSpec(rank=8, alpha=16), ("embed_tokens",)),
}
FAMILIES = json.loads((Path(__file__).parents[1] / "tiny_families.json").read_text())
CASES |= {  # soft-caps, factors and fused projections are where a gradient could go wrong
    family: (FAMILIES[family], LoraSpec(rank=8, alpha=16), ()) for family in ("gemma2", "phi3", "granite", "olmo3")
}
# Transformers turns the short rows of a batch as its longest, here each has its own length: all must be beyond it.
CASES["phi3"] = (FAMILIES["phi3"] | {"original_max_position_embeddings": 4}, *CASES["phi3"][1:])
STEPS, ROWS, LENGTH = 20, 3, 16
OPTIM = OptimConfig(learning_rate=1e-3, lr_scheduler_type="constant", weight_decay=0.01, max_grad_norm=1.0)


def batches():
    """Four batches in turn: rows of different lengths, the first tokens of each not trained, padding at the right."""
    rng = np.random.default_rng(0)
    result = []
    for _ in range(4):
        tokens = rng.integers(0, BASE["vocab_size"], (ROWS, LENGTH))
        length = rng.integers(8, LENGTH + 1, (ROWS, 1))
        position = np.arange(LENGTH)
        real, trained = position < length, (position >= 3) & (position < length - 1)
        result.append(
            {
                "tokens": np.where(real, tokens, 0),
                "targets": np.where(trained, np.roll(tokens, -1, axis=1), 0),
                "loss_weights": trained.astype(np.float32),
                "segment_ids": real.astype(np.int32),
                "positions": np.broadcast_to(position, tokens.shape),
            }
        )
    return [result[i % 4] for i in range(STEPS)]


def train(model, steps=STEPS):
    """Losses and gradient norms of the updates; the model afterwards."""
    graphdef, params, frozen = split_model(model)
    optimizer = build(OPTIM, STEPS, params)
    step = jax.jit(make_step(graphdef, optimizer, StepSettings(seed=0, max_grad_norm=OPTIM.max_grad_norm)))
    state = init_state(params, optimizer, None)
    losses, norms = [], []
    for batch in batches()[:steps]:
        state, metrics = step(state, frozen, {name: jnp.asarray(value)[None] for name, value in batch.items()})
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
    return losses, norms, nnx.merge(graphdef, state.params, frozen)


@pytest.mark.parametrize("case", CASES)
def test_losses_equal_pefts(case, torch_side, tmp_path):
    config, spec, modules = CASES[case]
    torch_side.make_model(folder=tmp_path / "base", config=config)
    source = open_folder(tmp_path / "base")
    model = load_decoder(decoder_config(source.config), source, dtype="float32")
    attach(model, spec, key=jax.random.key(0))
    train_modules(model, modules, key="additional_target")
    save_adapter(tmp_path / "start", model, spec, base=str(tmp_path / "base"))
    theirs = torch_side.train_adapter(
        folder=tmp_path / "base",
        adapter=tmp_path / "start",
        batches=[
            {
                "tokens": batch["tokens"].tolist(),
                "targets": np.where(batch["loss_weights"] > 0, batch["targets"], -100).tolist(),
            }
            for batch in batches()
        ],
        learning_rate=OPTIM.learning_rate,
        weight_decay=OPTIM.weight_decay,
        max_grad_norm=OPTIM.max_grad_norm,
    )
    losses, norms, _ = train(model)
    assert losses[0] - losses[-4] > 0.1  # same batch: it learns
    np.testing.assert_allclose(losses, theirs["losses"], atol=1e-3)  # the project's bar
    # Adam divides by sqrt(v), which makes rounding of near-zero gradients visible after a few updates
    np.testing.assert_allclose(norms, theirs["norms"], rtol=1e-2)


# Widths are multiples of 64 for bitsandbytes' sake, see test_nf4.py.
WIDE = BASE | {"hidden_size": 64, "intermediate_size": 128}
SPEC = LoraSpec(rank=8, alpha=16)
STARTS = {
    "pissa-converted": (SvdStart("pissa", 2, 0), LoraSpec(rank=6, alpha=16, use_rslora=True), {"convert": True}),
    "pissa-dora-converted": (
        SvdStart("pissa", EXACT, 0),
        LoraSpec(rank=6, alpha=9, use_dora=True, rank_pattern={"q_proj": 3}, alpha_pattern={"up_proj": 4}),
        {"convert": True},
    ),
    "pissa": (SvdStart("pissa", 2, 0), LoraSpec(rank=6, alpha=9, use_dora=True), {}),
    "pissa-nf4": (SvdStart("pissa", 2, 0), SPEC, {"nf4": True}),
    "loftq": (SvdStart("loftq", 3, 0), SPEC, {"nf4": True}),
    "loftq-dora-rslora": (
        SvdStart("loftq", 1, 0),
        LoraSpec(rank=8, alpha=16, use_dora=True, use_rslora=True),
        {"nf4": True},
    ),
}


@pytest.mark.parametrize("case", STARTS)
def test_trained_from_the_bases_own_weights_in_peft(case, torch_side, tmp_path):
    """Converted, over the original base; else over the base that is saved beside the adapter, packed where it is."""
    start, spec, options = STARTS[case]
    nf4 = options.get("nf4", False)
    torch_side.make_model(folder=tmp_path / "base", config=WIDE)
    source, factors = open_folder(tmp_path / "base"), {}
    split = partial(split_weight, start, spec, factors)
    model = load_decoder(decoder_config(source.config), source, dtype="float32", quantize_nf4=nf4, split=split)
    attach(model, spec, key=jax.random.key(0), start=factors)
    losses, _, model = train(model, steps=5)
    assert losses[4] < losses[0]  # the same batch again
    tokens = np.random.default_rng(1).integers(0, WIDE["vocab_size"], (2, 12))
    expected = np.asarray(model.logits(model(tokens)))
    base = tmp_path / "base"
    if not options.get("convert"):
        base = tmp_path / "residual_base"
        save_folder(base, model, source.config, dtype="float32", keep_packed=True)
    given_up = factors if options.get("convert") else None
    save_adapter(tmp_path / "adapter", model, spec, base=str(base), start=given_up)
    torch_side.adapter_logits(
        folder=base, adapter=tmp_path / "adapter", tokens=tokens.tolist(), out=tmp_path / "out.npy", stored_nf4=nf4
    )
    theirs = np.load(tmp_path / "out.npy")
    assert np.abs(theirs - expected).max() < 1e-4  # the project's bar in f32
    assert (theirs.argmax(-1) == expected.argmax(-1)).all()
