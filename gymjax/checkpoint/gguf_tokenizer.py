"""The tokenizer inside a GGUF file as a transformers fast tokenizer."""

from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from gymjax.checkpoint.gguf_file import GGUFFile

_CONTROL, _USER_DEFINED = 3, 4  # llama.cpp's token types
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _byte_level(**options: bool) -> pre_tokenizers.ByteLevel:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, **options)


def _split(digits: str) -> pre_tokenizers.PreTokenizer:
    """Words, runs of digits, the rest; then bytes."""
    pattern = Regex(f"{_CONTRACTIONS}|{_WORDS}|{digits}|{_REST}")
    return pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, behavior="isolated"), _byte_level(use_regex=False)])


# How each vocabulary's text was cut before its merges were learned, by llama.cpp's name for it.
_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": lambda: _byte_level(use_regex=True),
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), _byte_level(use_regex=True)]
    ),
    "llama-bpe": lambda: _split(r"\p{N}{1,3}"),
    "qwen2": lambda: _split(r"\p{N}"),
}


def tokenizer_from_gguf(file: GGUFFile) -> PreTrainedTokenizerFast:
    """Build the tokenizer, with its chat template, from a file's metadata.

    Raises:
        ValueError: a kind of tokenizer or a way of cutting words that is not supported, or none in the file.
    """
    remedy = "put the model's tokenizer.json and tokenizer_config.json beside the .gguf file"
    model, cut = file.field("tokenizer.ggml.model"), file.field("tokenizer.ggml.pre", "gpt-2")
    if model != "gpt2":
        raise ValueError(
            f"{file.origin}: tokenizer {model!r} is not built from GGUF (only byte-level BPE 'gpt2' is); {remedy}"
        )
    if cut not in _PRE_TOKENIZERS:
        raise ValueError(f"{file.origin}: pre-tokenizer {cut!r} is not known ({', '.join(_PRE_TOKENIZERS)}); {remedy}")
    needed = ("tokens", "merges", "token_type")
    tokens, merges, types = (file.field(f"tokenizer.ggml.{key}") for key in needed)
    missing = [f"tokenizer.ggml.{key}" for key, value in zip(needed, (tokens, merges, types)) if not value]
    if missing:
        raise ValueError(f"{file.origin}: the file lacks {', '.join(missing)}; {remedy}")
    vocabulary, pairs = {token: i for i, token in enumerate(tokens)}, [tuple(merge.split(" ", 1)) for merge in merges]
    try:
        backend = Tokenizer(BPE(vocab=vocabulary, merges=pairs, ignore_merges=cut == "llama-bpe"))
    except Exception as error:
        if type(error) not in (Exception, TypeError):  # tokenizers raises Exception itself
            raise
        raise ValueError(f"{file.origin}: its tokenizer is damaged ({error}); fetch it again, or {remedy}") from error
    backend.pre_tokenizer = _PRE_TOKENIZERS[cut]()
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(_added_tokens(tokens, types))
    special = {}
    for kind, key in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items():
        index = file.field(f"tokenizer.ggml.{key}_token_id")
        if index is not None and not 0 <= index < len(tokens):
            raise ValueError(
                f"{file.origin}: tokenizer.ggml.{key}_token_id {index} is none of its {len(tokens)} tokens; {remedy}"
            )
        special |= {} if index is None else {f"{kind}_token": tokens[index]}
    if file.field("tokenizer.ggml.add_bos_token", cut == "llama-bpe") and "bos_token" in special:
        bos = special["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B:1", special_tokens=[(bos, tokens.index(bos))]
        )
    return _wrap(backend, special, file)


def _added_tokens(tokens: list[str], types: list[int]) -> list[AddedToken]:
    """Tokens that are matched whole before the text is cut."""
    return [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, types)
        if kind in (_CONTROL, _USER_DEFINED)
    ]


def _wrap(backend: Tokenizer, special: dict[str, str], file: GGUFFile) -> PreTrainedTokenizerFast:
    options: dict[str, Any] = {"clean_up_tokenization_spaces": False}
    options["model_max_length"] = file.config["max_position_embeddings"]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special, **options)
    tokenizer.chat_template = file.field("tokenizer.chat_template")
    return tokenizer
