"""Models in llama.cpp's GGUF files: metadata to a config.json, tensors under their Hugging Face names."""

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

ARCHITECTURES = ("llama", "qwen2", "qwen3")  # llama.cpp spells Mistral "llama" too
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class GGUFFile:
    """A GGUF file, mapped; tensors are dequantized to f32 one at a time as they are read.

    Attributes:
        origin: the file's path.
        fields: its metadata, `field(key)` decodes one.
        config: the config.json that transformers would give this model.
        shapes: Hugging Face name -> shape.
    """

    def __init__(self, path: Path):
        """Maps a file.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: damaged, one part of several, or an architecture or scaling that is not supported.
        """
        self.origin = str(path)
        self._reader = _open(path)
        self._tensors = {}
        extra: dict[str, Any] = {}
        for tensor in self._reader.tensors:
            name = _hf_name(tensor.name)
            (self._tensors if name else extra)[name or tensor.name] = tensor
        self.architecture = self.field("general.architecture")
        if self.architecture not in ARCHITECTURES:
            raise ValueError(
                f"{path}: architecture {self.architecture!r} is not supported; supported: {', '.join(ARCHITECTURES)}"
            )
        if self.field("split.count", 1) > 1:
            raise ValueError(f"{path} is one part of several; join them first: llama-gguf-split --merge")
        factors = extra.pop("rope_freqs.weight", None)
        self.config = self._config(None if factors is None else np.asarray(factors.data, np.float32))
        self.shapes = {name: tuple(int(n) for n in t.shape[::-1]) for name, t in (self._tensors | extra).items()}

    def field(self, key: str, default: Any = None) -> Any:
        """A metadata value by its whole key."""
        field = self._reader.fields.get(key)
        return default if field is None else field.contents()

    def read(self, name: str) -> np.ndarray:
        """One tensor in f32, in Hugging Face's row order.

        Raises:
            ValueError: the tensor is stored in a format that the gguf package does not decode.
        """
        tensor = self._tensors[name]
        try:
            value = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            raise ValueError(
                f"{self.origin}: {tensor.name} is stored as {tensor.tensor_type.name}, which is not decoded; "
                "take a file in F16, BF16, Q8_0, Q6_K, Q5_K, Q4_K, Q4_0 or Q4_1"
            ) from None
        value = value.reshape(self.shapes[name])
        heads = {"q_proj": self.config["num_attention_heads"], "k_proj": self.config["num_key_value_heads"]}
        projection = name.split(".")[-2]
        if self.architecture == "llama" and projection in heads:
            return unpermute(value, heads[projection])
        return value

    def _config(self, rope_factors: np.ndarray | None) -> dict[str, Any]:
        get: Callable = lambda key, default=None: self.field(f"{self.architecture}.{key}", default)  # noqa: E731
        embed = self._tensors.get("model.embed_tokens.weight")
        needed = ("embedding_length", "block_count", "feed_forward_length", "attention.head_count")
        missing = [f"{self.architecture}.{key}" for key in needed if get(key) is None]
        if missing or embed is None:
            raise ValueError(
                f"{self.origin}: the file lacks {', '.join(missing) or 'token_embd.weight'}; fetch it again"
            )
        heads, width = get("attention.head_count"), get("embedding_length")
        eps = np.float32(get("attention.layer_norm_rms_epsilon", 1e-6))
        config = {
            "model_type": self.architecture,
            "hidden_act": "silu",
            "vocab_size": int(embed.shape[1]),
            "hidden_size": width,
            "intermediate_size": get("feed_forward_length"),
            "num_hidden_layers": get("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": get("attention.head_count_kv", heads),
            "head_dim": get("attention.key_length", width // heads),
            "max_position_embeddings": get("context_length", 2048),
            "rms_norm_eps": float(str(eps)),  # the shortest decimal of the stored f32
            "rope_parameters": self._rope(get, rope_factors),
            "tie_word_embeddings": "lm_head.weight" not in self._tensors,
            "bos_token_id": self.field("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.field("tokenizer.ggml.eos_token_id"),
            "pad_token_id": self.field("tokenizer.ggml.padding_token_id"),
        }
        if self.architecture == "llama":
            config["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in self._tensors
        return config

    def _rope(self, get: Callable, factors: np.ndarray | None) -> dict[str, Any]:
        theta = float(str(np.float32(get("rope.freq_base", 10000.0))))
        kind = get("rope.scaling.type", "none")
        if factors is not None:
            return _llama3_rope(self.origin, theta, factors)
        if kind == "none":
            return {"rope_type": "default", "rope_theta": theta}
        if kind == "linear":
            factor = get("rope.scaling.factor")
            if factor is None:
                raise ValueError(f"{self.origin}: linear rope scaling lacks its rope.scaling.factor; fetch it again")
            return {"rope_type": "linear", "rope_theta": theta, "factor": float(factor)}
        raise ValueError(f"{self.origin}: rope scaling {kind!r} is not supported; supported: none, linear, llama3")


def _open(path: Path) -> gguf.GGUFReader:
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; give the path of a .gguf file")
    try:
        return gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError, MemoryError) as error:
        raise ValueError(f"{path} is no GGUF file, cut short or damaged ({error}); fetch it again") from None


def _hf_name(name: str) -> str | None:
    """Hugging Face's name of a GGUF tensor; None for one that has none."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
        layer, module, kind = match.groups()
        return f"model.layers.{layer}.{_BLOCK[module]}.{kind}" if module in _BLOCK else None
    module, _, kind = name.partition(".")
    return f"{_TOP[module]}.{kind}" if module in _TOP else None


def unpermute(w: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's row order, which pairs rotary rows (2i, 2i+1) where Hugging Face pairs (i, i+H/2).

    Args:
        w: (heads*H, I) weight or (heads*H,) bias of q or k.
        heads: heads of that projection.
    """
    return w.reshape(heads, w.shape[0] // heads // 2, 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def _llama3_rope(origin: str, theta: float, factors: np.ndarray) -> dict[str, Any]:
    """Llama 3's scaling settings from the per-frequency divisors that GGUF stores in their place.

    Source: llama.cpp convert_hf_to_gguf.py (rope_freqs); the settings are those of Llama 3.1 and 3.2, checked against
    every divisor.
    """
    rope = {"rope_type": "llama3", "rope_theta": theta, "factor": float(factors.max()), **_LLAMA3}
    expected = llama3_divisors(rope, 2 * factors.size)
    if not np.allclose(expected, factors, rtol=1e-4):  # rtol: the file holds f32 rounded values
        raise ValueError(f"{origin}: rope_freqs are not those of Llama 3 scaling, the only ones supported")
    return rope


def llama3_divisors(rope: Mapping[str, Any], head_dim: int) -> np.ndarray:
    """What Llama 3's scaling divides each rotary frequency by: 1 for short wavelengths, `factor` for long ones."""
    wavelength = 2 * math.pi * rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    share = (rope["original_max_position_embeddings"] / wavelength - low) / (high - low)
    share = share.clip(0, 1)
    return 1 / ((1 - share) / rope["factor"] + share)
