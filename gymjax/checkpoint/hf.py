"""Model folders as Hugging Face writes them: config.json and one or several safetensors files."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from gymjax.checkpoint.files import replacing, require_space
from gymjax.checkpoint.safetensors_io import Tensor, open_tensors, total_bytes, write_tensors
from gymjax.checkpoint.weights import hf_tensors
from gymjax.models import FAMILIES
from gymjax.models.decoder import Decoder
from gymjax.quant.nf4 import from_bitsandbytes
from pallas_kernels.nf4_linear import NF4Weight

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
GENERATION = "generation_config.json"
SAVED_DTYPES = ("bfloat16", "float16", "float32")
_STATE = ".quant_state.bitsandbytes__"


@dataclasses.dataclass(frozen=True)
class HFFolder:
    """The tensors of a model folder, mapped; weights that bitsandbytes packed are read as NF4Weight.

    Attributes:
        origin: the folder's path.
        config: its config.json.
        tensors: every entry of its safetensors files.
        packed: names of the weights stored in NF4.
        shapes: name -> shape before packing.
    """

    origin: str
    config: Mapping[str, Any]
    tensors: Mapping[str, np.ndarray]
    packed: frozenset[str]
    shapes: Mapping[str, tuple[int, ...]]

    def read(self, name: str) -> np.ndarray | NF4Weight:
        """One tensor; a packed weight comes packed."""
        return from_bitsandbytes(self.tensors, name) if name in self.packed else self.tensors[name]


def open_folder(folder: Path) -> HFFolder:
    """Map a model folder.

    Raises:
        FileNotFoundError: the folder, its config.json, its weights or some of its shards are not there.
        ValueError: a damaged file, weights in another format, or a quantization that is not read.
    """
    config = read_config(folder)
    tensors: dict[str, np.ndarray] = {}
    for path in _weight_files(folder):
        found = open_tensors(path)
        twice = sorted(found.keys() & tensors.keys())
        if twice:
            raise ValueError(
                f"{path}: {', '.join(twice[:6])} {'stand' if twice[1:] else 'stands'} in an earlier shard too; fetch "
                "the model's files again into an empty folder"
            )
        tensors |= found
    packed = frozenset(name.split(_STATE)[0] for name in tensors if _STATE in name)
    _check_quantization(folder, config.get("quantization_config"), bool(packed))
    try:
        shapes = {
            name: tuple(from_bitsandbytes(tensors, name).shape) if name in packed else value.shape
            for name, value in tensors.items()
            if not _describes_packed(name, packed)
        }
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None
    return HFFolder(str(folder), config, tensors, packed, shapes)


def _describes_packed(name: str, packed: frozenset[str]) -> bool:
    """Whether an entry such as `X.weight.absmax` belongs to the packed weight `X.weight`."""
    owner, dot, _ = name.partition(".weight.")
    return bool(dot) and f"{owner}.weight" in packed


def read_config(folder: Path) -> dict[str, Any]:
    """A model folder's config.json.

    Raises:
        FileNotFoundError: no folder or no config.json in it.
        ValueError: it is not JSON.
    """
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder} is not a folder; model_name_or_path must be a model folder, a .gguf or a hub id"
        )
    path = folder / "config.json"
    if not path.exists() and (folder / "adapter_config.json").exists():
        raise FileNotFoundError(
            f"{folder} holds an adapter, not a model: give it as adapter_name_or_path, its base as model_name_or_path"
        )
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; copy the model's config.json beside its weights")
    return read_json(path)


def stored_dtype(config: Mapping[str, Any]) -> str:
    """Dtype of a model's weights on disk by its config.json, so that saving again neither rounds nor widens them.

    Raises:
        ValueError: it is none that models are saved in.
    """
    name = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if name not in SAVED_DTYPES:
        raise ValueError(
            f"config.json: dtype must be one of {', '.join(SAVED_DTYPES)}, is {name!r}; write what the weights are "
            "stored in"
        )
    return name


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        ValueError: the file is not a JSON object; the message names it.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); fetch the file again") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def _weight_files(folder: Path) -> list[Path]:
    if (folder / INDEX).exists():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ValueError(f"{folder / INDEX} lacks weight_map, names of tensors with those of files; fetch it again")
        files = sorted(set(weight_map.values()))
        missing = [name for name in files if not (folder / name).is_file()]
        if missing:
            raise FileNotFoundError(
                f"{folder} lacks {len(missing)} of {len(files)} shards: {', '.join(missing)}; copy them there"
            )
        return [folder / name for name in files]
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickled:
        raise ValueError(
            f"{folder} holds pickled weights ({', '.join(pickled[:3])}), which can run code when loaded and are never "
            "read; convert them once in transformers: AutoModelForCausalLM.from_pretrained(old).save_pretrained(new)"
        )
    raise FileNotFoundError(f"{folder} holds neither {SINGLE} nor {INDEX}; fetch the model's weights")


def _check_quantization(folder: Path, config: Mapping[str, Any] | None, packed: bool) -> None:
    if config is None and not packed:
        return
    if config is not None and not isinstance(config, dict):
        raise ValueError(f"{folder}/config.json: quantization_config must be an object, is {config!r}")
    config = config or {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    method, kind = config.get("quant_method", "bitsandbytes"), config.get("bnb_4bit_quant_type")
    if method == "mxfp4":  # gpt-oss' experts, dequantized as they are read
        return
    if method != "bitsandbytes" or not config.get("load_in_4bit") or kind != "nf4":
        raise ValueError(
            f"{folder}/config.json: quantization_config {method} (4-bit type {kind}) is not read; "
            "read are 16- and 32-bit weights, bitsandbytes NF4 and gpt-oss' MXFP4: use the original model with "
            "quantization_bit: 4"
        )


def bitsandbytes_config(dtype: DTypeLike, double_quant: bool) -> dict[str, Any]:
    """The quantization_config that transformers expects beside NF4 weights."""
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": double_quant,
        "bnb_4bit_compute_dtype": np.dtype(dtype).name,
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
        "llm_int8_skip_modules": ["lm_head"],
        "llm_int8_threshold": 6.0,
    }


def save_folder(
    folder: Path,
    model: Decoder,
    hf_config: Mapping[str, Any],
    *,
    dtype: DTypeLike,
    export_size: float = 5.0,
    tokenizer: Any = None,
    generation_config: Mapping[str, Any] | None = None,
    keep_packed: bool = False,
) -> None:
    """Write a folder that transformers loads, tensor by tensor, all files or none.

    Args:
        folder: where to; files of other names that it holds stay, but for parts of a model that this one has none of.
        model: its adapters are not written: merge them first.
        hf_config: the base's config.json; dtype and architectures are brought up to date.
        dtype: of dense tensors: bf16, f16 or f32.
        export_size: largest shard in GB (10^9 bytes).
        tokenizer: written with its `save_pretrained`.
        generation_config: written as generation_config.json.
        keep_packed: keep NF4 weights as bitsandbytes stores them instead of dequantizing.

    Raises:
        ValueError: export_size is not positive.
        OSError: not enough disk; what the folder held is intact.
    """
    if export_size <= 0:
        raise ValueError(f"export_size must be above 0 GB, is {export_size}")
    tensors = dict(hf_tensors(model, dtype, keep_packed=keep_packed))
    shards = list(_shards(tensors, int(export_size * 1e9)))
    require_space(folder, total_bytes(tensors.values()))
    names = (
        [SINGLE]
        if len(shards) == 1
        else [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    )
    with replacing(folder) as temporary:
        for name, shard in zip(names, shards):
            write_tensors(temporary / name, shard)
        if len(shards) > 1:
            _write_index(temporary / INDEX, names, shards)
        write_json(temporary / "config.json", _updated_config(hf_config, dtype, tensors))
        if generation_config is not None:
            write_json(temporary / GENERATION, generation_config)
        if tokenizer is not None:
            tokenizer.save_pretrained(str(temporary))
        written = {path.name for path in temporary.iterdir()}
    _remove_stale(folder, written, with_tokenizer=tokenizer is not None)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object, indented as transformers does."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _shards(tensors: Mapping[str, Tensor], limit: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if shard and size + tensor.nbytes > limit:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    yield shard


def _write_index(path: Path, names: list[str], shards: list[dict[str, Tensor]]) -> None:
    size = sum(total_bytes(shard.values()) for shard in shards)
    weight_map = {tensor: name for name, shard in zip(names, shards) for tensor in shard}
    write_json(path, {"metadata": {"total_size": size}, "weight_map": weight_map})


def _updated_config(hf_config: Mapping[str, Any], dtype: DTypeLike, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    config = {key: value for key, value in hf_config.items() if key not in ("quantization_config", "torch_dtype")}
    config["architectures"] = [FAMILIES[config["model_type"]].ARCHITECTURE]
    config["dtype"] = np.dtype(dtype).name
    if any(_STATE in name for name in tensors):
        config["quantization_config"] = bitsandbytes_config(
            dtype, any(name.endswith(".nested_absmax") for name in tensors)
        )
    return config


def _remove_stale(folder: Path, written: set[str], *, with_tokenizer: bool) -> None:
    """Remove what an earlier save left that this one has none of, and that would be read with it."""
    stale = [*folder.glob("model-*-of-*.safetensors"), folder / SINGLE, folder / INDEX, folder / GENERATION]
    stale += [folder / "chat_template.jinja"] if with_tokenizer else []
    for path in stale:
        if path.name not in written:
            path.unlink(missing_ok=True)
