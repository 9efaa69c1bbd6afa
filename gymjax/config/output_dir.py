"""What must hold before a run starts: data to train on, and an output folder that nothing is lost in."""

import os
import re
from collections.abc import Collection
from pathlib import Path

from gymjax.config.sections import Config
from gymjax.config.source import ConfigError

_CHECKPOINT = re.compile(r"checkpoint-\d+")
_ADAPTER = ("adapter_config.json",)
_MODEL = ("model.safetensors", "model.safetensors.index.json")


def check_trainable(config: Config) -> None:
    """Refuse a configuration that loads and has nothing to train.

    Raises:
        ConfigError: no dataset, do_train: false, or another start for an adapter that has one.
    """
    if not config.data.dataset:
        raise ConfigError("dataset must be given: a name in dataset_info.json, a file, a folder or a hub id")
    if not config.train.do_train:
        raise ConfigError("do_train: false, but gymjax.train always trains; to evaluate run python -m gymjax.evaluate")
    for key in ("pissa_init", "loftq_init"):
        if config.model.adapter_name_or_path and getattr(config.adapter, key):
            raise ConfigError(
                f"{key}: true would start adapter_name_or_path: {config.model.adapter_name_or_path} anew; take one of "
                "them out"
            )


def check_output_dir(config: Config, resumable: Collection[int]) -> None:
    """Refuse an output folder whose contents the run would mix with its own.

    A folder is good when it is missing or empty, with overwrite_output_dir (the run starts anew), with checkpoints to
    resume from, or with the path of a checkpoint in resume_from_checkpoint.

    Args:
        config: of the run.
        resumable: steps of the folder's checkpoints that hold a train state; other checkpoint-<step> folders are
            somebody's weights.

    Raises:
        ConfigError: the folder holds something else or cannot be written, or the checkpoint that was asked for is not
            there.
    """
    folder = Path(config.train.output_dir)
    resume = config.train.resume_from_checkpoint
    check_writable("output_dir", folder)
    contents = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    stateless = [name for name in contents if _CHECKPOINT.fullmatch(name)] if not resumable else []
    if isinstance(resume, str):
        if not Path(resume).is_dir():
            raise ConfigError(f"resume_from_checkpoint: {resume} is no folder; give a checkpoint-<step> folder")
        return
    without = f" (no train state of gymjax is in {', '.join(stateless[:3])})" if stateless else ""
    if resume is True and not resumable:
        raise ConfigError(
            f"resume_from_checkpoint: true, but output_dir: {folder} has no checkpoint-<step> folder to go on from"
            f"{without}; give its path, or leave resume_from_checkpoint out to start anew"
        )
    may_resume = resume is True or (resume is None and resumable)
    if contents and not may_resume and not config.train.overwrite_output_dir:
        raise ConfigError(
            f"output_dir: {folder} is not empty (it has {', '.join(contents[:3])}{', ...' if contents[3:] else ''})"
            f"{without}; give another folder, set overwrite_output_dir: true to start anew, or continue a run with"
            " resume_from_checkpoint"
        )
    if config.train.overwrite_output_dir and resume is not True:
        _check_overwriting(config, folder)


def check_writable(key: str, folder: Path) -> None:
    """Refuse a folder that cannot be written, before what goes there is computed.

    Raises:
        ConfigError: it is a file, or lies in one, or the system does not allow it.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{key}: {folder} is a file; give a folder")
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"{key}: {folder} cannot be written, {existing} does not allow it; give another folder")


def check_unmixed(key: str, folder: Path, *, adapter: bool) -> None:
    """Refuse a folder where an adapter would come to lie beside a model, or a model beside an adapter.

    Raises:
        ConfigError: naming the files that are there.
    """
    writes, others = ("an adapter", _MODEL) if adapter else ("a model", _ADAPTER)
    stale = [name for name in others if (folder / name).exists()]
    if stale:
        raise ConfigError(
            f"{key}: {folder} holds {', '.join(stale)} and this run writes {writes}, which leaves that there: "
            "transformers would take them together; remove it, or give another folder"
        )


def _check_overwriting(config: Config, folder: Path) -> None:
    """Refuse to start anew in a folder that the run reads from, or whose weights its own would not replace."""
    for key in ("model_name_or_path", "adapter_name_or_path"):
        source = getattr(config.model, key)
        if source and Path(source).exists() and Path(source).resolve().is_relative_to(folder.resolve()):
            raise ConfigError(
                f"{key}: {source} lies in output_dir: {folder}, which overwrite_output_dir: true clears; give another "
                "output_dir"
            )
    check_unmixed("output_dir", folder, adapter=config.adapter.finetuning_type == "lora")
