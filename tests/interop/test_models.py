"""Models saved by transformers load here with equal logits, and ours load there."""

import json

import numpy as np
import pytest

from gymjax.checkpoint.hf import open_folder, save_folder
from gymjax.checkpoint.weights import load_decoder
from gymjax.models import decoder_config

pytestmark = pytest.mark.interop

BASE = {
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
VARIANTS = {
    "llama-mha": {"model_type": "llama", "num_key_value_heads": 4},
    "llama-gqa-tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama-mqa": {"model_type": "llama", "num_key_value_heads": 1, "rms_norm_eps": 1e-5},
    "llama-biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama-head-dim": {"model_type": "llama", "head_dim": 16},
    "llama-theta": {"model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    "llama-linear": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 20000.0},
    },
    "llama-llama3": {"model_type": "llama", "rope_parameters": {**LLAMA3, "rope_theta": 500000.0}},
    "mistral-window": {"model_type": "mistral", "sliding_window": 7},
    "mistral-full": {"model_type": "mistral", "sliding_window": None},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2-window": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 6,
        "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 20},
    "qwen3-tied": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True, "num_key_value_heads": 4},
}
GELU = {"hidden_size": 32, "head_dim": 16, "intermediate_size": 80}
NESTED = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.4, 1.9, 2.5],
    "long_factor": [1.0, 1.5, 2.5, 4.0, 9.0, 20.0],
}
VARIANTS |= {
    "llama-yarn": {"model_type": "llama", "rope_parameters": {**YARN, "rope_theta": 10000.0}},
    "llama-dynamic": {
        "model_type": "llama",
        "max_position_embeddings": 16,
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    },
    "gemma": {"model_type": "gemma"} | GELU,
    "gemma-untied": {"model_type": "gemma", "tie_word_embeddings": False, "attention_bias": True} | GELU,
    "gemma2": {"model_type": "gemma2", "sliding_window": 7, "query_pre_attn_scalar": 24} | GELU,
    "gemma2-caps": {
        "model_type": "gemma2",
        "num_hidden_layers": 4,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 1.5,
    }
    | GELU,
    "gemma3": {"model_type": "gemma3_text", "num_hidden_layers": 7, "sliding_window": 7, "query_pre_attn_scalar": 20}
    | GELU,
    "gemma3-types": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 2,
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 5,
        "rope_parameters": NESTED,
        "final_logit_softcapping": 3.0,
    }
    | GELU,
    "phi3": {"model_type": "phi3", "sliding_window": 9, "pad_token_id": 0},
    "phi3-short": {
        "model_type": "phi3",
        "pad_token_id": 0,
        "original_max_position_embeddings": 64,
        "rope_parameters": {**LONGROPE, "rope_theta": 10000.0},
    },
    "phi3-long-partial": {
        "model_type": "phi3",
        "pad_token_id": 0,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "original_max_position_embeddings": 32,
        "tie_word_embeddings": True,
        "rope_parameters": {**LONGROPE, "rope_theta": 10000.0, "partial_rotary_factor": 0.75},
    },
    "olmo2": {"model_type": "olmo2"},
    "olmo2-bias": {"model_type": "olmo2", "attention_bias": True, "num_key_value_heads": 4, "hidden_act": "gelu"},
    "olmo3": {"model_type": "olmo3", "num_hidden_layers": 5, "sliding_window": 7},
    "olmo3-yarn": {
        "model_type": "olmo3",
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "sliding_window": 7,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {**YARN, "attention_factor": 1.2, "rope_theta": 20000.0},
        },
    },
    "smollm3": {"model_type": "smollm3", "num_hidden_layers": 5, "pad_token_id": 0},
    "smollm3-window": {
        "model_type": "smollm3",
        "no_rope_layers": [0, 1, 0],
        "use_sliding_window": True,
        "sliding_window": 6,
        "mlp_bias": True,
        "pad_token_id": 0,
    },
    "granite": {
        "model_type": "granite",
        "embedding_multiplier": 6.0,
        "attention_multiplier": 0.11,
        "residual_multiplier": 0.22,
        "logits_scaling": 0.5,
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
}
LENGTH = 40  # tokens: longer than every window and than Llama 3's original length above
TOLERANCE = 1e-4  # the project's bar; f32 sums of 80 terms in another order differ by 1e-6


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(0).integers(0, BASE["vocab_size"], (2, LENGTH))


def ours(folder, tokens, **options):
    source = open_folder(folder)
    model = load_decoder(decoder_config(source.config), source, dtype="float32", **options)
    return model, np.asarray(model.logits(model(tokens)))


def theirs(torch_side, folder, tokens, tmp_path):
    torch_side.logits(folder=folder, tokens=tokens.tolist(), out=tmp_path / "theirs.npy")
    return np.load(tmp_path / "theirs.npy")


def assert_equal_logits(a, b, tolerance=TOLERANCE):
    assert np.abs(a - b).max() < tolerance
    assert (a.argmax(-1) == b.argmax(-1)).all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_both_ways(variant, torch_side, tokens, tmp_path):
    folder = tmp_path / "theirs"
    torch_side.make_model(folder=folder, config=BASE | VARIANTS[variant])
    expected = theirs(torch_side, folder, tokens, tmp_path)
    assert np.ptp(expected) > 1  # random enough for a wrong layer to show
    model, result = ours(folder, tokens)
    assert_equal_logits(result, expected)
    config = json.loads((folder / "config.json").read_text())
    save_folder(tmp_path / "ours", model, config, dtype="float32", export_size=1e-4)
    assert len(list((tmp_path / "ours").glob("model-*.safetensors"))) > 1  # 0.1 MB a shard
    assert_equal_logits(theirs(torch_side, tmp_path / "ours", tokens, tmp_path), expected)


def old_spelling(config):
    """The config.json that transformers 4 would write."""
    config = dict(config)
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope == {"rope_type": "default"} else rope
    config["torch_dtype"] = config.pop("dtype")
    return config


@pytest.mark.parametrize("variant", ["llama-theta", "llama-linear", "llama-llama3"])
def test_old_spelling_of_rope(variant, torch_side, tokens, tmp_path):
    torch_side.make_model(folder=tmp_path, config=BASE | VARIANTS[variant])
    expected = theirs(torch_side, tmp_path, tokens, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(old_spelling(json.loads(path.read_text()))))
    assert_equal_logits(ours(tmp_path, tokens)[1], expected)
    assert_equal_logits(theirs(torch_side, tmp_path, tokens, tmp_path), expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_weights_keep_their_bits(dtype, torch_side, tokens, tmp_path):
    torch_side.make_model(folder=tmp_path / "theirs", config=BASE | VARIANTS["qwen2"], dtype=dtype)
    source = open_folder(tmp_path / "theirs")
    model = load_decoder(decoder_config(source.config), source, dtype=dtype)
    save_folder(tmp_path / "ours", model, source.config, dtype=dtype)
    saved = open_folder(tmp_path / "ours")
    assert saved.config["dtype"] == dtype
    assert saved.shapes == source.shapes
    for name in source.shapes:
        assert source.read(name).tobytes() == saved.read(name).tobytes()
    assert_equal_logits(  # both sides compute in f32 from the same 16-bit weights
        theirs(torch_side, tmp_path / "ours", tokens, tmp_path), ours(tmp_path / "theirs", tokens)[1]
    )
