"""NF4 weights equal bitsandbytes' bit for bit, alone and inside model folders."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from gymjax.checkpoint.hf import open_folder, save_folder
from gymjax.checkpoint.weights import load_decoder
from gymjax.models import decoder_config
from gymjax.models.names import linears
from gymjax.quant.nf4 import quantize
from pallas_kernels.nf4_linear import NF4Weight, dequantize

pytestmark = pytest.mark.interop

# (4, 64) is one nested block, (300, 77) and (5, 100) end inside a block, (7, 13) has an odd number of elements,
# (1031, 600) has 9,666 blocks: no multiple of 256, and enough for torch to sum its mean on several levels.
SHAPES = [(4, 64), (5, 100), (7, 13), (64, 64), (257, 65), (300, 77), (576, 1536), (1031, 600), (1024, 4096)]
# Widths are multiples of 64: bitsandbytes' CPU kernel takes wrong scales where a row is one of 16 but not of 64.
CONFIG = {
    "model_type": "llama",
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
# Phi-3's projections are fused: blocks of two thirds of a matrix would have other scales.
CONFIGS = {"llama": CONFIG, "phi3": json.loads((Path(__file__).parents[1] / "tiny_families.json").read_text())["phi3"]}
TOLERANCE = 1e-4  # both sides dequantize to the same f32 weights; sums in another order differ by 1e-6


def weights(kind, shape):
    rng = np.random.default_rng(sum(shape))
    w = rng.normal(size=shape).astype(np.float32)
    if kind == "outliers":
        w *= np.exp(rng.normal(size=(shape[0], 1)) * 3).astype(np.float32)
    elif kind == "zeros":
        w[: shape[0] // 2] = 0
    elif kind == "constant":
        w[:] = 0.25
    return w


@pytest.mark.parametrize("double_quant", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equal_bits(shape, dtype, double_quant, torch_side, tmp_path):
    kinds = ["normal"] if shape[0] > 500 else ["normal", "outliers", "zeros", "constant"]
    for kind in kinds:
        w = weights(kind, shape)
        np.save(tmp_path / "w.npy", w)
        torch_side.nf4(weight=tmp_path / "w.npy", out=tmp_path / "q.npz", double_quant=double_quant, dtype=dtype)
        theirs = np.load(tmp_path / "q.npz")
        ours = quantize(np.asarray(w, dtype), double_quant=double_quant, dtype="float32")
        for field in ("codes", "absmax", "nested_absmax", "offset") if double_quant else ("codes", "absmax"):
            np.testing.assert_array_equal(getattr(ours, field), theirs[field], err_msg=f"{kind} {field}")
        if dtype == "float32":
            np.testing.assert_array_equal(np.asarray(dequantize(ours)), theirs["dequantized"], err_msg=kind)


@pytest.mark.parametrize("double_quant", [True, False])
@pytest.mark.parametrize("family", CONFIGS)
def test_folder_saved_by_transformers_loads(family, double_quant, torch_side, tmp_path):
    tokens = np.random.default_rng(1).integers(0, 160, (2, 12))
    torch_side.make_model(folder=tmp_path / "base", config=CONFIGS[family])
    torch_side.save_nf4(
        folder=tmp_path / "base",
        to=tmp_path / "theirs",
        double_quant=double_quant,
        tokens=tokens.tolist(),
        out=tmp_path / "theirs.npy",
    )
    source = open_folder(tmp_path / "theirs")
    packed = load_decoder(decoder_config(source.config), source, dtype="float32")
    assert isinstance(packed.stacks[0][0].mlp.down.w.get_value(), NF4Weight)
    logits = np.asarray(packed.logits(packed(tokens)))
    expected = np.load(tmp_path / "theirs.npy")
    assert np.abs(logits - expected).max() < TOLERANCE
    assert (logits.argmax(-1) == expected.argmax(-1)).all()
    # Packing the dense folder here gives the same bits as transformers' own packing.
    base = open_folder(tmp_path / "base")
    quantized = load_decoder(
        decoder_config(base.config), base, dtype="float32", quantize_nf4=True, double_quant=double_quant
    )
    for (ours, names), (theirs, _) in zip(linears(quantized), linears(packed), strict=True):
        for a, b in zip(jax.tree.leaves(ours.w.get_value()), jax.tree.leaves(theirs.w.get_value()), strict=True):
            np.testing.assert_array_equal(a, b, err_msg=str(names))


@pytest.mark.parametrize("double_quant", [True, False])
@pytest.mark.parametrize("family", CONFIGS)
def test_our_folder_loads_in_transformers(family, double_quant, torch_side, tmp_path):
    tokens = np.random.default_rng(2).integers(0, 160, (2, 12))
    torch_side.make_model(folder=tmp_path / "base", config=CONFIGS[family])
    base = open_folder(tmp_path / "base")
    model = load_decoder(
        decoder_config(base.config), base, dtype="float32", quantize_nf4=True, double_quant=double_quant
    )
    logits = np.asarray(model.logits(model(tokens)))
    save_folder(tmp_path / "ours", model, base.config, dtype="float32", keep_packed=True, export_size=1e-4)
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["quantization_config"]["load_in_4bit"]
    kinds = torch_side.logits_nf4(folder=tmp_path / "ours", tokens=tokens.tolist(), out=tmp_path / "theirs.npy")
    assert kinds == ["Linear", "Linear4bit"]  # the head stays dense
    theirs = np.load(tmp_path / "theirs.npy")
    assert np.abs(logits - theirs).max() < TOLERANCE
    assert (logits.argmax(-1) == theirs.argmax(-1)).all()
