"""Every configuration in configs/ trains: two steps of a tiny model with its own settings."""

import importlib.util
import json
import math
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from gymjax.config import load
from gymjax.models import decoder_config
from gymjax.models.names import hf_weights
from gymjax.training.train import train

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = sorted(path.name for path in (ROOT / "configs").glob("*.yaml"))
# Five layers, so that freezing the last four leaves one; small enough to compile in seconds.
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# What a tiny model needs otherwise: its path, short rows, two steps, precision and files that suit a test.
OVERRIDES = {"max_steps": 2, "cutoff_len": 128, "max_samples": 24, "report_to": "none", "disable_tqdm": True}


def tiny_tokenizer():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((ROOT / "data" / "identity_train.jsonl").read_text().splitlines(), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    """Folder of a random Llama of 100 thousand parameters with a tokenizer of 512 tokens."""
    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    config = TINY | {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    tensors = {
        w.name: np.ones(w.shape, np.float32) if "norm" in w.name else rng.normal(0, 0.05, w.shape).astype(np.float32)
        for w in hf_weights(decoder_config(config))
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


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
def test_trains(name, tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)  # data/ is named relative to the repository
    overrides = OVERRIDES | {"model_name_or_path": tiny_model, "output_dir": tmp_path}
    config = load(ROOT / "configs" / name, [f"{key}={value}" for key, value in overrides.items()])
    result = train(config)
    assert math.isfinite(result.metrics["train_loss"])
    weights = "adapter_model.safetensors" if config.adapter.finetuning_type == "lora" else "model.safetensors"
    expected = {weights, "tokenizer.json", "trainer_log.jsonl", "trainer_state.json", "all_results.json"}
    expected |= {"training_loss.png"} if config.train.plot_loss else set()
    assert expected - {path.name for path in tmp_path.iterdir()} == set()


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
