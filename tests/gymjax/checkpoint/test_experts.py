"""Experts packed one by one, and fused ones read as parts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gymjax.checkpoint.experts import split_experts
from gymjax.checkpoint.hf import open_folder, save_folder
from gymjax.checkpoint.weights import load_decoder
from gymjax.models import decoder_config
from gymjax.models.decoder import Decoder
from gymjax.quant.nf4 import quantize
from pallas_kernels.nf4_linear import NF4Weight, dequantize

HF = {
    "model_type": "qwen2_moe",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
    "dtype": "float32",
}
UP = "model.layers.1.mlp.experts.2.up_proj.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    model = Decoder(decoder_config(HF), dtype=jnp.float32)
    rng = np.random.default_rng(0)
    nnx.update(
        model, jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 0.3, leaf.shape), leaf.dtype), nnx.state(model))
    )
    path = tmp_path_factory.mktemp("experts") / "model"
    save_folder(path, model, HF, dtype="float32")
    return path


def test_every_expert_is_packed_by_itself_and_kept_so(folder, tmp_path):
    dense = open_folder(folder)
    model = load_decoder(decoder_config(HF), dense, dtype="float32", quantize_nf4=True)
    moe = model.stacks[0][0].mlp
    packed = moe.up.w.get_value()
    assert isinstance(packed, NF4Weight)
    row = jax.tree.map(lambda leaf: np.asarray(leaf[1, 2]), packed)
    exact = quantize(dense.read(UP), dtype="float32")
    for ours, theirs in zip(jax.tree.leaves(row), jax.tree.leaves(exact), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert not isinstance(moe.router.w.get_value(), NF4Weight)
    assert not isinstance(moe.shared_gate.w.get_value(), NF4Weight)
    assert isinstance(moe.shared.up.w.get_value(), NF4Weight)
    save_folder(tmp_path, model, HF, dtype="float32", keep_packed=True)
    kept = open_folder(tmp_path)
    assert f"{UP}.absmax" in kept.tensors
    again = load_decoder(decoder_config(HF), kept, dtype="float32")
    tokens = np.arange(10)[None]
    np.testing.assert_array_equal(model.logits(model(tokens)), again.logits(again(tokens)))


def test_packed_experts_in_fused_files_are_rounded_once(tmp_path):
    hf = HF | {"model_type": "gpt_oss", "num_local_experts": 3, "head_dim": 8}
    model = Decoder(decoder_config(hf), dtype=jnp.float32)
    rng = np.random.default_rng(0)
    experts = model.stacks[0][0].mlp
    for projection in (experts.gate, experts.up, experts.down):
        shape = projection.w.get_value().shape
        packed = [quantize(one, dtype="bfloat16") for one in rng.normal(0, 0.3, (shape[0] * shape[1], *shape[2:]))]
        stacked = jax.tree.map(lambda *leaves, n=shape[:2]: jnp.stack(leaves).reshape(*n, *leaves[0].shape), *packed)
        projection.w.set_value(stacked)
    save_folder(tmp_path, model, hf, dtype="float32")
    written = open_folder(tmp_path).read("model.layers.0.mlp.experts.down_proj")
    exact = dequantize(experts.down.w.get_value(), dtype="float32")[0]
    np.testing.assert_array_equal(written, np.asarray(exact).swapaxes(1, 2))


class Fused:
    """A folder's tensors with the experts of layer 1 fused, as transformers 5 can save them."""

    origin = "fused"

    def __init__(self, source, rows=16):
        experts = [f"model.layers.1.mlp.experts.{e}." for e in range(3)]
        part = {n: np.stack([source.read(f"{e}{n}_proj.weight") for e in experts]) for n in ("gate", "up", "down")}
        kept = {name: source.read(name) for name in source.shapes if not name.startswith("model.layers.1.mlp.experts.")}
        fused = {
            "gate_up_proj": np.concatenate([part["gate"], part["up"]], axis=1)[:, :rows],
            "down_proj": part["down"],
        }
        self.tensors = kept | {f"model.layers.1.mlp.experts.{name}": value for name, value in fused.items()}
        self.shapes = {name: value.shape for name, value in self.tensors.items()}

    def read(self, name):
        return self.tensors[name]


def test_fused_experts_are_views_of_one_tensor(folder):
    source = open_folder(folder)
    split = split_experts(decoder_config(HF), Fused(source))
    assert split.shapes == source.shapes
    for name in source.shapes:
        np.testing.assert_array_equal(split.read(name), source.read(name))
    assert np.shares_memory(split.read(UP), split.source.tensors["model.layers.1.mlp.experts.gate_up_proj"])
    assert split_experts(decoder_config(HF), source) is source


def test_fused_experts_of_a_wrong_shape_are_named(folder):
    with pytest.raises(ValueError, match=r"experts\.0\.up_proj\.weight is \(6, 16\), must be \(8, 16\)"):
        load_decoder(decoder_config(HF), Fused(open_folder(folder), rows=14), dtype="float32")
