"""Adapters written here give equal logits in PEFT, and PEFT's give equal logits here."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from gymjax.adapters.lora import LoraSpec, attach, lora_modules, merge
from gymjax.adapters.select import train_modules
from gymjax.adapters.tensors import MAGNITUDE, B, adapter_tensors, set_adapter_tensors
from gymjax.checkpoint.hf import open_folder, save_folder
from gymjax.checkpoint.peft import load_adapter, save_adapter
from gymjax.checkpoint.weights import load_decoder
from gymjax.models import decoder_config
from gymjax.models.names import hf_weights, node_at
from gymjax.optim.labels import Trained

pytestmark = pytest.mark.interop

# Widths are multiples of 64 for bitsandbytes' sake, see test_nf4.py.
BASE = {
    "model_type": "llama",
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FAMILIES = json.loads((Path(__file__).parents[1] / "tiny_families.json").read_text())
NEWER = ("gemma", "gemma2", "gemma3_text", "phi3", "olmo2", "olmo3", "smollm3", "granite")
BASES = {"untied": BASE, "tied": BASE | {"tie_word_embeddings": True}, "qwen2": BASE | {"model_type": "qwen2"}}
BASES |= {family: FAMILIES[family] for family in NEWER}
TOLERANCE = 1e-4  # the project's bar in f32
CASES = {
    "r16-alpha32": ("untied", LoraSpec(rank=16, alpha=32, dropout=0.1), ()),
    "rslora": ("untied", LoraSpec(rank=16, alpha=16, use_rslora=True), ()),
    "two-targets": ("qwen2", LoraSpec(rank=4, alpha=6, targets=("q_proj", "down_proj")), ()),
    "one-layer": ("untied", LoraSpec(rank=4, alpha=8, targets=("model.layers.1.mlp.up_proj", "v_proj")), ()),
    "head": ("untied", LoraSpec(rank=4, alpha=8, targets=("q_proj", "lm_head")), ()),
    "patterns": (
        "untied",
        LoraSpec(
            rank=8,
            alpha=16,
            rank_pattern={"q_proj": 4, r"layers\.1\.mlp\.up_proj": 3},
            alpha_pattern={"v_proj": 5, r".*layers\.2.*": 24},
        ),
        (),
    ),
    "patterns-rslora": ("untied", LoraSpec(rank=8, alpha=16, use_rslora=True, rank_pattern={"k_proj": 2}), ()),
    "dora": ("qwen2", LoraSpec(rank=8, alpha=16, use_dora=True, dropout=0.1), ()),
    "dora-rslora-patterns": (
        "untied",
        LoraSpec(rank=8, alpha=16, use_rslora=True, use_dora=True, rank_pattern={r"layers\.1\.mlp\.up_proj": 3}),
        (),
    ),
    "dora-head-one-layer": (
        "untied",
        LoraSpec(rank=4, alpha=8, use_dora=True, targets=("model.layers.1.mlp.up_proj", "lm_head")),
        (),
    ),
    "saved-embedding-tied": ("tied", LoraSpec(rank=4, alpha=8), ("embed_tokens",)),
    "saved-embedding-and-head": ("untied", LoraSpec(rank=4, alpha=8), ("embed_tokens", "lm_head")),
    "saved-norm": ("untied", LoraSpec(rank=4, alpha=8), ("norm",)),
    "saved-projection-with-bias": ("qwen2", LoraSpec(rank=4, alpha=8, targets=("o_proj",)), ("k_proj",)),
}
CASES |= {family: (family, LoraSpec(rank=4, alpha=8), ()) for family in NEWER}
CASES["phi3-fused-and-saved"] = (
    "phi3",
    LoraSpec(rank=4, alpha=8, targets=("qkv_proj", "down_proj")),
    ("gate_up_proj",),
)


@pytest.fixture(scope="module")
def bases(torch_side, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    for name, config in BASES.items():
        torch_side.make_model(folder=folder / name, config=config)
    return folder


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(0).integers(0, BASE["vocab_size"], (2, 12))


def load(folder, **options):
    source = open_folder(folder)
    return load_decoder(decoder_config(source.config), source, dtype="float32", **options)


def randomize(model, seed=0):
    """Gives every up-projection, magnitude and trained base weight random values."""
    rng = np.random.default_rng(seed)
    tensors = adapter_tensors(model)
    for name, value in tensors.items():
        noise = rng.normal(size=value.shape)
        if name.endswith(B):
            tensors[name] = value + 0.1 * noise
        elif name.endswith(MAGNITUDE):
            tensors[name] = value * np.exp(0.3 * noise)
    assert set_adapter_tensors(model, tensors) == []
    for path in dict.fromkeys(weight.path for weight in hf_weights(model.cfg)):
        variable = node_at(model, path)
        if isinstance(variable, Trained):
            value = variable.get_value()
            variable.set_value(value + 0.1 * rng.normal(size=value.shape).astype(np.float32))


def logits(model, tokens):
    return np.asarray(model.logits(model(tokens)))


def assert_equal_logits(a, b):
    assert np.abs(a - b).max() < TOLERANCE
    assert (a.argmax(-1) == b.argmax(-1)).all()


OVER_NF4 = ("r16-alpha32", "rslora", "patterns", "saved-embedding-tied", "dora", "phi3", "gemma2", "olmo3")


@pytest.mark.parametrize(
    ("case", "nf4"),
    [*((case, False) for case in CASES), *((case, True) for case in OVER_NF4)],
    ids=[*CASES, *(f"{case}-nf4" for case in OVER_NF4)],
)
def test_adapter_in_peft(case, nf4, bases, tokens, torch_side, tmp_path):
    base, spec, modules = CASES[case]
    model = load(bases / base, quantize_nf4=nf4)
    plain = logits(model, tokens)
    attach(model, spec, key=jax.random.key(0))
    train_modules(model, modules, key="additional_target")
    randomize(model)
    expected = logits(model, tokens)
    assert np.abs(expected - plain).max() > 0.1  # the adapter does something
    save_adapter(tmp_path / "adapter", model, spec, base=str(bases / base))
    report = torch_side.adapter_logits(
        folder=bases / base, adapter=tmp_path / "adapter", tokens=tokens.tolist(), out=tmp_path / "out.npy", nf4=nf4
    )
    assert_equal_logits(np.load(tmp_path / "out.npy"), expected)
    prefix = "base_model.model."
    assert report["adapted"] == sorted(prefix + row.name for _, row in lora_modules(model))
    for _, row in lora_modules(model):
        assert report["scaling"][prefix + row.name] == pytest.approx(spec.factor_of(row.name))
    again = load(bases / base, quantize_nf4=nf4)
    load_adapter(again, tmp_path / "adapter")
    np.testing.assert_array_equal(logits(again, tokens), expected)


FROM_PEFT = {
    "plain": ("untied", {"r": 8, "lora_alpha": 12, "target_modules": ["q_proj", "up_proj"]}),
    "all-linear-rslora": ("qwen2", {"r": 4, "target_modules": "all-linear", "use_rslora": True}),
    "phi3": ("phi3", {"r": 4, "target_modules": "all-linear"}),
    "gemma2": ("gemma2", {"r": 4, "target_modules": ["k_proj", "gate_proj"], "modules_to_save": ["model.norm"]}),
    "regex": ("untied", {"r": 4, "target_modules": r".*layers\.[01]\.self_attn\.[qv]_proj"}),
    "patterns": (
        "untied",
        {
            "r": 8,
            "target_modules": ["q_proj", "v_proj", "down_proj"],
            "rank_pattern": {"v_proj": 2, "layers.0.self_attn.q_proj": 6},
            "alpha_pattern": {"^model.layers.1.mlp.down_proj": 30},
        },
    ),
    "dora": ("qwen2", {"r": 6, "lora_alpha": 9, "target_modules": "all-linear", "use_dora": True}),
    "pissa": ("untied", {"r": 4, "lora_alpha": 9, "target_modules": "all-linear", "init_lora_weights": "pissa"}),
    "pissa-dora-rslora": (
        "untied",
        {
            "r": 4,
            "target_modules": ["v_proj", "up_proj"],
            "init_lora_weights": "pissa",
            "use_dora": True,
            "use_rslora": True,
        },
    ),
    "head": ("untied", {"r": 4, "target_modules": ["q_proj", "lm_head"]}),
    "saved": ("untied", {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["lm_head", "model.norm"]}),
    "saved-tied": (
        "tied",
        {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ),
}


@pytest.mark.parametrize("case", FROM_PEFT)
def test_adapter_from_peft(case, bases, tokens, torch_side, tmp_path):
    base, settings = FROM_PEFT[case]
    torch_side.make_adapter(
        folder=bases / base,
        adapter=tmp_path / "theirs",
        settings=settings,
        tokens=tokens.tolist(),
        out=tmp_path / "out.npy",
    )
    expected = np.load(tmp_path / "out.npy")
    model = load(bases / base)
    spec = load_adapter(model, tmp_path / "theirs")
    assert_equal_logits(logits(model, tokens), expected)
    save_adapter(tmp_path / "ours", model, spec, base=str(bases / base))
    torch_side.adapter_logits(
        folder=bases / base, adapter=tmp_path / "ours", tokens=tokens.tolist(), out=tmp_path / "again.npy"
    )
    assert_equal_logits(np.load(tmp_path / "again.npy"), expected)


@pytest.mark.parametrize("case", ["patterns-rslora", "saved-embedding-tied", "dora-head-one-layer", *NEWER])
def test_merged_folder_in_transformers(case, bases, tokens, torch_side, tmp_path):
    base, spec, modules = CASES[case]
    model = load(bases / base)
    attach(model, spec, key=jax.random.key(0))
    train_modules(model, modules, key="additional_target")
    randomize(model)
    expected = logits(model, tokens)
    merge(model)
    save_folder(tmp_path / "merged", model, open_folder(bases / base).config, dtype="float32")
    torch_side.logits(folder=tmp_path / "merged", tokens=tokens.tolist(), out=tmp_path / "out.npy")
    assert_equal_logits(np.load(tmp_path / "out.npy"), expected)


def test_bad_adapter_of_an_untied_embedding(bases, tokens, torch_side, tmp_path):
    torch_side.make_adapter(
        folder=bases / "tied",
        adapter=tmp_path / "theirs",
        settings={"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
        tokens=tokens.tolist(),
        out=tmp_path / "out.npy",
    )
    with pytest.raises(ValueError, match=r"ties its head to its embedding.*ensure_weight_tying"):
        load_adapter(load(bases / "tied"), tmp_path / "theirs")


def test_an_adapter_of_another_head_is_refused(bases, tokens, torch_side, tmp_path):
    torch_side.make_adapter(
        folder=bases / "untied",
        adapter=tmp_path / "theirs",
        settings={"r": 4, "target_modules": ["lm_head"]},
        tokens=tokens.tolist(),
        out=tmp_path / "out.npy",
    )
    model = load(bases / "untied")
    model.head.w.set_value(model.head.w.get_value() * 1.1)
    with pytest.raises(ValueError, match=r"lm_head.base_layer.weight is not the base's lm_head .*model_name_or_path"):
        load_adapter(model, tmp_path / "theirs")
