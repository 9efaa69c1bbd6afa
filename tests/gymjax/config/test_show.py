from pathlib import Path

import pytest

from gymjax import config

RUNS = [
    {},
    {"finetuning_type": "full", "bf16": True},
    {"finetuning_type": "freeze", "freeze_trainable_layers": -2, "freeze_extra_modules": "embed_tokens,norm"},
    {"fp16": True, "loss_scale": 1024, "quantization_bit": 4, "resume_from_checkpoint": False},
    {"dataset": ["a b.json", "c,d.json", "e"], "eval_dataset": "é: #1", "stop": ["\n", '"', "#x", " ", "null", "[a"]},
    {"default_system": "You are 'x': \"y\"\n\tand {z} \\ \x7f \u2028 \U0001f600", "run_name": "true", "stage": "pt"},
    {"lora_rank_pattern": {"q_proj": 4, "layers.0.mlp: up": 2}, "lora_target": "q_proj,v_proj", "default_system": ""},
    {"use_dora": True, "pissa_init": True, "pissa_iter": -1, "pissa_convert": True, "use_rslora": True},
    {"loftq_init": True, "loftq_iter": 5, "quantization_bit": 4, "pissa_convert": False},
    {"val_size": 0.05, "load_best_model_at_end": True, "early_stopping_steps": 2, "learning_rate": 1.2345678901234e-5},
    {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-6}, "learning_rate": 3e-4},
    {"resume_from_checkpoint": "out/checkpoint-3", "seed": 3, "warmup_steps": 5, "cache_dir": "~", "run_name": "-x"},
]


@pytest.mark.parametrize("values", RUNS)
def test_written_config_loads_back_equal(make, write, values):
    run = make(**values)
    assert config.load(write(config.to_yaml(run))) == run


@pytest.mark.parametrize("path", sorted(Path("configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_config_loads_and_round_trips(write, path):
    run = config.load(path)
    assert config.load(write(config.to_yaml(run))) == run
    config.check_trainable(run)


def test_differences_list_what_is_not_default(make):
    run = make(learning_rate=1e-3, lora_rank=16, seed=7)
    assert config.differences(run) == {
        "model_name_or_path": ("tiny", ""),
        "packing": (False, None),
        "lora_rank": (16, 8),
        "lora_alpha": (32, None),
        "learning_rate": (1e-3, 5e-5),
        "eval_strategy": ("no", None),
        "seed": (7, 42),
    }


def test_describe_shows_values_defaults_and_notes(make):
    text = config.describe(make(learning_rate=1e-3, trust_remote_code=True))
    assert "learning_rate       0.001  (default 5e-05)" in text
    assert "note: trust_remote_code: code from a model's repository is never run" in text


def test_flat_holds_every_key_once(make):
    keys = config.flat(make())
    assert keys["lora_rank"] == 8
    assert len(keys) == len(set(keys))


def test_sections_are_frozen(make):
    with pytest.raises(AttributeError):
        make().adapter.lora_rank = 3
