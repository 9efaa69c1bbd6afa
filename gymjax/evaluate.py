"""`python -m gymjax.evaluate CONFIG.yaml`: loss and perplexity of a model, adapted or not, on held-out data."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jax

from gymjax.checkpoint.files import replacing
from gymjax.checkpoint.hf import write_json
from gymjax.checkpoint.load import LoadedModel
from gymjax.config import Config, ConfigError, check_writable, load
from gymjax.data import DataReport, prepare
from gymjax.generate import load_adapted
from gymjax.training.command import keys_text, run_process, split_arguments
from gymjax.training.evaluate import evaluate
from gymjax.training.inputs import check_positions
from gymjax.training.setup import ATTENTION


def evaluate_config(config: Config, loaded: LoadedModel | None = None) -> tuple[dict[str, float], DataReport]:
    """Evaluates the model that a config names on its evaluation data.

    Args:
        config: eval_dataset, or a dataset of which val_size is held out; rows are per_device_eval_batch_size a device.
        loaded: from `load_adapted`; None loads it.

    Returns:
        ({"eval_loss", "perplexity", "eval_tokens"}, what became of the data).

    Raises:
        ConfigError: no evaluation data is named.
        ValueError: a row is longer than the model has positions.
    """
    if not config.data.eval_dataset and not config.data.val_size:
        raise ConfigError("nothing to evaluate on: give eval_dataset, or val_size to hold out a part of dataset")
    loaded = loaded or load_adapted(config)
    data = dataclasses.replace(config.data, dataset=()) if config.data.eval_dataset else config.data
    train, hub_cache = config.train, config.model.cache_dir
    prepared = prepare(data, loaded.tokenizer, stage=train.stage, seed=train.seed, hub_cache=hub_cache)
    if prepared.eval is None:
        raise ConfigError("no row is left to evaluate on; see the rows dropped in the data report")
    check_positions(loaded.model.cfg, dataclasses.replace(prepared, train=None))
    rows = config.train.per_device_eval_batch_size * jax.device_count()
    attention = ATTENTION[config.model.flash_attn]
    metrics = evaluate(loaded.model, prepared.eval, rows=rows, cutoff_len=config.data.cutoff_len, attention=attention)
    return metrics, prepared.report


def usage() -> str:
    """Text of --help."""
    return f"""
usage: python -m gymjax.evaluate [CONFIG.yaml] [key=value ...]

Prints eval_loss (mean over trained tokens), perplexity and the number of tokens; where output_dir is given, also writes
eval_results.json there. Keys:
{keys_text(("model", "data"))}
 train: stage, seed, per_device_eval_batch_size, output_dir, bf16, fp16
"""


def main(arguments: Sequence[str]) -> None:
    """Evaluates, prints, and writes eval_results.json."""
    config = load(*split_arguments(arguments))
    if "output_dir" in config.explicit:
        check_writable("output_dir", Path(config.train.output_dir))
    metrics, report = evaluate_config(config)
    for line in report.lines():
        print(line)
    print("  ".join(f"{name} {value:.6g}" for name, value in metrics.items()))
    if "output_dir" in config.explicit:
        folder = Path(config.train.output_dir)
        with replacing(folder) as temporary:
            write_json(temporary / "eval_results.json", metrics)
        print(f"wrote {folder / 'eval_results.json'}")


if __name__ == "__main__":
    run_process(main, usage)
