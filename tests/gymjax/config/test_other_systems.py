"""What Axolotl's files say in keys or values of their own."""

import pytest

from gymjax import config


def from_dict(values):
    return config.from_dict({"model_name_or_path": "m"} | values)


def test_often_in_an_epoch_or_as_a_share_of_the_run():
    train = from_dict({"evals_per_epoch": 4, "saves_per_epoch": 0, "num_epochs": 2, "val_set_size": 0.1}).train
    assert (train.eval_strategy, train.eval_steps, train.save_strategy) == ("steps", 0.125, "no")
    once = from_dict({"saves_per_epoch": 0.25, "num_train_epochs": 2}).train
    assert 0.99 < once.save_steps < 1  # at the end
    given = from_dict({"save_steps": "0.1", "logging_steps": 5}).train
    assert (given.save_steps, given.logging_steps) == (0.1, 5)


def test_axolotl_says_all_linear_layers_beside_some():
    for keys in ({"lora_target_linear": True}, {}):
        named = {"lora_target_modules": ["q_proj", "v_proj"]} | keys
        for given in (named, dict(reversed(named.items()))):
            assert from_dict(given).adapter.lora_target == (("all",) if keys else ("q_proj", "v_proj"))
    with pytest.raises(config.ConfigError, match="both set lora_target, to all and q_proj"):
        from_dict({"lora_target_linear": True, "lora_target": "q_proj"})


def test_paged_states_stay_on_the_device():
    paged = from_dict({"optimizer": "paged_adamw_8bit"})
    assert paged.optim.optim == "adamw_8bit"
    assert any("paged_adamw_8bit is adamw_8bit here" in note for note in paged.notes)
    assert from_dict({"optim": "paged_adamw_32bit"}).optim.optim == "adamw"


def test_axolotl_names_of_a_turn_s_fields():
    sharegpt = {
        "path": "rows.json",
        "type": "chat_template",
        "message_property_mappings": {"role": "from", "content": "value"},
    }
    assert from_dict({"datasets": [sharegpt]}).data.dataset == ("rows.json",)
    assert from_dict({"datasets": [sharegpt | {"split": None}]}).data.dataset == ("rows.json",)
    other = sharegpt | {"message_property_mappings": {"role": ["who"], "content": "what"}}
    with pytest.raises(config.ConfigError, match=r"datasets\[0\].message_property_mappings"):
        from_dict({"datasets": [other]})


def test_axolotl_says_what_is_read_of_a_dataset():
    hub = {"path": "o/n", "type": "alpaca", "trust_remote_code": False}
    for keys, expected in (
        ({"split": "train[:20%]"}, ("o/n?split=train[:20%]",)),
        ({"name": "main", "split": "test", "revision": "main"}, ("o/n?subset=main&split=test",)),
        ({"name": ["a", "b"], "split": "test"}, ("o/n?subset=a&split=test", "o/n?subset=b&split=test")),
        (
            {"data_files": ["a.json", "b,c.json"], "revision": "v1"},
            ("o/n?data_files=a.json&data_files=b,c.json&revision=v1",),
        ),
        ({"ds_type": "parquet"}, ("o/n?ds_type=parquet",)),
        ({"path": "rows.jsonl", "ds_type": "json"}, ("rows.jsonl",)),
    ):
        given = from_dict({"datasets": [hub | keys]})
        assert given.data.dataset == expected
        written = config.to_yaml(given)
        assert f"dataset: [{', '.join(expected)}]" in written.replace('"', "")


@pytest.mark.parametrize(
    "key", ["min_sample_len", "max_packed_sequence_len", "loss_watchdog_threshold", "flash_attn_x"]
)
def test_what_would_be_lost_is_refused(key):
    with pytest.raises(config.ConfigError, match=key):
        from_dict({key: 10})
    assert key == "flash_attn_x" or from_dict({key: None})  # Axolotl's files list keys that they leave empty
