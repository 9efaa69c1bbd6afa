"""config.json of every family, in both spellings, and what is refused."""

import math

import pytest

from gymjax.models import decoder_config
from gymjax.models.decoder_config import LayerKind, Stack
from gymjax.models.hf_rope import extend_context, read_rope
from gymjax.nn.rope import Linear, Llama3, RopeConfig, Yarn

LLAMA = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def test_llama_defaults():
    cfg = decoder_config(LLAMA)
    assert (cfg.kv_heads, cfg.head_dim, cfg.layers, cfg.tie_embeddings) == (4, 8, 3, False)
    assert cfg.stacks == (Stack((LayerKind(None),), 3),)
    assert cfg.ropes == (RopeConfig(10000.0),)


@pytest.mark.parametrize(
    ("keys", "rope"),
    [
        ({"rope_theta": 5e5}, RopeConfig(5e5)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, RopeConfig(5e5)),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}, RopeConfig(5e5, Linear(2.0))),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}},
            RopeConfig(5e5, Linear(2.0)),
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            RopeConfig(5e5, Llama3(8.0, 1.0, 4.0, 8192)),
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
            RopeConfig(5e5, Llama3(8.0, 1.0, 4.0, 8192)),
        ),
    ],
)
def test_rope_in_both_spellings(keys, rope):
    assert decoder_config(LLAMA | keys).ropes == (rope,)


def test_mistral_has_a_window_on_every_layer():
    assert decoder_config(LLAMA | {"model_type": "mistral", "sliding_window": 7}).kinds == (LayerKind(7),) * 3
    assert decoder_config(LLAMA | {"model_type": "mistral", "sliding_window": None}).kinds == (LayerKind(),) * 3


def test_qwen2_windows_the_upper_layers_when_switched_on():
    hf = LLAMA | {"model_type": "qwen2", "sliding_window": 5, "max_window_layers": 1}
    assert decoder_config(hf).kinds == (LayerKind(),) * 3
    assert decoder_config(hf | {"use_sliding_window": True}).kinds == (LayerKind(), LayerKind(5), LayerKind(5))
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    assert decoder_config(hf | {"use_sliding_window": True, "layer_types": types}).kinds == (
        LayerKind(5),
        LayerKind(),
        LayerKind(5),
    )
    assert decoder_config(hf).qkv_bias
    assert not decoder_config(hf).out_bias


def test_qwen3_normalises_queries_and_keys():
    cfg = decoder_config(LLAMA | {"model_type": "qwen3"})
    assert cfg.qk_norm == "head"
    assert not cfg.qkv_bias
    assert cfg.head_dim == 128


def test_gemma_defaults():
    cfg = decoder_config(LLAMA | {"model_type": "gemma", "hidden_act": "gelu"})
    assert (cfg.head_dim, cfg.activation, cfg.tie_embeddings, cfg.norm_offset) == (256, "gelu_tanh", True, 1.0)
    assert cfg.embed_scale == 32**0.5
    cfg = decoder_config(LLAMA | {"model_type": "gemma2"})
    assert cfg.kinds == (LayerKind(4096), LayerKind(), LayerKind(4096))
    assert (cfg.attn_softcap, cfg.logit_softcap, cfg.attn_scale) == (50.0, 30.0, 256**-0.5)
    cfg = decoder_config(LLAMA | {"model_type": "gemma3_text", "num_hidden_layers": 7, "rope_local_base_freq": 2e4})
    assert cfg.kinds == (*[LayerKind(4096, 1)] * 5, LayerKind(None, 0), LayerKind(4096, 1))
    assert cfg.ropes == (RopeConfig(1e6), RopeConfig(2e4))


def test_smollm3_turns_three_layers_of_four():
    cfg = decoder_config(LLAMA | {"model_type": "smollm3", "num_hidden_layers": 5})
    assert [kind.rope for kind in cfg.kinds] == [0, 0, 0, None, 0]
    assert cfg.ropes == (RopeConfig(2e6),)


def test_hunyuans_alpha_is_a_larger_base():
    rope = read_rope(LLAMA | {"rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}})
    assert rope == RopeConfig(10000.0 * 1000.0 ** (8 / 6))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "mamba"},
            "model_type 'mamba' is not supported; supported: llama, mistral, qwen2, qwen3, gemma",
        ),
        (
            {"rope_scaling": {"rope_type": "proportional", "factor": 4.0}},
            "rope type 'proportional' is not supported; supported: default",
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}},
            "'llama3' needs low_freq_factor, high_freq_factor",
        ),
        ({"hidden_act": "relu2"}, "hidden_act 'relu2' is not supported; supported: silu"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple of num_key_value_heads 3"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported for this model_type"),
        ({"model_type": "olmo"}, "'olmo' is not supported: its LayerNorm has no weights"),
        ({"model_type": "gemma3"}, "'gemma3' is not supported: it reads images too"),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, "use_bidirectional_attention: True is not sup"),
        (
            {"model_type": "gemma3_text", "attn_logit_softcapping": 50.0},
            "attn_logit_softcapping: 50.0 is not supported",
        ),
        ({"model_type": "gemma3_text", "rope_parameters": {"rope_type": "default"}}, "must hold full_attention and sl"),
        ({"model_type": "phi3", "attention_bias": True}, "attention_bias: True is not supported for model_type phi3"),
        (
            {"model_type": "phi3", "rope_scaling": {"type": "linear", "factor": 2.0}},
            "'linear' is not supported for mod",
        ),
        (
            {"model_type": "phi3", "rope_scaling": {"type": "su", "short_factor": [1], "long_factor": [1]}},
            "have 4 numb",
        ),
        ({"model_type": "smollm3", "no_rope_layers": [1, 0]}, "no_rope_layers must have 3 numbers, one a layer, has 2"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "attn": 1}}, "rope type 'yarn' has no setting attn: 1"),
        ({"rope_scaling": {"type": "dynamic"}}, "'dynamic' needs factor or alpha"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object, is 'linear'"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor of rope type 'linear' must be a number, is '2'"),
        ({"rope_parameters": {"rope_theta": "1e6"}}, "rope_theta of rope type 'default' must be a number, is '1e6'"),
        (
            {"max_position_embeddings": "4096"},
            "max_position_embeddings must be a whole number of at least 1, is '4096'",
        ),
        ({"num_key_value_heads": -1}, "num_key_value_heads must be a whole number of at least 1, is -1"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false, is 'false'"),
        ({"model_type": "gemma2", "query_pre_attn_scalar": None}, "query_pre_attn_scalar must be a number above 0"),
        ({"model_type": "granite", "logits_scaling": 0}, "logits_scaling must be a number above 0, is 0"),
        ({"model_type": "mixtral", "num_local_experts": None}, "num_local_experts must be a whole number .* is None"),
        ({"model_type": ["llama"]}, "model_type .* is not supported; supported: llama"),
        ({"model_type": "qwen2", "layer_types": ["chunked"] * 3}, "layer_types must be 3 of full_attention"),
    ],
)
def test_bad_config_json(changes, message):
    with pytest.raises(ValueError, match=message):
        decoder_config(LLAMA | changes)


def test_bad_config_json_with_sizes_that_are_none():
    sizes = {"vocab_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    wrong = "hidden_size must be a whole number of at least 1, is '32'; num_attention_heads must be .* at least 1, is 0"
    with pytest.raises(ValueError, match=wrong):
        decoder_config({"model_type": "llama", "hidden_size": "32", "num_attention_heads": 0} | sizes)


def test_bad_config_json_lacks_keys():
    with pytest.raises(ValueError, match="missing hidden_size, num_attention_heads"):
        decoder_config({k: v for k, v in LLAMA.items() if k not in ("hidden_size", "num_attention_heads")})


@pytest.mark.parametrize(
    ("changes", "kind", "length", "message"),
    [
        ({}, "yarn", 64, "cutoff_len 64 fits into the model's 64 positions"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "yarn", 65, "has rope type 'linear' already"),
        ({"model_type": "phi3"}, "yarn", 65, "does not fit model_type phi3: transformers reads only its own LongRoPE"),
        ({"max_position_embeddings": None}, "linear", 65, "it names no max_position_embeddings"),
    ],
)
def test_bad_extension(changes, kind, length, message):
    with pytest.raises(ValueError, match=message):
        extend_context(LLAMA | {"max_position_embeddings": 64} | changes, kind, length)


def test_extension_is_by_a_whole_factor():
    hf = LLAMA | {"max_position_embeddings": 64, "rope_theta": 5e5}
    cfg = decoder_config(extend_context(hf, "yarn", 129))
    assert cfg.ropes == (RopeConfig(5e5, Yarn(3.0, 64, 0.1 * math.log(3.0) + 1)),)
    assert cfg.max_positions == 192
