"""The output folder of a run: weights that transformers and PEFT load, results, state, plots, a model card."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import jax
from flax import nnx
from jax.experimental import multihost_utils

from gymjax.checkpoint.adapter_base import RESIDUAL
from gymjax.checkpoint.files import replacing
from gymjax.checkpoint.hf import save_folder, stored_dtype, write_json
from gymjax.checkpoint.peft import save_adapter
from gymjax.config import Config, to_yaml
from gymjax.dtypes import policy
from gymjax.models.decoder import Decoder
from gymjax.training.setup import Run


def model_with(run: Run, params: nnx.State) -> Decoder:
    """The run's decoder with the given trained weights."""
    return nnx.merge(run.graphdef, params, run.frozen)


def on_host(state: nnx.State) -> nnx.State:
    """The same state; over several processes, gathered whole into each one's host memory."""
    return state if jax.process_count() == 1 else multihost_utils.process_allgather(state, tiled=True)


def save_weights(run: Run, params: nnx.State, folder: Path) -> None:
    """Writes an adapter folder (PEFT), or a whole model folder when base weights were trained; tokenizer included."""
    params, frozen = on_host(params), run.frozen if run.lora is not None else on_host(run.frozen)
    if jax.process_index():
        return
    model = nnx.merge(run.graphdef, params, frozen)
    if run.lora is not None:
        given = run.config.model
        revision = given.model_revision if run.adapter_base == given.model_name_or_path else None
        save_adapter(
            folder,
            model,
            run.lora,
            base=run.adapter_base,
            revision=revision,
            start=run.given_up,
            tokenizer=run.tokenizer,
        )
        return
    save_folder(
        folder,
        model,
        run.hf_config,
        dtype=run.config.export.export_dtype or stored_dtype(run.hf_config),
        export_size=run.config.export.export_size,
        tokenizer=run.tokenizer,
        generation_config=run.generation_config or None,
    )


def save_residual_base(run: Run, params: nnx.State, folder: Path) -> None:
    """Writes `folder`/residual_base, the weights that PiSSA or LoftQ left the base with, as they are in memory.

    Nothing where adapters belong to the original model, or to a base that an earlier run wrote.
    """
    target = folder / RESIDUAL
    if run.adapter_base != str(target):
        return
    params, frozen = on_host(params), on_host(run.frozen)
    if jax.process_index():
        return
    save_folder(
        target,
        nnx.merge(run.graphdef, params, frozen),
        run.hf_config,
        dtype=policy(run.precision).param,
        export_size=run.config.export.export_size,
        tokenizer=run.tokenizer,
        generation_config=run.generation_config or None,
        keep_packed=True,
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


def write_card(folder: Path, run: Run, metrics: Mapping[str, float]) -> None:
    """Writes README.md, the model card: what was trained from what on which data, with which result."""
    config = run.config
    base, data = config.model.model_name_or_path, ", ".join(config.data.dataset)
    method = config.adapter.finetuning_type
    if run.lora is not None:
        method = f"{'DoRA' if run.lora.use_dora else 'LoRA'}, rank {run.lora.rank}, alpha {run.lora.alpha:g}"
        method += f", started by {run.adapter_start.describe()}" if run.adapter_start is not None else ""
        method += f" over a {config.model.quantization_bit}-bit base" if config.model.quantization_bit else ""
    lines = [
        "---",
        f"base_model: {json.dumps(base)}",
        f"library_name: {'peft' if run.lora is not None else 'transformers'}",
        "tags: [gymjax]",
        "---",
        f"# {config.train.run_name or folder.name}",
        f"{base} fine-tuned on {data} ({method}).",
        "",
        *(f"- {name}: {value:.6g}" for name, value in metrics.items()),
        "",
        "training_args.yaml in this folder repeats the run: `python -m gymjax.train training_args.yaml`.",
    ]
    with replacing(folder) as temporary:
        (temporary / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


WRITTEN = ("trainer_state.json", "all_results.json", "train_results.json", "eval_results.json", "trainer_log.jsonl")


def clear_output(folder: Path) -> None:
    """Removes checkpoints, logs and the residual base of an earlier run, which this one replaces; other files stay."""
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        if path.is_dir() and re.fullmatch(rf"checkpoint-\d+|{RESIDUAL}", path.name):
            shutil.rmtree(path)
        elif path.name in WRITTEN:
            path.unlink()
