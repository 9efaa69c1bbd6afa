"""Whole runs with DoRA, PiSSA and LoftQ: what is saved computes what was trained, over the base that users name."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from gymjax.checkpoint.adapter_base import RESIDUAL
from gymjax.checkpoint.load import load_base, with_own_base
from gymjax.checkpoint.peft import load_adapter
from gymjax.config import ConfigError, change
from gymjax.dtypes import policy
from gymjax.export import load_merged
from gymjax.generate import load_adapted
from gymjax.training.train import train
from gymjax.verify import verify

TOKENS = np.random.default_rng(0).integers(0, 272, (2, 12))
TOLERANCE = 1e-4  # the project's bar in f32
PLAIN_LOSS = 1e-4  # relative: the base's weights are split into two f32 parts and summed again
METHODS = {
    "dora-nf4": {"use_dora": True, "quantization_bit": 4, "use_rslora": True, "loraplus_lr_ratio": 2},
    "pissa-convert": {"pissa_init": True, "pissa_iter": 2, "pissa_convert": True, "use_dora": True},
    "pissa": {"init_lora_weights": "pissa", "use_rslora": True},
    "loftq": {"loftq_init": True, "loftq_iter": 2, "quantization_bit": 4},
}


def logits(model):
    return np.asarray(model.logits(model(TOKENS)))


def read_config(folder):
    return json.loads((Path(folder) / "adapter_config.json").read_text())


@pytest.fixture(scope="module")
def configure_once(configure_in, tmp_path_factory):
    """As `configure`, each run in a folder that lasts for all tests of this file."""

    def make(name, **changes):
        settings = {"max_steps": 3, "save_strategy": "steps", "save_steps": 2}
        return configure_in(tmp_path_factory.mktemp(name), **settings | changes)

    return make


@pytest.fixture(scope="module")
def plain_loss(configure_once):
    return train(configure_once("plain", max_steps=1)).history[0]["loss"]


@pytest.fixture(scope="module")
def runs(configure_once):
    """The finished run of each method, trained when first asked for."""
    done = {}

    def run(method):
        if method not in done:
            done[method] = train(configure_once(method, **METHODS[method]))
        return done[method]

    return run


@pytest.mark.parametrize("method", METHODS)
def test_saved_adapter_over_the_named_base_computes_what_was_trained(method, runs, plain_loss):
    result = runs(method)
    config = result.run.config
    losses = [entry["loss"] for entry in result.history]
    assert losses[-1] < losses[0]
    if not config.model.quantization_bit:
        assert losses[0] == pytest.approx(plain_loss, rel=PLAIN_LOSS)
    trained, folder = logits(result.model), Path(config.train.output_dir)
    for adapter in (folder, folder / "checkpoint-3"):
        loaded = load_adapted(change(config, adapter_name_or_path=str(adapter)))
        assert np.abs(logits(loaded.model) - trained).max() < TOLERANCE
    assert (folder / RESIDUAL).is_dir() == (method in ("pissa", "loftq"))
    assert read_config(folder)["init_lora_weights"] is True
    assert read_config(folder)["r"] == (8 if method == "pissa-convert" else 4)
    assert ("DoRA" in (folder / "README.md").read_text()) == config.adapter.use_dora


@pytest.mark.parametrize("method", ["pissa-convert", "pissa", "loftq"])
def test_merged_weights_compute_what_was_trained(method, runs):
    result = runs(method)
    merged = load_merged(result.run.config, Path(result.run.config.train.output_dir))
    assert np.abs(logits(merged.model) - logits(result.model)).max() < TOLERANCE


@pytest.mark.parametrize("method", ["pissa-convert", "loftq"])
def test_resuming_gives_the_same_bits(method, runs, leaves_equal, tmp_path):
    whole = runs(method)
    checkpoint = Path(whole.run.config.train.output_dir) / "checkpoint-2"
    config = change(whole.run.config, output_dir=str(tmp_path / "on"), resume_from_checkpoint=str(checkpoint))
    resumed = train(config)
    assert leaves_equal(whole.state, resumed.state)
    assert leaves_equal(whole.run.frozen, resumed.run.frozen)
    one, two = (Path(run.run.config.train.output_dir) / "adapter_model.safetensors" for run in (whole, resumed))
    assert one.read_bytes() == two.read_bytes()
    assert (tmp_path / "on" / RESIDUAL).is_dir() == (method == "loftq")


def test_bad_resume_with_another_start(runs, tmp_path):
    config = runs("pissa").run.config
    checkpoint = Path(config.train.output_dir) / "checkpoint-2"
    changed = change(config, output_dir=str(tmp_path), resume_from_checkpoint=str(checkpoint), pissa_iter=4)
    with pytest.raises(ValueError, match=r"started by pissa, -1 iterations, seed 42, the configuration says pissa, 4 "):
        train(changed)


def test_loftq_base_is_written_packed(runs):
    folder = Path(runs("loftq").run.config.train.output_dir) / RESIDUAL
    tensors = load_file(folder / "model.safetensors")
    assert tensors["model.layers.0.mlp.up_proj.weight"].dtype == np.uint8
    assert json.loads((folder / "config.json").read_text())["quantization_config"]["bnb_4bit_quant_type"] == "nf4"


def test_verify_takes_the_adapters_own_base(runs):
    found = verify(runs("loftq").run.config, torch=False, tokens=12)
    assert [row.passed for row in found] == [True, None, None]
    # over its own base the packed weights are those that were merged: what differs is the rounding to bf16 alone
    assert found[2].max_difference == pytest.approx(found[1].max_difference, rel=1e-3)


def test_own_base_is_found_where_the_run_was_moved(runs, tmp_path):
    config = runs("pissa").run.config
    folder = Path(config.train.output_dir)
    moved = tmp_path / "moved"
    shutil.copytree(folder, moved)
    written = read_config(moved) | {"base_model_name_or_path": "elsewhere/residual_base"}
    (moved / "adapter_config.json").write_text(json.dumps(written))
    assert with_own_base(config.model, moved).model_name_or_path == str(moved / RESIDUAL)
    shutil.rmtree(moved / RESIDUAL)
    with pytest.raises(FileNotFoundError, match=r"is elsewhere/residual_base, which does not exist; copy the run's"):
        with_own_base(config.model, moved)


@pytest.mark.parametrize(("method", "bits"), [("pissa", None), ("pissa", 4), ("loftq", None), ("loftq", 4)])
def test_bad_base_under_an_adapter_with_its_own(method, bits, runs):
    """Loaded by hand over the original weights, it would compute something else in silence."""
    original = dataclasses.replace(runs(method).run.config.model, quantization_bit=bits)
    model = load_base(original, policy("fp32")).model
    with pytest.raises(ValueError, match=r"was trained over the weights in .*residual_base, but others are loaded"):
        load_adapter(model, runs(method).run.config.train.output_dir)


def test_going_on_from_an_adapter_with_its_own_base(runs, configure_once):
    first = runs("pissa").run.config.train.output_dir
    result = train(configure_once("on", adapter_name_or_path=first, max_steps=1))
    written = read_config(result.run.config.train.output_dir)
    assert written["base_model_name_or_path"] == str(Path(first) / RESIDUAL)
    loaded = load_adapted(change(result.run.config, adapter_name_or_path=result.run.config.train.output_dir))
    assert np.abs(logits(loaded.model) - logits(result.model)).max() < TOLERANCE


def test_bad_second_start(runs, configure_once):
    first = runs("pissa").run.config.train.output_dir
    with pytest.raises(ConfigError, match=r"pissa_init: true would start adapter_name_or_path: .* anew; take one of"):
        train(configure_once("again", adapter_name_or_path=first, pissa_init=True))
    with pytest.raises(ValueError, match=r"use_dora: true, but adapter_name_or_path: .* has use_dora: false"):
        train(configure_once("again", adapter_name_or_path=first, use_dora=True))


@pytest.fixture(scope="module")
def plain_adapter(configure_in, tmp_path_factory):
    config = configure_in(tmp_path_factory.mktemp("plain"), max_steps=1, lora_target="q_proj,v_proj")
    train(config)
    return config.train.output_dir


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lora_rank": 6}, "lora_rank: 6, but .* has lora_rank: 4"),
        ({"lora_rank": 4, "lora_alpha": 5}, "lora_alpha: 5, but .* has lora_alpha: 8"),
        ({"lora_dropout": 0.1}, "lora_dropout: 0.1, but .* has lora_dropout: 0.0"),
        ({"use_rslora": True}, "use_rslora: true, but .* has use_rslora: false"),
        ({"lora_target": "all"}, r"lora_target: all, but .* has lora_target: q_proj,v_proj \(4 modules, not 14\)"),
        ({"lora_rank_pattern": {"q_proj": 2}}, "lora_rank_pattern: .*q_proj.*, but .* has lora_rank_pattern: {}"),
    ],
)
def test_bad_settings_of_an_adapter_that_is_continued(plain_adapter, configure, given, message):
    """They would be ignored: the adapter's file says what it is."""
    with pytest.raises(ValueError, match=f"{message}; leave .* out to go on with it"):
        train(configure(adapter_name_or_path=plain_adapter, **{"lora_rank": None} | given))


def test_a_continued_adapter_takes_equal_settings_and_further_modules(plain_adapter, configure):
    same = {"lora_rank": 4, "lora_alpha": 8, "lora_target": "v_proj,q_proj", "additional_target": "norm"}
    result = train(configure(adapter_name_or_path=plain_adapter, max_steps=1, **same))
    saved = json.loads((Path(result.run.config.train.output_dir) / "adapter_config.json").read_text())
    assert saved["modules_to_save"] == ["model.norm"]
