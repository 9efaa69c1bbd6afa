"""`python -m gymjax.export CONFIG.yaml export_dir=DIR`: a model folder with the adapter merged in, or the adapter."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

from gymjax.adapters.lora import merge
from gymjax.checkpoint.files import replacing
from gymjax.checkpoint.hf import read_config, save_folder, stored_dtype
from gymjax.checkpoint.load import LoadedModel, load_base, load_tokenizer, locate, with_adapter, with_own_base
from gymjax.checkpoint.peft import CONFIG, WEIGHTS, open_adapter
from gymjax.config import Config, ConfigError, check_unmixed, check_writable, load
from gymjax.dtypes import Policy
from gymjax.models.decoder import Decoder
from gymjax.models.names import linears
from gymjax.training.command import flag, keys_text, run_process, split_arguments, take
from pallas_kernels.nf4_linear import NF4Weight, dequantize

OWN = {
    "merge": "true (default): one model with the adapter merged in; false: the PEFT adapter folder alone",
    "overwrite": "true: write into an export_dir that is not empty",
}


def adapter_folder(config: Config) -> Path | None:
    """The adapter to export: adapter_name_or_path, else the one that training left in output_dir; None without one."""
    if config.model.adapter_name_or_path is not None:
        return Path(config.model.adapter_name_or_path)
    trained = Path(config.train.output_dir)
    return trained if "output_dir" in config.explicit and (trained / CONFIG).is_file() else None


def load_merged(config: Config, adapter: Path | None) -> LoadedModel:
    """The base in the dtype it is stored in, on the host, with an adapter added in f32 and rounded once.

    Args:
        config: what names the base, rope_scaling and cutoff_len are read; quantization_bit is not, as a merge
            goes into the 16-bit weights. A base that only exists in NF4 is dequantized first.
        adapter: PEFT folder; None leaves the base as it is.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: base and adapter do not fit together.
    """
    base = with_own_base(dataclasses.replace(config.model, quantization_bit=None), adapter)
    path = locate(base)
    # A GGUF file's weights are packed in other ways: f32 holds what they stand for.
    dtype = jnp.dtype("float32" if path.suffix == ".gguf" else stored_dtype(read_config(path)))
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        exact = Policy(param=dtype, compute=dtype, reduce=jnp.float32)
        loaded = load_base(base, exact, cutoff_len=config.data.cutoff_len)
        unpack(loaded.model, dtype)
        if adapter is not None:
            loaded = with_adapter(loaded, adapter)
            merge(loaded.model)
    return loaded


def unpack(model: Decoder, dtype: jnp.dtype) -> None:
    """Dequantizes every packed weight, in place."""
    for layer, _ in linears(model):
        w = layer.w.get_value()
        if isinstance(w, NF4Weight):
            layer.w.set_value(dequantize(w, dtype))


def export_model(config: Config, folder: Path | str) -> LoadedModel:
    """Writes a folder that transformers loads: config, weights in shards, tokenizer, chat template.

    Args:
        config: the model section; export_dtype (None: as the base is stored, 16 bits for GGUF files) and export_size.
        folder: where to.

    Returns:
        The merged model that was written.
    """
    loaded = load_merged(config, adapter_folder(config))
    save_folder(
        Path(folder),
        loaded.model,
        loaded.hf_config,
        dtype=saved_dtype(config, loaded.source),
        export_size=config.export.export_size,
        tokenizer=loaded.tokenizer,
        generation_config=loaded.generation_config or None,
    )
    return loaded


def saved_dtype(config: Config, base: Path) -> jnp.dtype:
    """Dtype of an export's weights: export_dtype, or as the base is stored, 16 bits for a GGUF file."""
    if config.export.export_dtype is not None:
        return jnp.dtype(config.export.export_dtype)
    return jnp.dtype("bfloat16" if base.suffix == ".gguf" else stored_dtype(read_config(base)))


def export_adapter(adapter: Path, folder: Path | str) -> None:
    """Copies an adapter with its tokenizer out of an output folder or a checkpoint-<step> of it.

    Raises:
        FileNotFoundError: there is no adapter.
        ValueError: it is not a LoRA adapter.
    """
    open_adapter(adapter)
    with replacing(Path(folder)) as temporary:
        for name in (CONFIG, WEIGHTS):
            shutil.copy2(adapter / name, temporary / name)
        if (adapter / "tokenizer.json").exists():
            load_tokenizer(adapter).save_pretrained(str(temporary))


def check_target(folder: Path, overwrite: bool, *, adapter: bool) -> None:
    """Refuses to mix an export, of an adapter alone or of a model, with what a folder holds.

    Raises:
        ConfigError: the folder cannot be written, is not empty without `overwrite`, or holds weights of the other kind.
    """
    check_writable("export_dir", folder)
    if not overwrite and folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(f"export_dir: {folder} is not empty; give another folder, or overwrite=true to write into it")
    check_unmixed("export_dir", folder, adapter=adapter)


def usage() -> str:
    """Text of --help."""
    return f"""
usage: python -m gymjax.export [CONFIG.yaml] export_dir=DIR [key=value ...]

Merges an adapter into its base in f32 and writes a folder that transformers loads. The adapter is adapter_name_or_path
(an output folder or a checkpoint-<step>), or else the one in output_dir; without one the base is written as it is,
which turns a GGUF file into a folder. Keys:
{keys_text(("model", "export"), OWN)}
 data: cutoff_len (with rope_scaling)   train: output_dir (its adapter, where adapter_name_or_path is not given)
"""


def main(arguments: Sequence[str]) -> None:
    """Exports and says what was written."""
    path, overrides = split_arguments(arguments)
    own, overrides = take(overrides, OWN)
    merging, overwrite = flag(own, "merge", default=True), flag(own, "overwrite")
    config = load(path, overrides)
    if config.export.export_dir is None:
        raise ConfigError("export_dir must be given: the folder to write")
    folder, adapter = Path(config.export.export_dir), adapter_folder(config)
    check_target(folder, overwrite, adapter=not merging)
    if not merging:
        if adapter is None:
            raise ConfigError("merge=false needs an adapter: give adapter_name_or_path, or the output_dir of a run")
        export_adapter(adapter, folder)
        print(f"wrote the adapter {adapter} to {folder}")
        return
    export_model(config, folder)
    merged = "as it is" if adapter is None else f"with {adapter} merged in"
    print(f"wrote {config.model.model_name_or_path} {merged} to {folder}")


if __name__ == "__main__":
    run_process(main, usage)
