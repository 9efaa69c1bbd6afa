"""Mixtures of experts saved by transformers load here with equal logits, in either spelling, and ours load there."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from gymjax.checkpoint.experts import split_experts
from gymjax.checkpoint.hf import open_folder, save_folder
from gymjax.checkpoint.weights import load_decoder
from gymjax.losses.router import expert_fractions, load_balancing_loss
from gymjax.models import decoder_config
from gymjax.models.names import hf_weights, node_at

pytestmark = pytest.mark.interop

BASE = {
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "num_experts_per_tok": 2,
    "eos_token_id": None,
    "pad_token_id": None,  # torch gives its embedding no gradient
}
QWEN = {"num_experts": 6, "moe_intermediate_size": 24}
VARIANTS = {
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4},
    "mixtral-window": {"model_type": "mixtral", "num_local_experts": 3, "sliding_window": 7},
    "olmoe": {"model_type": "olmoe", "num_experts": 6, "num_experts_per_tok": 3},
    "olmoe-clipped": {"model_type": "olmoe", "num_experts": 4, "clip_qkv": 0.6},
    "olmoe-normalized": {"model_type": "olmoe", "num_experts": 4, "norm_topk_prob": True},
    "qwen2_moe": {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 28, **QWEN},
    "qwen2_moe-mixed": {
        "model_type": "qwen2_moe",
        "shared_expert_intermediate_size": 28,
        "num_hidden_layers": 5,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
        "use_sliding_window": True,
        "sliding_window": 6,
        "max_window_layers": 3,
        **QWEN,
    },
    "qwen3_moe": {"model_type": "qwen3_moe", "head_dim": 12, "norm_topk_prob": True, **QWEN},
    "qwen3_moe-mixed": {"model_type": "qwen3_moe", "head_dim": 8, "mlp_only_layers": [0], **QWEN},
    "gpt_oss": {"model_type": "gpt_oss", "num_local_experts": 4, "head_dim": 8, "sliding_window": 7},
    "gpt_oss-tight": {"model_type": "gpt_oss", "num_local_experts": 4, "head_dim": 8, "swiglu_limit": 0.3},
}
LENGTH = 40  # tokens: longer than every window above
TOLERANCE = 1e-4  # the project's bar; f32 sums of 40 terms in another order differ by 1e-6


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(0).integers(0, BASE["vocab_size"], (2, LENGTH))


def ours(folder, tokens):
    source = open_folder(folder)
    model = load_decoder(decoder_config(source.config), source, dtype="float32")
    return model, np.asarray(model.logits(model(tokens)))


def theirs(torch_side, folder, tokens, tmp_path):
    torch_side.logits(folder=folder, tokens=tokens.tolist(), out=tmp_path / "theirs.npy")
    return np.load(tmp_path / "theirs.npy")


def assert_equal_logits(a, b):
    assert np.abs(a - b).max() < TOLERANCE
    assert (a.argmax(-1) == b.argmax(-1)).all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_both_ways(variant, torch_side, tokens, tmp_path):
    folder = tmp_path / "theirs"
    torch_side.make_model(folder=folder, config=BASE | VARIANTS[variant])
    expected = theirs(torch_side, folder, tokens, tmp_path)
    assert np.ptp(expected) > 1  # random enough for a wrong expert to show
    model, result = ours(folder, tokens)
    assert_equal_logits(result, expected)
    config = json.loads((folder / "config.json").read_text())
    save_folder(tmp_path / "ours", model, config, dtype="float32", export_size=1e-4)
    assert_equal_logits(theirs(torch_side, tmp_path / "ours", tokens, tmp_path), expected)
    hubs, saved = open_folder(folder), open_folder(tmp_path / "ours")
    assert saved.shapes == hubs.shapes  # the hub's spelling
    for name in hubs.shapes:
        assert hubs.read(name).tobytes() == saved.read(name).tobytes(), name


@pytest.mark.parametrize("variant", ["mixtral", "olmoe", "qwen2_moe-mixed", "qwen3_moe"])
def test_fused_spelling(variant, torch_side, tokens, tmp_path):
    torch_side.make_model(folder=tmp_path, config=BASE | VARIANTS[variant], original_format=False)
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in open_folder(tmp_path).shapes)
    expected = theirs(torch_side, tmp_path, tokens, tmp_path)
    assert_equal_logits(ours(tmp_path, tokens)[1], expected)


def test_mxfp4_is_dequantized(torch_side, tokens, tmp_path):
    """Random codes and scales: logits as transformers dequantizes them, and saved in bf16 with its values."""
    config = BASE | VARIANTS["gpt_oss"] | {"hidden_size": 64, "intermediate_size": 32}
    torch_side.make_model(folder=tmp_path / "dense", config=config, dtype="bfloat16")
    dense = open_folder(tmp_path / "dense")
    rng = np.random.default_rng(0)
    tensors = {name: dense.read(name) for name in dense.shapes if not name.endswith(("gate_up_proj", "down_proj"))}
    for i in range(config["num_hidden_layers"]):
        for name, rows, groups in (("gate_up_proj", 64, 2), ("down_proj", 64, 1)):
            prefix = f"model.layers.{i}.mlp.experts.{name}"
            tensors[f"{prefix}_blocks"] = rng.integers(0, 256, (4, rows, groups, 16), dtype=np.uint8)
            tensors[f"{prefix}_scales"] = rng.integers(120, 125, (4, rows, groups), dtype=np.uint8)
    (tmp_path / "packed").mkdir()
    save_file(tensors, tmp_path / "packed" / "model.safetensors", metadata={"format": "pt"})
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    hf = json.loads((tmp_path / "dense" / "config.json").read_text()) | {"quantization_config": quantization}
    (tmp_path / "packed" / "config.json").write_text(json.dumps(hf))
    model, result = ours(tmp_path / "packed", tokens)
    assert_equal_logits(result, theirs(torch_side, tmp_path / "packed", tokens, tmp_path))
    save_folder(tmp_path / "saved", model, hf, dtype="bfloat16")
    saved = open_folder(tmp_path / "saved")
    assert "quantization_config" not in saved.config
    assert saved.shapes == dense.shapes
    assert_equal_logits(theirs(torch_side, tmp_path / "saved", tokens, tmp_path), result)


def test_router_loss_and_where_it_differs(torch_side, tokens, tmp_path):
    """transformers pools all layers before it multiplies fractions with probabilities, and does not divide by top_k."""
    torch_side.make_model(folder=tmp_path, config=BASE | VARIANTS["olmoe"])
    mask = np.ones_like(tokens)
    mask[1, 25:] = 0
    theirs = torch_side.router_loss(folder=tmp_path, tokens=tokens.tolist(), mask=mask.tolist())
    source = open_folder(tmp_path)
    model = load_decoder(decoder_config(source.config), source, dtype="float32")
    _, stats = model.trunk(model.embed_tokens(tokens), counted_BT=mask == 1)
    top_k, count = source.config["num_experts_per_tok"], mask.sum()
    pooled = stats.counts.mean(0, keepdims=True), stats.probs.mean(0, keepdims=True)
    as_theirs = top_k * load_balancing_loss(expert_fractions(pooled[0]), pooled[1], count)
    assert float(as_theirs) == pytest.approx(theirs, rel=1e-5)  # f32 sums in another order
    ours = load_balancing_loss(expert_fractions(stats.counts), stats.probs, count)
    assert float(ours) > theirs / top_k  # layers' own imbalances, which pooling hides in part


class Gradients:
    """transformers' gradients as a source of tensors, so that fused experts' are read one by one."""

    origin = "gradients"

    def __init__(self, path):
        self.arrays = dict(np.load(path))
        self.shapes = {name: array.shape for name, array in self.arrays.items()}

    def read(self, name):
        return self.arrays[name]


@pytest.mark.parametrize("variant", ["olmoe", "qwen2_moe", "gpt_oss"])
def test_gradients_of_every_weight(variant, torch_side, tokens, tmp_path):
    torch_side.make_model(folder=tmp_path, config=BASE | VARIANTS[variant] | {"num_hidden_layers": 2})
    torch_side.gradients(folder=tmp_path, tokens=tokens.tolist(), out=tmp_path / "theirs.npz")
    source = open_folder(tmp_path)
    cfg = decoder_config(source.config)
    graphdef, state = nnx.split(load_decoder(cfg, source, dtype="float32"))

    @jax.jit
    def gradients(state):
        def loss(state):
            model = nnx.merge(graphdef, state)
            logs = jax.nn.log_softmax(model.logits(model(tokens))[:, :-1])
            return -jnp.mean(jnp.take_along_axis(logs, jnp.asarray(tokens)[:, 1:, None], axis=-1))

        return jax.grad(loss)(state)

    ours, theirs = nnx.merge(graphdef, gradients(state)), split_experts(cfg, Gradients(tmp_path / "theirs.npz"))
    largest = max(np.abs(array).max() for array in theirs.source.arrays.values())
    for weight in hf_weights(cfg):
        exact = theirs.read(weight.name)
        difference = np.abs(np.asarray(node_at(ours, weight.path).get_value()[weight.at]) - exact).max()
        assert difference < 1e-5 * largest, weight.name  # f32 sums over 80 tokens in another order
