"""Fine-tuning as one function: set up, resume, train, evaluate, write the output folder."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from gymjax.checkpoint.adapter_base import RESIDUAL
from gymjax.checkpoint.train_state import Checkpoints
from gymjax.config import Config, check_output_dir, check_trainable, describe, texts
from gymjax.models.decoder import Decoder
from gymjax.training.compile import describe_program, use_compile_cache
from gymjax.training.inputs import open_inputs, planned_steps
from gymjax.training.interrupt import stop_requests
from gymjax.training.logs import RunLog
from gymjax.training.loop import Progress, run_steps
from gymjax.training.outputs import (
    clear_output,
    model_with,
    save_residual_base,
    save_weights,
    write_card,
    write_config,
    write_results,
)
from gymjax.training.plan import refuse_if_too_large
from gymjax.training.planning import compile_planned, plan_run
from gymjax.training.plotting import plot_losses
from gymjax.training.report import before_training
from gymjax.training.setup import Run, set_up
from gymjax.training.step import TrainState

# What a checkpoint's steps and weights count on: the order of the rows, and the factor of the adapter.
_FIXED = ("data_seed", "disable_shuffling", "packing", "lora_alpha", "use_rslora", "lora_alpha_pattern")
_OF_THE_START = ("output_dir", "overwrite_output_dir", "resume_from_checkpoint")


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """What training returns to a notebook.

    Attributes:
        metrics: as in all_results.json.
        history: entries of trainer_state.json's log_history.
        model: the decoder with its trained weights.
        run: what was set up: tokenizer, data, mesh, frozen weights.
        state: after the last step.
        interrupted: whether a stop request ended the run early; the same config resumes it.
    """

    metrics: dict[str, float]
    history: list[dict[str, float]]
    model: Decoder
    run: Run
    state: TrainState
    interrupted: bool


def train(config: Config) -> TrainResult:
    """Runs a whole training: everything that `python -m gymjax.train` does.

    Raises:
        ValueError: config, data, model, checkpoint or the step's memory do not fit; the message names what and the
            remedy.
        FloatingPointError: the loss or a gradient was not finite.
        OSError: the disk is full; the last checkpoint is intact.
    """
    check_trainable(config)
    folder = Path(config.train.output_dir)
    checkpoints = Checkpoints(folder, config.train.save_total_limit)
    check_output_dir(config, checkpoints.steps())
    use_compile_cache(config.train.compile_cache_dir)
    alone = jax.process_index() == 0  # of several processes, one writes files and prints
    for line in [describe(config), *config.notes] if alone else []:
        print(line)
    inputs = open_inputs(config)
    plan = plan_run(config, inputs)
    refuse_if_too_large(plan)
    _, step = checkpoint_to_resume(config, checkpoints)
    finished = step is not None and step >= planned_steps(config, inputs.loader)
    programs = {} if finished else dict([compile_planned(config, inputs, plan)])
    run, state = set_up(config, inputs, plan)
    state, progress, history, resumed = resume(run, state, checkpoints)
    start = int(state.step)
    if alone:
        if not start:
            clear_output(folder)
        write_config(folder, config)
    goes_on_here = start and not isinstance(config.train.resume_from_checkpoint, str)
    if not (goes_on_here and (folder / RESIDUAL).is_dir()):
        save_residual_base(run, state.params, folder)
    log = RunLog(
        folder,
        total_steps=run.total_steps,
        start_step=start,
        history=history,
        tensorboard=config.train.report_to == "tensorboard",
        quiet=config.train.disable_tqdm,
    )
    started = time.perf_counter()
    try:
        compiled = [describe_program(program, shape) for shape, program in programs.items()]
        for line in [*before_training(run, state), *resumed, *compiled]:
            log.say(line)
        with stop_requests() as stop:
            state, interrupted = run_steps(run, state, programs, progress, log, checkpoints, stop)
        checkpoints.wait()
        if not interrupted and config.train.load_best_model_at_end and progress.best.step:
            state = _restore_best(run, state, progress, checkpoints, log)
    finally:
        log.close()
        checkpoints.close()
    metrics = _summary(run, progress, log.history, int(state.step) - start, time.perf_counter() - started)
    if not interrupted:
        save_weights(run, state.params, folder)
    if alone:
        write_results(folder, metrics, log.history, {"global_step": int(state.step), "max_steps": run.total_steps})
        write_card(folder, run, metrics)
        if config.train.plot_loss:
            plot_losses(folder, log.history)
    return TrainResult(metrics, log.history, model_with(run, state.params), run, state, interrupted)


def checkpoint_to_resume(config: Config, checkpoints: Checkpoints) -> tuple[Checkpoints, int | None]:
    """(where it lies, its step) of the checkpoint that a run goes on from; a step of None where it starts afresh.

    Raises:
        ValueError: the config names a folder that is no checkpoint.
    """
    wanted = config.train.resume_from_checkpoint
    if isinstance(wanted, str):
        path = Path(wanted).absolute()
        name = re.fullmatch(r"checkpoint-(\d+)", path.name)
        if name is None:
            raise ValueError(f"resume_from_checkpoint: {wanted} is not named checkpoint-<step>")
        return Checkpoints(path.parent), int(name[1])
    afresh = wanted is False or (wanted is None and config.train.overwrite_output_dir)
    return checkpoints, None if afresh else checkpoints.latest()


def resume(run: Run, state: TrainState, checkpoints: Checkpoints) -> tuple[TrainState, Progress, list[dict], list[str]]:
    """Continues from the checkpoint that the config asks for, or from the newest one of the output folder.

    Returns:
        (state, progress, log history, lines to print).

    Raises:
        ValueError: the checkpoint is damaged or belongs to other data, model or settings.
        FileNotFoundError: the named checkpoint is not there.
    """
    source, step = checkpoint_to_resume(run.config, checkpoints)
    if step is None:
        return state, Progress(), [], []
    state, meta = source.restore(step, state)
    if meta["data"] != run.fingerprint:
        raise ValueError(
            f"{source.folder(step)} was trained on other data (or another template, tokenizer, cutoff_len, seed) than "
            f"dataset: {', '.join(run.config.data.dataset)} now gives; resume with the same data, or start in another "
            "output_dir"
        )
    start = None if run.adapter_start is None else run.adapter_start.describe()
    if meta.get("adapter_start") != start:
        raise ValueError(
            f"{source.folder(step)} trains an adapter that was started by {meta.get('adapter_start') or 'lora'}, the "
            f"configuration says {start or 'lora'}: base and adapter would not belong together; resume with the keys "
            "(pissa_init, pissa_iter, loftq_init, loftq_iter, seed) that it was started with, or start in another "
            "output_dir"
        )
    lines = [f"resumed from {source.folder(step)}", *_changes(run, source.folder(step), meta)]
    return state, Progress.restored(meta["progress"]), meta["log_history"], lines


def _changes(run: Run, folder: Path, meta: Mapping[str, Any]) -> list[str]:
    """Lines for the settings that are not those of the checkpoint.

    Raises:
        ValueError: rows would be left out or repeated, or the adapter would jump.
    """
    saved, now = meta.get("config", {}), texts(run.config)
    changed = [key for key in now if key not in _OF_THE_START and saved.get(key, now[key]) != now[key]]
    wrong = [f"{key}: {saved[key]}, not {now[key]}" for key in changed if key in _FIXED]
    if run.loader.packing and "cutoff_len" in changed:
        wrong.append(f"cutoff_len: {saved['cutoff_len']}, not {now['cutoff_len']}, with packing")
    rows = run.loader.rows_per_step
    before = meta.get("rows_per_step", rows)
    if rows != before:
        wrong.append(
            f"{before} rows a step, not {rows} (per_device_train_batch_size x devices x gradient_accumulation_steps)"
        )
    if wrong:
        raise ValueError(
            f"{folder} was trained with {'; '.join(wrong)}: rows would be left out or repeated, or the adapter would "
            "be another one; resume with those settings, or start in another output_dir"
        )
    return [f"resumed with {key}: {now[key]}, until then {saved[key]}" for key in changed]


def _restore_best(run: Run, state: TrainState, progress: Progress, checkpoints: Checkpoints, log: RunLog) -> TrainState:
    best, _ = checkpoints.restore(progress.best.step, state)
    log.say(f"loaded the best weights: checkpoint-{progress.best.step}, eval_loss {progress.best.loss:.4f}")
    return dataclasses.replace(state, params=best.params)


def _summary(run: Run, progress: Progress, history: list[dict], steps: int, seconds: float) -> dict[str, float]:
    """Entries of all_results.json, in transformers' names."""
    rows = run.loader.rows_per_step
    losses = [entry["loss"] for entry in history if "loss" in entry]
    evaluations = [entry for entry in history if "eval_loss" in entry]
    metrics = {
        "epoch": history[-1]["epoch"] if history else 0.0,
        "train_loss": sum(losses) / max(1, len(losses)),
        "train_runtime": round(seconds, 4),
        "train_samples_per_second": round(steps * rows / seconds, 3),
        "train_steps_per_second": round(steps / seconds, 3),
        "num_input_tokens_seen": progress.total_tokens,
        "total_flos": progress.total_flops,
    }
    if evaluations:
        metrics |= {"eval_loss": evaluations[-1]["eval_loss"], "perplexity": evaluations[-1]["perplexity"]}
    return metrics
