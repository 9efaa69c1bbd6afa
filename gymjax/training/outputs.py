"""The output folder of a run: weights that transformers and PEFT load, results, state, plots, a model card."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from flax import nnx

from gymjax.checkpoint.files import replacing
from gymjax.checkpoint.hf import save_folder, write_json
from gymjax.checkpoint.peft import save_adapter
from gymjax.config import Config, to_yaml
from gymjax.training.setup import Run


def model_with(run: Run, params: nnx.State) -> nnx.Module:
    """The run's decoder with the given trained weights."""
    return nnx.merge(run.graphdef, params, run.frozen)


def save_weights(run: Run, params: nnx.State, folder: Path) -> None:
    """Writes an adapter folder (PEFT), or a whole model folder when base weights were trained; tokenizer included."""
    model = model_with(run, params)
    tokenizer = run.loaded.tokenizer
    if run.prepared.chat_template is not None:
        tokenizer.chat_template = run.prepared.chat_template
    if run.lora is not None:
        save_adapter(folder, model, run.lora, base=run.config.model.model_name_or_path, tokenizer=tokenizer)
        return
    save_folder(
        folder,
        model,
        run.loaded.hf_config,
        dtype=run.config.export.export_dtype or "bfloat16",
        export_size=run.config.export.export_size,
        tokenizer=tokenizer,
        generation_config=run.loaded.generation_config or None,
    )


def write_results(folder: Path, metrics: dict[str, float], history: list[dict], state: dict) -> None:
    """Writes all_results.json, train_results.json, eval_results.json and trainer_state.json."""
    evaluation = {name: value for name, value in metrics.items() if name.startswith("eval_") or name == "perplexity"}
    training = {name: value for name, value in metrics.items() if name not in evaluation or name == "epoch"}
    with replacing(folder) as temporary:
        write_json(temporary / "all_results.json", metrics)
        write_json(temporary / "train_results.json", training)
        if evaluation:
            write_json(temporary / "eval_results.json", {"epoch": metrics["epoch"], **evaluation})
        write_json(temporary / "trainer_state.json", {**state, "log_history": history})


def write_config(folder: Path, config: Config) -> None:
    """Stores the resolved config as training_args.yaml, which `gymjax.train` accepts again."""
    with replacing(folder) as temporary:
        (temporary / "training_args.yaml").write_text(to_yaml(config), encoding="utf-8")


WRITTEN = ("trainer_state.json", "all_results.json", "train_results.json", "eval_results.json", "trainer_log.jsonl")


def clear_output(folder: Path) -> None:
    """Removes checkpoints and logs of an earlier run, which would mix with this one's; other files stay."""
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        if path.is_dir() and re.fullmatch(r"checkpoint-\d+", path.name):
            shutil.rmtree(path)
        elif path.name in WRITTEN:
            path.unlink()
