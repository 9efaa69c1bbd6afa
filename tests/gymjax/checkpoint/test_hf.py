import collections
import copy
import json
import shutil
import tracemalloc

import numpy as np
import pytest

from gymjax.checkpoint import hf
from gymjax.checkpoint.hf import open_folder, save_folder
from gymjax.checkpoint.safetensors_io import Tensor, open_tensors, write_tensors
from pallas_kernels.nf4_linear import NF4Weight

Usage = collections.namedtuple("Usage", "total used free")


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def edit_json(path, **changes):
    value = json.loads(path.read_text())
    path.write_text(json.dumps(value | changes))


def edit_tensors(folder, change):
    """Rewrites a folder as one file after `change` has edited its name -> array dict."""
    tensors = {name: np.array(v) for path in folder.glob("*.safetensors") for name, v in open_tensors(path).items()}
    change(tensors)
    for path in folder.glob("model*"):
        path.unlink()
    lazy = {name: Tensor(v.shape, v.dtype, lambda v=v: v) for name, v in tensors.items()}
    write_tensors(folder / "model.safetensors", lazy)


def test_round_trip(folder, tiny, load, logits):
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 1
    np.testing.assert_array_equal(logits(load(folder)), logits(tiny))


def test_single_file_replaces_shards(folder, tiny, config, load, logits):
    save_folder(folder, tiny, config, dtype="float32")
    assert [path.name for path in folder.glob("model*")] == ["model.safetensors"]
    np.testing.assert_array_equal(logits(load(folder)), logits(tiny))
    save_folder(folder, tiny, config, dtype="float32", export_size=7e-5)
    assert not (folder / "model.safetensors").exists()
    np.testing.assert_array_equal(logits(load(folder)), logits(tiny))


def test_what_the_new_model_has_none_of_does_not_stay(folder, tiny, config, byte_tokenizer):
    """Its answers would end at the old model's tokens and be asked through its chat template."""
    plain = copy.deepcopy(byte_tokenizer)
    plain.chat_template = None
    (folder / "notes.txt").touch()
    assert (folder / "chat_template.jinja").exists()
    save_folder(folder, tiny, config, dtype="float32", tokenizer=plain)
    files = {path.name for path in folder.iterdir()}
    assert files == {"config.json", "model.safetensors", "notes.txt", "tokenizer.json", "tokenizer_config.json"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_config_names_the_dtype(dtype, tiny, config, tmp_path):
    save_folder(tmp_path / "x", tiny, config | {"torch_dtype": "float64"}, dtype=dtype)
    written = json.loads((tmp_path / "x" / "config.json").read_text())
    assert written["dtype"] == dtype
    assert written["architectures"] == ["LlamaForCausalLM"]
    assert "torch_dtype" not in written
    assert {str(v.dtype) for v in open_folder(tmp_path / "x").tensors.values()} == {dtype}


def test_bad_dtype_to_save_in(folder, load, config, tmp_path):
    name = "model.layers.1.mlp.up_proj.weight"
    edit_tensors(folder, lambda tensors: tensors[name].__setitem__((0, 3), 7e4))
    with pytest.raises(ValueError, match=rf"{name} holds 70000, beyond float16's 65504; set export_dtype: bfloat16"):
        save_folder(tmp_path / "half", load(folder), config, dtype="float16")
    assert not (tmp_path / "half").exists()
    for wrong in ("int8", "auto", "float64"):
        with pytest.raises(ValueError, match=f"dtype must be one of bfloat16, float16, float32, is '{wrong}'"):
            hf.stored_dtype({"torch_dtype": wrong})


def test_quantized_while_loading(folder, load, logits):
    dense, packed = load(folder), load(folder, quantize_nf4=True)
    up = packed.stacks[0][0].mlp.up.w.get_value()
    assert isinstance(up, NF4Weight)
    assert up.codes.shape == (2, 48 * 32 // 2)
    assert up.dtype == "float32"
    difference = np.abs(logits(packed) - logits(dense)).mean() / np.abs(logits(dense)).mean()
    assert 0 < difference < 0.5  # NF4 is off by 20 % of a weight's size; anything wrong gives more than 1


def test_packed_model_round_trip(folder, config, load, logits, tmp_path):
    packed = load(folder, quantize_nf4=True)
    save_folder(tmp_path / "nf4", packed, config, dtype="float32", keep_packed=True)
    np.testing.assert_array_equal(logits(load(tmp_path / "nf4")), logits(packed))
    save_folder(tmp_path / "dense", packed, config, dtype="float32")
    assert "quantization_config" not in json.loads((tmp_path / "dense" / "config.json").read_text())
    # same weights, but XLA multiplies them in another order than inside the packed product
    np.testing.assert_allclose(logits(load(tmp_path / "dense")), logits(packed), atol=1e-4)


def test_one_variable_in_host_memory_at_a_time(make_model, config, load, tmp_path):
    model = make_model(width=256, ffn_width=1024, vocab_size=300)
    shape = {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 300}
    save_folder(tmp_path / "x", model, config | shape, dtype="float32")
    largest = 2 * 256 * 1024 * 4  # an MLP weight of both layers; the whole model is 3.6 times that
    for options in ({}, {"quantize_nf4": True}):
        tracemalloc.start()
        load(tmp_path / "x", place=lambda path, value: np.zeros(1), **options)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 1.3 * largest + 4e6  # 4 MB: chunks of the quantizer on two threads
    tracemalloc.start()
    save_folder(tmp_path / "y", model, config | shape, dtype="bfloat16")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1.3 * largest


def test_bad_tensors_are_all_named(folder, load):
    def change(tensors):
        del tensors["model.norm.weight"]
        tensors["model.layers.0.mlp.experts.weight"] = np.zeros(3, np.float32)
        tensors["model.layers.1.self_attn.q_proj.weight"] = np.zeros((32, 31), np.float32)

    edit_tensors(folder, change)
    with pytest.raises(ValueError, match=r"the tensors do not fit") as caught:
        load(folder)
    for part in (
        "1 missing: model.norm.weight",
        "1 not part of this architecture: model.layers.0.mlp.experts.weight",
        "1 of the wrong shape: model.layers.1.self_attn.q_proj.weight is (32, 31), must be (32, 32)",
    ):
        assert part in str(caught.value)


def test_harmless_extras_are_ignored(folder, load, tiny, logits):
    def change(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]

    edit_tensors(folder, change)
    np.testing.assert_array_equal(logits(load(folder)), logits(tiny))


def test_bad_second_head_of_a_tied_model(folder, load):
    edit_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": np.zeros((272, 32), np.float32)}))
    with pytest.raises(ValueError, match=r"not part of this architecture: lm_head\.weight"):
        load(folder)


def test_bad_shard_missing(folder):
    first = sorted(folder.glob("model-00001-*"))[0]
    first.unlink()
    with pytest.raises(FileNotFoundError, match=f"lacks 1 of .* shards: {first.name}; copy them there"):
        open_folder(folder)


def test_bad_shard_cut_short(folder, load):
    path = sorted(folder.glob("model-00001-*"))[0]
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ValueError, match=f"{path.name} is cut short or damaged"):
        load(folder)


def test_bad_folder_without_config(folder):
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config\.json does not exist; copy"):
        open_folder(folder)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"holds an adapter, not a model: give it as adapter_name_or_path"):
        open_folder(folder)


@pytest.mark.parametrize(("text", "message"), [("{", "is not JSON"), ("[]", "must hold a JSON object, not list")])
def test_bad_config_text(folder, text, message):
    (folder / "config.json").write_text(text)
    with pytest.raises(ValueError, match=rf"config\.json {message}"):
        open_folder(folder)


def test_bad_tensor_in_two_shards(folder):
    first, last = (sorted(folder.glob("model-*"))[i] for i in (0, -1))
    name, value = next(iter(open_tensors(first).items()))
    both = {key: np.array(v) for key, v in {**open_tensors(last), name: np.zeros_like(value)}.items()}
    write_tensors(last, {key: Tensor(v.shape, v.dtype, lambda v=v: v) for key, v in both.items()})
    with pytest.raises(ValueError, match=f"{last.name}: {name} stands in an earlier shard too; fetch"):
        open_folder(folder)


@pytest.mark.parametrize("weight_map", [3, {"model.norm.weight": None}, {"model.norm.weight": 5}])
def test_bad_index(folder, weight_map):
    edit_json(folder / "model.safetensors.index.json", weight_map=weight_map)
    with pytest.raises(ValueError, match=r"lacks weight_map"):
        open_folder(folder)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int64, np.bool_])
def test_bad_dtype_of_a_weight(folder, load, dtype):
    name = "model.layers.1.mlp.up_proj.weight"
    edit_tensors(folder, lambda tensors: tensors.update({name: tensors[name].astype(dtype)}))
    with pytest.raises(ValueError, match=rf"base: {name} is stored as {np.dtype(dtype)}, weights must be floating"):
        load(folder)


def test_bad_value_that_cannot_be_quantized(folder, load):
    name = "model.layers.1.mlp.up_proj.weight"
    edit_tensors(folder, lambda tensors: tensors[name].__setitem__((0, 3), np.nan))
    with pytest.raises(ValueError, match=rf"base: {name}: w must be finite to be quantized; element 3"):
        load(folder, quantize_nf4=True)


def test_bad_packed_weight(folder, config, load, tmp_path):
    save_folder(tmp_path / "nf4", load(folder, quantize_nf4=True), config, dtype="float32", keep_packed=True)
    name = "model.layers.1.mlp.up_proj.weight"
    edit_tensors(tmp_path / "nf4", lambda tensors: tensors.pop(f"{name}.absmax"))
    with pytest.raises(ValueError, match=rf"nf4: 4-bit weight {name} lacks {name}\.absmax"):
        open_folder(tmp_path / "nf4")
    edit_json(folder / "config.json", quantization_config=5)
    with pytest.raises(ValueError, match=r"config\.json: quantization_config must be an object, is 5"):
        open_folder(folder)


def test_bad_pickled_weights_are_never_read(folder):
    for path in folder.glob("model*"):
        path.unlink()
    with pytest.raises(FileNotFoundError, match=r"holds neither"):
        open_folder(folder)
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(ValueError, match=r"pickled weights \(pytorch_model\.bin\).*never read; convert"):
        open_folder(folder)


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    ],
)
def test_bad_quantization(folder, quantization):
    edit_json(folder / "config.json", quantization_config=quantization)
    with pytest.raises(ValueError, match=r"is not read.*use the original model with quantization_bit: 4"):
        open_folder(folder)


def test_bad_layers_packed_differently(folder, config, load, tmp_path):
    packed = load(folder, quantize_nf4=True)
    save_folder(tmp_path / "nf4", packed, config, dtype="float32", keep_packed=True)
    dense = open_folder(folder)

    def change(tensors):
        name = "model.layers.1.mlp.up_proj.weight"
        for key in [key for key in tensors if key.startswith(name)]:
            del tensors[key]
        tensors[name] = np.array(dense.read(name))

    edit_tensors(tmp_path / "nf4", change)
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj\.weight and .* stored in different formats"):
        load(tmp_path / "nf4")


def test_bad_export_size(tiny, config, tmp_path):
    with pytest.raises(ValueError, match=r"export_size must be above 0 GB, is 0"):
        save_folder(tmp_path / "x", tiny, config, dtype="float32", export_size=0)


def test_bad_disk_too_small(folder, tiny, config, monkeypatch):
    before = contents(folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 10**9, 1000))
    with pytest.raises(OSError, match=r"disk full.*are needed there and 0.00 GiB are free.*intact; free space"):
        save_folder(folder, tiny, config, dtype="float32")
    assert contents(folder) == before


def test_bad_disk_full_half_way(folder, tiny, config, monkeypatch, no_space):
    before, calls = contents(folder), []

    def write(path, tensors):
        if calls:
            raise no_space
        calls.append(path)
        write_tensors(path, tensors)

    monkeypatch.setattr(hf, "write_tensors", write)
    with pytest.raises(OSError, match=r"disk full while writing .*base: the write stopped half-way.*intact"):
        save_folder(folder, tiny, config, dtype="float32", export_size=7e-5)
    assert contents(folder) == before
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    with pytest.raises(OSError, match=r"disk full"):
        save_folder(folder.parent / "new", tiny, config, dtype="float32", export_size=1e-4)
    assert not (folder.parent / "new").exists()
