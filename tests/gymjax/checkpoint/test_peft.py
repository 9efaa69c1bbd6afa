import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gymjax.adapters.lora import LoraSpec, attach, lora_modules
from gymjax.adapters.select import train_modules
from gymjax.checkpoint.peft import load_adapter, save_adapter
from gymjax.checkpoint.safetensors_io import Tensor, open_tensors, write_tensors
from gymjax.optim.labels import Trained

SPEC = LoraSpec(rank=4, alpha=8, targets=("q_proj", "down_proj"), rank_pattern={"layers.1.mlp.down_proj": 2})
# reference of what PEFT expects in the file, keys that a loader may not miss
KEYS = [
    "peft_type",
    "task_type",
    "base_model_name_or_path",
    "r",
    "lora_alpha",
    "lora_dropout",
    "target_modules",
    "bias",
    "use_rslora",
    "use_dora",
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "init_lora_weights",
    "fan_in_fan_out",
]


def adapted(model, spec=SPEC, modules=()):
    attach(model, spec, key=jax.random.key(0))
    train_modules(model, modules, key="additional_target")
    for lora, row in lora_modules(model):
        b = np.array(lora.b.get_value())
        b[row.index, :, : row.rank] = np.random.default_rng(row.index).normal(size=(b.shape[1], row.rank))
        lora.b.set_value(jnp.asarray(b))
    return model


@pytest.fixture
def adapter(tiny, tmp_path):
    save_adapter(tmp_path / "adapter", adapted(tiny), SPEC, base="org/base", revision="v1")
    return tmp_path / "adapter"


def edit(adapter, change=None, **config):
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    if change is not None:
        tensors = {name: np.array(v) for name, v in open_tensors(adapter / "adapter_model.safetensors").items()}
        change(tensors)
        lazy = {name: Tensor(v.shape, v.dtype, lambda v=v: v) for name, v in tensors.items()}
        write_tensors(adapter / "adapter_model.safetensors", lazy)


def test_files_are_pefts(adapter):
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert set(KEYS) <= set(config)
    assert config["target_modules"] == ["down_proj", "q_proj"]
    assert (config["base_model_name_or_path"], config["revision"]) == ("org/base", "v1")
    assert (config["r"], config["lora_alpha"]) == (4, 8)
    tensors = open_tensors(adapter / "adapter_model.safetensors")
    assert len(tensors) == 2 * 2 * 2
    prefix = "base_model.model.model.layers"
    assert tensors[f"{prefix}.0.self_attn.q_proj.lora_A.weight"].shape == (4, 32)
    assert tensors[f"{prefix}.0.self_attn.q_proj.lora_B.weight"].shape == (32, 4)
    assert tensors[f"{prefix}.1.mlp.down_proj.lora_A.weight"].shape == (2, 48)
    assert {str(value.dtype) for value in tensors.values()} == {"float32"}


def test_round_trip(adapter, tiny, make_model, logits):
    model = make_model()
    spec = load_adapter(model, adapter)
    np.testing.assert_array_equal(logits(model), logits(tiny))
    assert spec.rank_of("model.layers.1.mlp.down_proj") == 2
    assert spec.factor_of("model.layers.1.mlp.down_proj") == 4


def test_dora_round_trip(make_model, logits, tmp_path):
    spec = dataclasses.replace(SPEC, use_dora=True)
    model = adapted(make_model(), spec)
    magnitude = model.stacks[0][0].attn.q.adapter.magnitude
    magnitude.set_value(1.5 * magnitude.get_value())
    save_adapter(tmp_path, model, spec, base="org/base")
    assert json.loads((tmp_path / "adapter_config.json").read_text())["use_dora"] is True
    tensors = open_tensors(tmp_path / "adapter_model.safetensors")
    assert tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector"].shape == (32,)
    again = make_model()
    assert load_adapter(again, tmp_path).use_dora
    np.testing.assert_array_equal(logits(again), logits(model))
    edit(tmp_path, use_dora=False)
    with pytest.raises(ValueError, match=r"lora_magnitude_vector, .* is not part of it"):
        load_adapter(make_model(), tmp_path)


def test_bad_pissa_adapter_over_a_packed_base(adapter, folder, load):
    edit(adapter, init_lora_weights="pissa")
    with pytest.raises(ValueError, match=r"pissa starts from 16-bit weights, but .*q_proj is quantized; leave quantiz"):
        load_adapter(load(folder, quantize_nf4=True), adapter)


def test_names_stay_long_where_others_end_in_them(make_model, tmp_path):
    spec = LoraSpec(rank=2, targets=("model.layers.1.mlp.up_proj", "q_proj"))
    save_adapter(tmp_path, adapted(make_model(), spec), spec, base="b")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["target_modules"] == ["model.layers.1.mlp.up_proj", "q_proj"]


def test_tied_embedding_is_written_with_its_head(make_model, logits, tmp_path):
    model = adapted(make_model(), modules=("embed_tokens", "norm"))
    save_adapter(tmp_path, model, SPEC, base="b")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["ensure_weight_tying"] is True
    # PEFT matches ends of texts: "norm" alone would also hit input_layernorm
    assert config["modules_to_save"] == ["embed_tokens", "lm_head", "model.norm"]
    tensors = open_tensors(tmp_path / "adapter_model.safetensors")
    a, b = (tensors[f"base_model.model.{name}.weight"] for name in ("model.embed_tokens", "lm_head"))
    np.testing.assert_array_equal(a, b)
    again = make_model()
    load_adapter(again, tmp_path)
    assert isinstance(again.embed, Trained)
    np.testing.assert_array_equal(logits(again), logits(model))


def test_model_without_adapter_is_refused(tiny, tmp_path):
    with pytest.raises(ValueError, match=r"no adapter to save; save a whole model"):
        save_adapter(tmp_path, tiny, SPEC, base="b")


def test_bad_folder(tmp_path, tiny):
    with pytest.raises(FileNotFoundError, match=r"adapter_name_or_path must be a PEFT adapter folder"):
        load_adapter(tiny, tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type IA3 is not supported"),
        ({"use_dora": True}, r"q_proj\.lora_magnitude_vector is missing, must be \(32,\)"),
        ({"use_qalora": True}, "not supported: use_qalora: True; LoRA, rsLoRA and DoRA are"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights: pissa_niter_4 changed the base .*conversion"),
        ({"bias": "all", "lora_bias": True}, "not supported: bias: all, lora_bias: True"),
        ({"kasa_config": {"beta": 1}, "velora_config": None}, r"not supported: kasa_config: {'beta': 1}; .*Remove a"),
        ({"use_magic": True, "more_magic": False}, r"adapter_config.json: not supported: use_magic: True; LoRA"),
        ({"r": None}, "adapter_config.json: r must be a whole number of at least 1, is None; save the adapter again"),
        ({"r": 0}, "r must be a whole number of at least 1, is 0"),
        ({"lora_alpha": float("nan")}, "lora_alpha must be a number, is nan"),
        ({"lora_dropout": 2}, "lora_dropout must be at least 0 and below 1, is 2"),
        ({"use_rslora": "false"}, "use_rslora must be true or false, is 'false'"),
        ({"rank_pattern": {"(": 4}}, "rank_pattern must be regular expressions with whole numbers"),
        ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern must be regular expressions with numbers"),
        ({"base_model_name_or_path": 5}, "base_model_name_or_path must be a text, is 5"),
        ({"target_parameters": 5}, "target_parameters must be a list of names, is 5"),
        ({"lora_alpha": "8"}, "adapter_config.json: lora_alpha must be a number, is '8'"),
        ({"r": 5}, r"tensors do not fit.*lora_A is missing|lora_A\.weight is \(4, 32\), must be \(5, 32\)"),
    ],
)
def test_bad_adapter_config(adapter, make_model, config, message):
    edit(adapter, **config)
    with pytest.raises(ValueError, match=message):
        load_adapter(make_model(), adapter)


def test_bad_adapter_of_another_base(adapter, make_model):
    with pytest.raises(ValueError, match=r"tensors do not fit adapter_config.json and the base.*must be \(4, 48\)"):
        load_adapter(make_model(width=48, head_dim=12), adapter)

    def deeper(tensors):
        tensors["base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight"] = np.zeros((4, 32), np.float32)

    edit(adapter, deeper)
    with pytest.raises(ValueError, match=r"model\.layers\.7\.self_attn\.q_proj is not part of it.*trained on org/base"):
        load_adapter(make_model(), adapter)


@pytest.mark.parametrize(
    ("part", "config", "message"),
    [
        ("layers.1.", {}, r"lacks model\.layers\.1\.self_attn\.q_proj, .*names in this base.*trained on org/base"),
        ("down_proj", {}, r"lacks model\.layers\.0\.mlp\.down_proj, model\.layers\.1\.mlp\.down_proj, which"),
        ("none", {"modules_to_save": ["embed_tokens"]}, r"adapter_model.safetensors lacks embed_tokens, which"),
    ],
)
def test_bad_adapter_that_lacks_what_its_config_names(adapter, make_model, part, config, message):
    def cut(tensors):
        for name in [name for name in tensors if part in name]:
            del tensors[name]

    edit(adapter, cut, **config)
    with pytest.raises(ValueError, match=message):
        load_adapter(make_model(), adapter)


def test_adapters_of_some_layers_are_whole(adapter, make_model):
    def cut(tensors):
        for name in [name for name in tensors if "layers.1." in name]:
            del tensors[name]

    edit(adapter, cut, layers_to_transform=[0], rank_pattern={})
    assert not load_adapter(make_model(), adapter).is_target("model.layers.1.self_attn.q_proj")


def test_bad_adapter_with_half_a_pair(adapter, make_model):
    edit(adapter, lambda tensors: tensors.pop("base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"))
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.q_proj\.lora_B\.weight is missing"):
        load_adapter(make_model(), adapter)


def test_bad_adapter_of_whole_numbers(adapter, make_model):
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
    edit(adapter, lambda tensors: tensors.update({name: tensors[name].astype(np.int8)}))
    with pytest.raises(
        ValueError, match=r"must be floating-point, these are not: model.*q_proj.lora_B.weight \(int8\)"
    ):
        load_adapter(make_model(), adapter)


def test_bad_adapter_pickled(adapter, make_model):
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(FileNotFoundError, match=r"adapter_model\.bin, pickled and never read"):
        load_adapter(make_model(), adapter)


def test_bad_adapter_without_weights(adapter, make_model):
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"holds adapter_config\.json without adapter_model\.safetensors; copy"):
        load_adapter(make_model(), adapter)


def test_bad_adapter_over_an_adapter(adapter, tiny):
    with pytest.raises(ValueError, match=r"has an adapter already"):
        load_adapter(tiny, adapter)
