"""What "auto" chooses, what is refused before anything is compiled, and what plan_only shows."""

import dataclasses
import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from gymjax import train as entry
from gymjax.config import to_yaml
from gymjax.training import loop, plan, planning, setup
from gymjax.training import train as training
from gymjax.training.inputs import open_inputs
from gymjax.training.metrics import GIB
from gymjax.training.plan import FILL, choose, describe, recompute_seconds
from gymjax.training.planning import plan_run, workload
from gymjax.training.setup import set_up

MIB = 2**20


@pytest.fixture
def work(configure):
    config = configure(per_device_train_batch_size=8)
    # As on a GPU: there attention's kernel names its output.
    return workload(config, open_inputs(config))


def test_auto_computes_less_again_the_more_memory_there_is(work, monkeypatch):
    for name in ("predict", "kept_bytes"):  # of one step, so that each word is traced once
        known = functools.cache(functools.partial(getattr(plan, name), work))
        monkeypatch.setattr(plan, name, lambda _, remat, known=known: known(remat))
    peaks = {remat: plan.predict(work, remat).peak for remat in ("offload", "full", "none")}
    assert choose(work, "auto", peaks["full"]).remat == "offload"  # it would fill more than FILL
    seen = []
    for limit in range(int(peaks["full"] / FILL) + 1, int(1.2 * peaks["none"] / FILL), peaks["none"] // 64):
        chosen = choose(work, "auto", limit)
        assert chosen.memory.peak <= FILL * limit
        assert chosen.fits
        assert chosen.memory.peak == plan.predict(work, chosen.remat).peak  # sizes of names were added up
        seen.append((recompute_seconds(work, chosen.remat), chosen.remat))
    times = [time for time, _ in seen]
    assert times == sorted(times, reverse=True)
    assert seen[0][1] == "full"
    assert seen[-1] == (0.0, "none")
    assert len({remat for _, remat in seen}) > 3


def test_auto_says_why_it_takes_full_where_the_device_tells_no_limit(work):
    chosen = choose(work, "auto", None)
    assert chosen.remat == "full"
    assert "tells no limit" in describe(chosen)[0]
    assert chosen.fits


def test_names_that_save_nothing_are_left_out(work):
    assert plan.units(work) == [
        ("q", "k", "v"),
        ("middle",),
        ("gate",),
        ("up",),
    ]  # xla's attention goes on from nothing
    on_gpu = dataclasses.replace(work, settings=dataclasses.replace(work.settings, attention="mosaic_gpu"))
    assert plan.units(on_gpu)[0] == ("attention", "attention_lse")
    normalised = dataclasses.replace(on_gpu, cfg=dataclasses.replace(work.cfg, qk_norm="head"))
    assert ("q", "k", "v") not in plan.units(normalised)
    assert plan.units(dataclasses.replace(normalised, length=2**15)) == [
        ("attention", "attention_lse"),
        ("q_product", "k_product", "v"),
        ("middle",),
    ]
    fused = dataclasses.replace(work, cfg=dataclasses.replace(work.cfg, fused=True))
    assert plan.units(fused) == [("q", "k", "v"), ("middle",), ("gate", "up")]
    after = dataclasses.replace(work, cfg=dataclasses.replace(work.cfg, norms="sandwich"))
    assert ("middle",) not in plan.units(after)


def no(*_, **__):
    raise AssertionError("must not be reached")


def test_what_does_not_fit_is_refused_before_it_is_loaded_or_compiled(configure, monkeypatch):
    config = configure(gradient_checkpointing="none", cutoff_len=64)
    monkeypatch.setattr(planning, "device_memory_gib", lambda: 1 * MIB / GIB)
    monkeypatch.setattr(setup, "load_base", no)
    monkeypatch.setattr(loop, "compile_program", no)
    monkeypatch.setattr(planning, "compile_program", no)
    with pytest.raises(ValueError, match="gradient_checkpointing: none with 4 x ") as caught:
        training.train(config)
    message = str(caught.value)
    remedies = [
        "GiB of a device that has 0.00",
        "gradient_checkpointing: full (",
        "gradient_checkpointing: offload (",
        "per_device_train_batch_size: ",
        "with gradient_accumulation_steps: ",
        "quantization_bit: 4 (",
        "cutoff_len: ",
        "XLA_PYTHON_CLIENT_MEM_FRACTION",
    ]
    places = [message.index(remedy) for remedy in remedies]
    assert places == sorted(places)
    assert not Path(config.train.output_dir).exists()


def test_remedies_shrink_until_it_fits(work):
    least = plan.predict(dataclasses.replace(work, rows=2), "offload").peak
    found = plan.remedies(choose(work, "offload", least))
    assert found[0].startswith("per_device_train_batch_size: 2 with gradient_accumulation_steps: 4 (")


def test_a_host_too_small_for_the_inputs_is_told(work, monkeypatch):
    monkeypatch.setattr(plan, "host_bytes", lambda: 10)
    chosen = choose(work, "offload", None)
    assert not chosen.fits
    assert "of a host that has" in plan.refusal(chosen)


def test_plan_only_on_the_command_line(configure, tmp_path):
    config = configure(gradient_checkpointing="auto")
    (tmp_path / "run.yaml").write_text(to_yaml(config))
    done = subprocess.run(
        [sys.executable, "-m", "gymjax.train", str(tmp_path / "run.yaml"), "plan_only=true"],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    for words in ("frozen weights", "optimizer state", "layer inputs", "predicted peak", "by the compiler", "auto:"):
        assert words in done.stdout
    assert not Path(config.train.output_dir).exists()


def test_plan_only_says_what_to_change(configure, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(planning, "device_memory_gib", lambda: 1 * MIB / GIB)
    monkeypatch.setattr(planning, "compile_program", no)
    (tmp_path / "run.yaml").write_text(to_yaml(configure()))
    assert entry.main([str(tmp_path / "run.yaml"), "plan_only=true"]) == 1
    printed = capsys.readouterr().out
    assert "predicted peak" in printed
    assert "In this order: gradient_checkpointing: offload" in printed


def test_auto_trains_with_what_it_chose(configure, monkeypatch):
    monkeypatch.setattr(planning, "device_memory_gib", lambda: 10.0)
    result = training.train(configure(gradient_checkpointing="auto", max_steps=1))
    assert result.run.settings.remat == "none"
    assert result.run.plan.why


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"use_dora": True, "lora_dropout": 0.1},
        {"quantization_bit": 4},
        {"pissa_init": True},
        {"quantization_bit": 4, "loftq_init": True},
        {"additional_target": "embed_tokens"},
        {"finetuning_type": "full", "lora_rank": None, "optim": "adamw_8bit"},
        {"finetuning_type": "freeze", "lora_rank": None, "freeze_trainable_layers": 1},
        {"fp16": True, "optim": "muon"},
    ],
    ids=str,
)
def test_planned_shapes_are_those_that_are_loaded(configure, changes):
    config = configure(**changes)
    inputs = open_inputs(config)
    planned = plan_run(config, inputs)
    run, state = set_up(config, inputs, planned)
    for abstract, real in ((planned.work.state, state), (planned.work.frozen, run.frozen)):
        assert jax.tree.structure(abstract) == jax.tree.structure(real)
        pairs = zip(jax.tree.leaves(abstract), jax.tree.leaves(real), strict=True)
        assert all((a.shape, a.dtype, a.sharding) == (b.shape, b.dtype, b.sharding) for a, b in pairs)


def test_an_adapter_that_is_continued_is_planned_too(configure, tmp_path):
    first = configure(max_steps=1, output_dir=str(tmp_path / "first"), use_dora=True)
    training.train(first)
    config = configure(adapter_name_or_path=first.train.output_dir, lora_rank=None)
    inputs = open_inputs(config)
    planned = plan_run(config, inputs)
    _, state = set_up(config, inputs, planned)
    assert jax.tree.map(lambda leaf: leaf.shape, planned.work.state) == jax.tree.map(lambda leaf: leaf.shape, state)
