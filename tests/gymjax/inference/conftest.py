import pytest

from gymjax.models.decoder_config import LayerKind, Stack

VARIANTS = {
    "gqa": {},
    "mqa_biases_untied": {"kv_heads": 1, "tie_embeddings": False, "qkv_bias": True, "out_bias": True, "mlp_bias": True},
    "window": {"stacks": (Stack((LayerKind(5),), 2),)},
    "alternating": {"stacks": (Stack((LayerKind(4), LayerKind()), 2), Stack((LayerKind(4),), 1))},
    "qk_norm": {"qk_norm": "head", "head_dim": 16},
}


@pytest.fixture(scope="session")
def model(make_model):
    return make_model()


@pytest.fixture(scope="session", params=VARIANTS)
def any_model(request, make_model):
    return make_model(**VARIANTS[request.param])


@pytest.fixture(scope="session")
def tokenizer(byte_tokenizer):
    return byte_tokenizer
