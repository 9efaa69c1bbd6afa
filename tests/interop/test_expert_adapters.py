"""Adapters of experts and routers trained here give equal logits in PEFT, and come back as they were."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gymjax.adapters.lora import LoraSpec, attach, merge
from gymjax.checkpoint.hf import open_folder, save_folder
from gymjax.checkpoint.peft import load_adapter, save_adapter
from gymjax.checkpoint.weights import load_decoder
from gymjax.models import decoder_config
from gymjax.models.names import linears

pytestmark = pytest.mark.interop

BASE = {
    "vocab_size": 96,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts_per_tok": 2,
    "eos_token_id": None,
}
QWEN = {"num_experts": 4, "moe_intermediate_size": 12}
BASES = {
    "mixtral": {"model_type": "mixtral", "num_local_experts": 3},
    "olmoe": {"model_type": "olmoe", "num_experts": 4},
    "qwen2_moe": {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 16, "mlp_only_layers": [0], **QWEN},
    "qwen3_moe": {"model_type": "qwen3_moe", "head_dim": 12, "mlp_only_layers": [1], **QWEN},
    "gpt_oss": {"model_type": "gpt_oss", "num_local_experts": 3, "head_dim": 12, "sliding_window": 4},
}
EXPERTS = ("gate_proj", "up_proj", "down_proj")
CASES = {
    "mixtral-router": ("mixtral", LoraSpec(rank=2, alpha=4, targets=("w1", "w2", "w3", "block_sparse_moe.gate"))),
    "olmoe-rslora": ("olmoe", LoraSpec(rank=4, alpha=6, use_rslora=True)),
    "qwen2_moe-routers": (
        "qwen2_moe",
        LoraSpec(rank=3, alpha=6, targets=("mlp.gate", "shared_expert_gate", "q_proj", *EXPERTS)),
    ),
    "qwen3_moe-patterns": (
        "qwen3_moe",
        LoraSpec(rank=2, alpha=4, use_rslora=True, rank_pattern={"q_proj": 5, r"layers\.1\.mlp\.gate_proj": 3}),
    ),
    "gpt_oss-rslora-router": ("gpt_oss", LoraSpec(rank=4, alpha=6, use_rslora=True, targets=("router", *EXPERTS))),
    "gpt_oss-gates": ("gpt_oss", LoraSpec(rank=3, alpha=6, targets=("gate_proj",))),
}
TOLERANCE = 1e-4  # the project's bar; f32 sums in another order differ by 1e-6


@pytest.fixture(scope="module")
def bases(torch_side, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    for name, config in BASES.items():
        torch_side.make_model(folder=folder / name, config=BASE | config)
    return folder


def load(folder):
    source = open_folder(folder)
    return load_decoder(decoder_config(source.config), source, dtype="float32")


def adapted(folder, spec):
    model = load(folder)
    attach(model, spec, key=jax.random.key(0))
    rng = np.random.default_rng(0)
    for layer, _ in linears(model):
        if layer.adapter is not None:
            live = np.zeros(layer.adapter.b.get_value().shape, np.float32)
            for row in layer.adapter.rows:
                live[row.at][:, : row.rank] = 1
            layer.adapter.b.set_value(jnp.asarray(0.1 * rng.normal(size=live.shape) * live, jnp.float32))
    return model


def logits(model, tokens):
    return np.asarray(model.logits(model(tokens)))


@pytest.mark.parametrize("case", CASES)
def test_adapter_in_peft(case, bases, torch_side, tmp_path):
    base, spec = CASES[case]
    tokens = np.random.default_rng(0).integers(0, BASE["vocab_size"], (2, 12))
    model = adapted(bases / base, spec)
    expected = logits(model, tokens)
    save_adapter(tmp_path / "adapter", model, spec, base=str(bases / base))
    arguments = {"folder": bases / base, "adapter": tmp_path / "adapter", "tokens": tokens.tolist()}
    torch_side.adapter_logits(**arguments, out=tmp_path / "out.npy")
    theirs = np.load(tmp_path / "out.npy")
    assert np.abs(theirs - expected).max() < TOLERANCE
    assert (theirs.argmax(-1) == expected.argmax(-1)).all()
    again = load(bases / base)
    load_adapter(again, tmp_path / "adapter")
    # the same factors; rsLoRA's, written as alpha / rank, and zeros that gate or up alone brings, round differently
    np.testing.assert_allclose(logits(again, tokens), expected, atol=1e-5)


def test_merged_experts_load_in_transformers(bases, torch_side, tmp_path):
    tokens = np.random.default_rng(0).integers(0, BASE["vocab_size"], (2, 12))
    model = adapted(bases / "qwen2_moe", LoraSpec(rank=3, alpha=6))
    expected = logits(model, tokens)
    merge(model)
    save_folder(tmp_path / "merged", model, open_folder(bases / "qwen2_moe").config, dtype="float32")
    torch_side.logits(folder=tmp_path / "merged", tokens=tokens.tolist(), out=tmp_path / "out.npy")
    assert np.abs(np.load(tmp_path / "out.npy") - expected).max() < TOLERANCE
