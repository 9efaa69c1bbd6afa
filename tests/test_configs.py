"""Every configuration in configs/ trains: two steps of a tiny model with its own settings."""

import importlib.util
import math
from pathlib import Path

import pytest

from gymjax.config import load
from gymjax.training.train import train

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = sorted(path.name for path in (ROOT / "configs").glob("*.yaml"))
# What a tiny model needs otherwise: its path, short rows, two steps, precision and files that suit a test.
OVERRIDES = {"max_steps": 2, "cutoff_len": 128, "max_samples": 24, "report_to": "none", "disable_tqdm": True}


def test_there_are_configurations():
    assert "qlora_smollm2_identity.yaml" in CONFIGS


@pytest.mark.parametrize("name", CONFIGS)
def test_name_says_method_and_folder(name):
    config = load(ROOT / "configs" / name)
    method = name.split("_")[0]
    expected = "qlora" if config.model.quantization_bit else config.adapter.finetuning_type
    assert method == ("pt" if config.train.stage == "pt" else expected)
    assert config.train.output_dir == f"outputs/{Path(name).stem}"


@pytest.mark.parametrize("name", CONFIGS)
def test_trains(name, request, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)  # data/ is named relative to the repository
    model = request.getfixturevalue(
        "tiny_experts" if "moe_aux_loss_coef" in (ROOT / "configs" / name).read_text() else "tiny_model"
    )
    overrides = OVERRIDES | {"model_name_or_path": model, "output_dir": tmp_path}
    config = load(ROOT / "configs" / name, [f"{key}={value}" for key, value in overrides.items()])
    result = train(config)
    assert math.isfinite(result.metrics["train_loss"])
    weights = "adapter_model.safetensors" if config.adapter.finetuning_type == "lora" else "model.safetensors"
    expected = {weights, "tokenizer.json", "trainer_log.jsonl", "trainer_state.json", "all_results.json"}
    expected |= {"training_loss.png"} if config.train.plot_loss else set()
    assert expected - {path.name for path in tmp_path.iterdir()} == set()


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("lora_smollm2_identity.yaml", {"use_dora": "true"}),
        ("qlora_smollm2_identity.yaml", {"pissa_init": "true"}),
        ("qlora_smollm2_identity.yaml", {"loftq_init": "true"}),
    ],
    ids=["dora", "pissa", "loftq"],
)
def test_trains_with_one_key_more(name, method, tiny_model, tmp_path, monkeypatch):
    """Methods that need no file of their own; what the files are about is tested above."""
    monkeypatch.chdir(ROOT)
    less = {"eval_dataset": "", "eval_strategy": "no", "save_strategy": "no", "plot_loss": "false"}
    overrides = OVERRIDES | less | {"model_name_or_path": tiny_model, "output_dir": tmp_path} | method
    result = train(load(ROOT / "configs" / name, [f"{key}={value}" for key, value in overrides.items()]))
    assert math.isfinite(result.metrics["train_loss"])
    assert (tmp_path / "adapter_model.safetensors").is_file()


def test_quickstart_shows_answers_and_loss_before_and_after(tiny_model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    spec = importlib.util.spec_from_file_location("quickstart", ROOT / "scripts" / "quickstart.py")
    quickstart = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(quickstart)
    overrides = OVERRIDES | {"model_name_or_path": tiny_model, "output_dir": tmp_path}
    arguments = [str(ROOT / "configs" / "qlora_smollm2_identity.yaml"), *(f"{k}={v}" for k, v in overrides.items())]
    train(load(arguments[0], arguments[1:]))
    capsys.readouterr()
    assert quickstart.main(arguments) == 1  # two steps of a random model teach nothing, and the script says so
    shown = capsys.readouterr().out
    assert "Who am I talking to?" in shown
    assert "right answers: 0 of 21 before, 0 of 21 after" in shown
    assert "held-out loss:" in shown
    assert "it did not learn" in shown
