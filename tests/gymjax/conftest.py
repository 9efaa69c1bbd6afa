"""A tiny random model and a byte tokenizer, for tests of generation and of the entries."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from gymjax.models.decoder import Decoder
from gymjax.models.decoder_config import DecoderConfig, LayerKind, Stack
from gymjax.nn.rope import RopeConfig

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BASE = DecoderConfig(
    vocab_size=272,
    width=32,
    ffn_width=48,
    heads=4,
    kv_heads=2,
    head_dim=8,
    stacks=(Stack((LayerKind(),), 2),),
    ropes=(RopeConfig(),),
    norm_eps=1e-6,
    max_positions=256,
    tie_embeddings=True,
)


def random_model(dtype=jnp.float32, seed=0, **changes):
    model = Decoder(dataclasses.replace(BASE, **changes), dtype=dtype)
    rng = np.random.default_rng(seed)

    def fill(path, leaf):
        noise = rng.normal(0, 0.3, leaf.shape)
        return jnp.asarray(noise + (path[-2].key == "scale"), leaf.dtype)

    nnx.update(model, jax.tree_util.tree_map_with_path(fill, nnx.state(model)))
    return model


@pytest.fixture(scope="session")
def make_model():
    return random_model


@pytest.fixture(scope="session")
def hf_config():
    """config.json of make_model()'s model."""
    return {
        "model_type": "llama",
        "vocab_size": BASE.vocab_size,
        "hidden_size": BASE.width,
        "intermediate_size": BASE.ffn_width,
        "num_hidden_layers": BASE.layers,
        "num_attention_heads": BASE.heads,
        "num_key_value_heads": BASE.kv_heads,
        "head_dim": BASE.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": BASE.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": BASE.ropes[0].theta},
        "max_position_embeddings": BASE.max_positions,
        "tie_word_embeddings": BASE.tie_embeddings,
        "dtype": "float32",
    }


@pytest.fixture(scope="session")
def byte_tokenizer():
    """One token a byte, so that a random model cuts characters in two."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|endoftext|>", additional_special_tokens=["<|im_start|>", "<|im_end|>"]
    )
    tokenizer.chat_template = CHATML
    return tokenizer
