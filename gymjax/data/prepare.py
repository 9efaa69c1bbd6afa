"""From the data section of a config to tokenized datasets: the one entry that training, evaluation and preview use."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from gymjax.config import DataConfig
from gymjax.data import cache
from gymjax.data.build import build
from gymjax.data.chat import Encoder
from gymjax.data.errors import DataError
from gymjax.data.loader import Dataset
from gymjax.data.report import DataReport
from gymjax.data.sources import Source, resolve
from gymjax.data.template import chat_template

STAGES = ("sft", "pt")
# Settings that change tokens or weights; the template, the sources and the seed join them in the cache key.
KEYED = (
    "default_system", "cutoff_len", "max_samples", "val_size", "train_on_prompt", "mask_history", "mix_strategy",
    "interleave_probs",
)  # fmt: skip


@dataclass(frozen=True)
class Prepared:
    """Tokenized data.

    Attributes:
        train: None where `dataset` is not set.
        eval: None without val_size and eval_dataset.
        report: counts, drops and notes; print report.lines().
        packing: as the config says, and where it does not, True in stage pt.
        chat_template: the template in force, to save beside the weights; None without one.
    """

    train: Dataset | None
    eval: Dataset | None
    report: DataReport
    packing: bool
    chat_template: str | None


def prepare(
    data_config: DataConfig,
    tokenizer: Any,
    *,
    stage: str = "sft",
    seed: int = 0,
    cache_dir: str | Path | None = None,
    hub_cache: str | None = None,
) -> Prepared:
    """Read, split, mix, render and tokenize the data of a run.

    Args:
        data_config: see DataConfig.
        tokenizer: a Hugging Face fast tokenizer.
        stage: "sft" (turns, prompt and completion, text) or "pt" (text only, long documents in several pieces).
        seed: of sampling, splitting and mixing.
        cache_dir: where tokenized data is kept; None keeps nothing.
        hub_cache: where downloads from the hub go; None for huggingface_hub's own place.

    Raises:
        DataError: something in the data or its description must change; says what and where.
    """
    _check_settings(data_config, tokenizer, stage)
    sources, held_out = (
        resolve(names, data_config.dataset_dir, key=key, hub_cache=hub_cache) if names else []
        for key, names in (("dataset", data_config.dataset), ("eval_dataset", data_config.eval_dataset))
    )
    encoder, notes = _encoder(data_config, tokenizer, stage)
    packing = stage == "pt" if data_config.packing is None else data_config.packing
    text = encoder.template.text if encoder.template else None
    path = None
    if cache_dir is not None:
        key = _cache_key(data_config, encoder, stage, seed, sources, held_out)
        path = Path(cache_dir) / f"tokenized-{key[:32]}.safetensors"
    if path is not None and not data_config.overwrite_cache:
        try:
            train, evaluation, report = cache.load(path)
            report.notes += [*notes, f"tokenized data read from {path} (overwrite_cache: true makes it again)"]
            return Prepared(train, evaluation, report, packing, text)
        except cache.CacheMiss as miss:
            notes += [f"cache rebuilt: {miss}"] if miss.corrupt else []
    train, evaluation, report = build(data_config, encoder, stage, seed, sources, held_out)
    if path is not None:
        try:
            cache.save(path, train, evaluation, report)
        except (OSError, SafetensorError) as error:
            raise DataError(
                f"tokenized_path: {path.parent} cannot be written ({error}); give a folder that can, with space for it"
            ) from error
    report.notes += notes
    return Prepared(train, evaluation, report, packing, text)


def _check_settings(config: DataConfig, tokenizer: Any, stage: str) -> None:
    if stage not in STAGES:
        raise DataError(f"stage must be one of {', '.join(STAGES)} for now, found {stage!r}")
    if not config.dataset and not config.eval_dataset:
        raise DataError("dataset is not set; give a path, a folder, a name of dataset_info.json or a hub id")
    if config.eval_dataset and config.val_size:
        raise DataError(f"eval_dataset is set, so val_size must be 0, found {config.val_size:g}; remove one of them")
    if config.val_size < 0 or (config.val_size > 1 and config.val_size != int(config.val_size)):
        raise DataError(f"val_size must be a share below 1 or a whole number of rows, found {config.val_size:g}")
    if config.cutoff_len < 2:
        raise DataError(f"cutoff_len must be at least 2, found {config.cutoff_len}")
    if config.train_on_prompt and config.mask_history:
        raise DataError("train_on_prompt trains every token and mask_history only the last answer; set one of them")
    if not getattr(tokenizer, "is_fast", False):
        raise DataError("the tokenizer has no character offsets; use a fast tokenizer (a folder with tokenizer.json)")


def _encoder(config: DataConfig, tokenizer: Any, stage: str) -> tuple[Encoder, list[str]]:
    """Return the encoder, and notes. A tokenizer without a template will do for data without turns."""
    flags = (config.train_on_prompt, config.mask_history, config.default_system)
    if stage == "pt" or (config.template is None and not tokenizer.chat_template):
        return Encoder(tokenizer, None, *flags), []
    template, notes = chat_template(tokenizer, config.template)
    return Encoder(tokenizer, template, *flags), notes


def _cache_key(
    config: DataConfig, encoder: Encoder, stage: str, seed: int, sources: list[Source], held_out: list[Source]
) -> str:
    every = [*sources, *held_out]
    drawn = config.val_size or config.mix_strategy != "concat" or any(source.num_samples for source in every)
    settings = {
        **{name: getattr(config, name) for name in KEYED},
        "stage": stage,
        "template": encoder.template.text if encoder.template else None,
        "described": [
            [s.formatting, s.columns, s.tags, s.num_samples, s.part, [str(f) for f in s.files]] for s in every
        ],
        "held_out": len(held_out),
        "seed": seed if drawn else None,
    }
    return cache.cache_key([file for source in every for file in source.files], encoder.tokenizer, settings)
