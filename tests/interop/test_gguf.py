"""SmolLM2's GGUF file read here and by transformers: same logits, same token ids."""

import numpy as np
import pytest

from gymjax.checkpoint.gguf_file import GGUFFile
from gymjax.checkpoint.gguf_tokenizer import tokenizer_from_gguf
from gymjax.checkpoint.weights import load_decoder
from gymjax.models import decoder_config

pytestmark = pytest.mark.interop

TEXTS = [
    "Hello, world! It's 12:45 on 3 July 2026; isn't that 1,234.5 km away?",
    "def f(x):\n\treturn {'a': x ** 2}  # comment\n\n\n    done",
    "Größe, naïve, 中文字符, かな, русский, 😀👍🏽",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "   leading and trailing   ",
    "",
]
MESSAGES = [
    [{"role": "user", "content": "Who are you?"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "3+3?"},
    ],
]


@pytest.fixture(scope="module")
def file(smollm2):
    return GGUFFile(smollm2)


@pytest.fixture(scope="module")
def theirs(torch_side, smollm2):
    return torch_side.tokenize(folder=smollm2.parent, gguf_file=smollm2.name, texts=TEXTS, messages=MESSAGES)


def test_token_ids_equal(file, theirs):
    tokenizer = tokenizer_from_gguf(file)
    assert [tokenizer(text)["input_ids"] for text in TEXTS] == theirs["ids"]
    assert dict(tokenizer.special_tokens_map) == theirs["special"]
    for text, ids in zip(TEXTS, theirs["ids"]):
        assert tokenizer.decode(ids) == text


def test_chat_template_equal(file, theirs):
    tokenizer = tokenizer_from_gguf(file)
    rendered = [tokenizer.apply_chat_template(m, tokenize=False, add_generation_prompt=True) for m in MESSAGES]
    assert rendered == theirs["rendered"]


def test_saved_tokenizer_loads_in_transformers(file, theirs, torch_side, tmp_path):
    tokenizer_from_gguf(file).save_pretrained(str(tmp_path))
    saved = torch_side.tokenize(folder=tmp_path, texts=TEXTS, messages=MESSAGES)
    assert saved["ids"] == theirs["ids"]
    assert saved["rendered"] == theirs["rendered"]


def test_logits_equal(file, torch_side, smollm2, tmp_path):
    tokens = [tokenizer_from_gguf(file)("The capital of France is")["input_ids"]]
    torch_side.logits(folder=smollm2.parent, gguf_file=smollm2.name, tokens=tokens, out=tmp_path / "out.npy")
    expected = np.load(tmp_path / "out.npy")
    model = load_decoder(decoder_config(file.config), file, dtype="float32")
    logits = np.asarray(model.logits(model(np.array(tokens))))
    # Logits reach 35 here. A last product of 576 terms alone differs by 1e-4 between f32 libraries at that size, and
    # against f64 both sides are off by up to 1.5e-4: the bar of 1e-4 is read relative to logits of size 10.
    assert np.abs(logits - expected).max() < 1e-5 * np.abs(expected).max()
    assert (logits.argmax(-1) == expected.argmax(-1)).all()
