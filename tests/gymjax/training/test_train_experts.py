"""Runs over a mixture of experts from a config to its files."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gymjax.checkpoint.hf import save_folder
from gymjax.models import decoder_config
from gymjax.models.decoder import Decoder
from gymjax.training.logs import ROUTER_KEYS
from gymjax.training.train import train


@pytest.fixture(scope="module")
def experts_folder(byte_tokenizer, hf_config, tmp_path_factory):
    hf = hf_config | {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 2,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "mlp_only_layers": [0],
    }
    model = Decoder(decoder_config(hf), dtype=jnp.float32)
    rng = np.random.default_rng(0)
    nnx.update(
        model, jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 0.1, leaf.shape), leaf.dtype), nnx.state(model))
    )
    path = tmp_path_factory.mktemp("experts") / "model"
    save_folder(path, model, hf, dtype="float32", tokenizer=byte_tokenizer)
    return path


@pytest.mark.parametrize("changes", [{"quantization_bit": 4}, {"finetuning_type": "full", "lora_rank": None}])
def test_a_run_logs_its_routers(changes, configure, experts_folder, tmp_path):
    coefficients = {"moe_aux_loss_coef": 0.01, "router_z_loss_coef": 0.001}
    shape = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 2, "plot_loss": True}
    train(configure(model_name_or_path=str(experts_folder), **coefficients, **shape, **changes))
    lines = [json.loads(line) for line in (tmp_path / "out" / "trainer_log.jsonl").read_text().splitlines()]
    for line in lines[:2]:
        assert set(ROUTER_KEYS) <= set(line)
        assert 0 <= line["expert_load_min"] <= 1 <= line["expert_load_max"] <= 4 / 2
        assert line["moe_aux_loss"] > 0.9  # balanced routing gives 1
        assert line["expert_dropped"] == 0
    assert (tmp_path / "out" / "training_expert_load.png").exists()
    saved = "adapter_model.safetensors" if "quantization_bit" in changes else "model.safetensors"
    assert (tmp_path / "out" / saved).exists()


def test_a_dense_model_has_no_router_loss(configure):
    with pytest.raises(ValueError, match="moe_aux_loss_coef would do nothing: this model has no mixture of experts"):
        train(configure(moe_aux_loss_coef=0.01))
