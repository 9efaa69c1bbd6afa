import pytest
from tokenizers import pre_tokenizers

from gymjax.checkpoint.gguf_tokenizer import tokenizer_from_gguf


class Metadata:
    """Stands for a GGUFFile whose metadata is at hand."""

    def __init__(self, **changes):
        self.origin, self.config = "x.gguf", {"max_position_embeddings": 512}
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokens = [*alphabet, "12", "123", "Ġa", "<|end|>", "<|tool|>"]
        self._fields = {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "llama-bpe",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [1] * (len(tokens) - 2) + [3, 4],
            "tokenizer.ggml.merges": ["1 2", "12 3", "Ġ a"],
            "tokenizer.ggml.eos_token_id": len(tokens) - 2,
            "tokenizer.chat_template": "{{ messages }}",
        } | changes

    def field(self, key, default=None):
        return self._fields.get(key, default)


def pieces(text, **changes):
    tokenizer = tokenizer_from_gguf(Metadata(**changes))
    return tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"])


@pytest.mark.parametrize(
    ("cut", "expected"),
    [
        ("gpt-2", ["123", "4"]),
        ("llama-bpe", ["123", "4"]),
        ("qwen2", ["1", "2", "3", "4"]),
        ("smollm", ["1", "2", "3", "4"]),
    ],
)
def test_digits_are_cut_as_the_vocabulary_was_learned(cut, expected):
    assert pieces("1234", **{"tokenizer.ggml.pre": cut}) == expected


def test_special_tokens_are_matched_whole():
    assert pieces("a<|end|> a<|tool|>") == ["a", "<|end|>", "Ġa", "<|tool|>"]
    tokenizer = tokenizer_from_gguf(Metadata())
    assert tokenizer.eos_token == "<|end|>"
    assert tokenizer.bos_token is None
    assert tokenizer.chat_template == "{{ messages }}"
    ids = tokenizer("a<|end|> a<|tool|>")["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a a<|tool|>"


def test_bos_is_added_where_the_file_says_so():
    bos = {"tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.add_bos_token": True}
    assert pieces("a", **bos)[1:] == ["a"]
    assert pieces("a", **bos | {"tokenizer.ggml.add_bos_token": False}) == ["a"]


def test_bad_tokenizer_kind():
    with pytest.raises(ValueError, match=r"tokenizer 'llama' is not built from GGUF.*put the model's tokenizer\.json"):
        tokenizer_from_gguf(Metadata(**{"tokenizer.ggml.model": "llama"}))


def test_bad_pre_tokenizer():
    with pytest.raises(ValueError, match=r"pre-tokenizer 'tekken' is not known \(gpt-2, smollm, llama-bpe, qwen2\)"):
        tokenizer_from_gguf(Metadata(**{"tokenizer.ggml.pre": "tekken"}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": None}, r"x\.gguf: the file lacks tokenizer\.ggml\.tokens; put the model's tokenizer\.json"),
        ({"merges": None, "token_type": None}, r"lacks tokenizer\.ggml\.merges, tokenizer\.ggml\.token_type; put"),
        ({"merges": ["ab"]}, r"x\.gguf: its tokenizer is damaged \(.*put the model's tokenizer\.json"),
        ({"merges": ["zz yy"]}, r"its tokenizer is damaged \(.*Token `zz` out of vocabulary.*fetch it again, or put"),
        ({"eos_token_id": 9999}, r"tokenizer\.ggml\.eos_token_id 9999 is none of its 261 tokens; put"),
        ({"bos_token_id": -1}, r"tokenizer\.ggml\.bos_token_id -1 is none of its 261 tokens"),
    ],
)
def test_bad_metadata(changes, message):
    with pytest.raises(ValueError, match=r"(?s)" + message):
        tokenizer_from_gguf(Metadata(**{f"tokenizer.ggml.{key}": value for key, value in changes.items()}))
