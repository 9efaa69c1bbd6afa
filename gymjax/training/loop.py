"""The training loop: step, log, evaluate, save, stop."""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from gymjax.checkpoint.train_state import Checkpoints
from gymjax.config import TrainConfig, texts
from gymjax.optim.build import schedule
from gymjax.training.compile import Program, compile_program, describe_program, jit_step
from gymjax.training.evaluate import eval_step, run_evaluation
from gymjax.training.logs import ROUTER_KEYS, RunLog, Throughput
from gymjax.training.mesh import shard_batch
from gymjax.training.metrics import peak_flops, peak_memory_gib, step_flops
from gymjax.training.outputs import save_weights
from gymjax.training.setup import Run
from gymjax.training.step import TrainState

AHEAD = 2  # steps that may be in flight before the host waits


@dataclasses.dataclass
class Best:
    """The lowest evaluation loss so far, its step, and how many evaluations have passed without a lower one."""

    loss: float = float("inf")
    step: int = 0
    stale: int = 0

    def update(self, loss: float, step: int) -> None:
        """Takes in one evaluation."""
        if loss < self.loss:
            self.loss, self.step, self.stale = loss, step, 0
        else:
            self.stale += 1


@dataclasses.dataclass
class Progress:
    """Where the loop stands beyond the train state: token counts, time, pending metrics, the best evaluation."""

    total_tokens: int = 0
    total_flops: float = 0.0
    best: Best = dataclasses.field(default_factory=Best)
    pending: list[dict[str, jax.Array]] = dataclasses.field(default_factory=list)
    widths: list[int] = dataclasses.field(default_factory=list)
    paused: float = 0.0  # seconds since the last log that went to compiling, evaluating and saving
    logged_at: float = dataclasses.field(default_factory=time.perf_counter)
    profiling: bool = False

    def saved(self) -> dict:
        """What a checkpoint keeps of it."""
        return {
            "total_tokens": self.total_tokens,
            "total_flops": self.total_flops,
            "best": dataclasses.asdict(self.best),
        }

    @classmethod
    def restored(cls, saved: dict) -> Progress:
        """From `saved()` of a checkpoint."""
        return cls(saved["total_tokens"], saved["total_flops"], best=Best(**saved["best"]))


def due(when: str | None, every: float | None, step: int, steps_per_epoch: int, total: int) -> bool:
    """Whether something is due after `step` updates: by "steps" or "epoch", and at the end; never by "no" or None.

    Of `every` below 1, a share of the run, as many steps as that is, at least: the Trainer's rule.
    """
    if when in (None, "no"):
        return False
    if when == "epoch" or not every:
        every = steps_per_epoch
    return step == total or step % (math.ceil(every * total) if every < 1 else every) == 0


def stopped_early(train: TrainConfig, progress: Progress) -> bool:
    """Whether as many evaluations in a row as early_stopping_steps have brought no lower loss."""
    return train.early_stopping_steps is not None and progress.best.stale >= train.early_stopping_steps


def run_steps(
    run: Run,
    state: TrainState,
    programs: dict[tuple[int, ...], Program],
    progress: Progress,
    log: RunLog,
    checkpoints: Checkpoints,
    stop: threading.Event,
) -> tuple[TrainState, bool]:
    """Trains from state.step to the end, or to an early or requested stop.

    Args:
        run: what stays the same.
        state: before the first step; its buffers are donated.
        programs: the step by the shape of its tokens; shapes that are missing are compiled and added.
        progress: so far.
        log: of the run.
        checkpoints: of the run.
        stop: set when the run is to save and end.

    Returns:
        (state, whether a stop request ended it).

    Raises:
        FloatingPointError: a loss or gradient was not finite; nothing after the step before it was applied or saved.
    """
    train, total = run.config.train, run.total_steps
    step = jit_step(run.graphdef, run.optimizer, run.settings, state)
    evaluate = _evaluator(run)
    done = saved = int(state.step)
    early = stopped_early(train, progress)  # a run that is started again has its own ending behind it
    while done < total and not early and not stop.is_set():
        _profile(train, progress, done)
        batch, _ = run.loader.batch(done)
        shape = batch["tokens"].shape
        arrays = shard_batch(run.mesh, batch, rows_axis=1)
        if shape not in programs:
            programs[shape] = compile_program(step, state, run.frozen, arrays)
            progress.paused += programs[shape].seconds
            log.say(describe_program(programs[shape], shape))
        state, metrics = programs[shape].call(state, run.frozen, arrays)
        done += 1
        progress.pending.append(metrics)
        progress.widths.append(shape[-1])
        if len(progress.pending) > AHEAD:
            jax.block_until_ready(progress.pending[-1 - AHEAD]["loss"])
        log.advance(done)
        if done == 1 or due("steps", train.logging_steps, done, run.loader.steps_per_epoch, total):
            _log(run, progress, log, done)
        paused_from = time.perf_counter()
        if evaluate is not None and due(train.eval_strategy, train.eval_steps, done, run.loader.steps_per_epoch, total):
            _flush(run, progress, log, done)
            entry = evaluate(state)
            progress.best.update(entry["eval_loss"], done)
            log.evaluation(
                done, {"eval_loss": entry["eval_loss"], "perplexity": entry["perplexity"], "epoch": _epoch(run, done)}
            )
        early = stopped_early(train, progress)
        saving = due(train.save_strategy, train.save_steps, done, run.loader.steps_per_epoch, total)
        if saving or early or stop.is_set():
            _flush(run, progress, log, done)
            save_checkpoint(run, state, progress, log, checkpoints, done)
            saved = done
        if early:
            log.say(f"early stop: {progress.best.stale} evaluations without a loss below {progress.best.loss:.4f}")
        progress.paused += time.perf_counter() - paused_from
    _profile(train, progress, None)
    if stop.is_set() and saved != done:  # the request came between the last look at it and the loop's end
        _flush(run, progress, log, done)
        save_checkpoint(run, state, progress, log, checkpoints, done)
    return state, done < total and stop.is_set()


def save_checkpoint(
    run: Run, state: TrainState, progress: Progress, log: RunLog, checkpoints: Checkpoints, done: int
) -> None:
    """Writes checkpoint-<done>: the whole train state, what the run needs to go on, and the weights for inference."""
    meta = {
        "global_step": done,
        "epoch": _epoch(run, done),
        "max_steps": run.total_steps,
        "log_history": log.history,
        "progress": progress.saved(),
        "data": run.fingerprint,
        "config": texts(run.config),
        "rows_per_step": run.loader.rows_per_step,
        "adapter_start": None if run.adapter_start is None else run.adapter_start.describe(),
        "best_metric": progress.best.loss if progress.best.step else None,
        "best_global_step": progress.best.step or None,
    }
    protect = progress.best.step if run.config.train.load_best_model_at_end else None
    params = state.params
    if run.config.train.save_only_model:
        save_weights(run, params, checkpoints.folder(done))
        checkpoints.prune()
        return
    checkpoints.save(done, state, meta, extra=lambda folder: save_weights(run, params, folder), protect=protect)


def _evaluator(run: Run):
    if run.eval_loader is None:
        return None
    step = eval_step(run.graphdef, run.settings)
    return lambda state: run_evaluation(step, state.params, run.frozen, run.eval_loader, run.mesh)


def _epoch(run: Run, done: int) -> float:
    return round(done / run.loader.steps_per_epoch, 4)


def _log(run: Run, progress: Progress, log: RunLog, done: int) -> None:
    """Fetches the metrics of the steps since the last time, checks and records them."""
    entries = jax.device_get(progress.pending)
    broken = int(entries[-1]["broken_step"])
    if broken >= 0:
        raise FloatingPointError(_broken_message(run, broken, done))
    seconds = max(time.perf_counter() - progress.logged_at - progress.paused, 1e-9)
    tokens = sum(int(entry["tokens"]) for entry in entries)
    progress.total_tokens += tokens
    last = entries[-1]
    supervised = sum(float(entry["supervised"]) for entry in entries)
    entry = {
        "loss": sum(float(e["loss"]) * float(e["supervised"]) for e in entries) / supervised,
        "grad_norm": float(last["grad_norm"]),
        "learning_rate": float(schedule(run.config.optim, run.total_steps)(jnp.int32(done - 1))),
        "epoch": _epoch(run, done),
    }
    if "loss_scale" in last:
        entry |= {"loss_scale": float(last["loss_scale"]), "skipped_steps": int(last["skipped_steps"])}
    entry |= {key: float(np.mean([e[key] for e in entries])) for key in ROUTER_KEYS if key in last}
    peak = peak_flops()
    flops = sum(
        step_flops(run.cfg, int(e["tokens"]), width, frozen_base=run.lora is not None)
        for e, width in zip(entries, progress.widths)
    )
    progress.total_flops += flops
    throughput = Throughput(
        tokens_per_second=tokens / seconds,
        total_tokens=progress.total_tokens,
        mfu=None if peak is None else flops / seconds / peak,
        peak_memory_gib=peak_memory_gib(),
    )
    log.train(done, entry, throughput)
    progress.pending.clear()
    progress.widths.clear()
    progress.paused, progress.logged_at = 0.0, time.perf_counter()


def _flush(run: Run, progress: Progress, log: RunLog, done: int) -> None:
    if progress.pending:
        _log(run, progress, log, done)


def _broken_message(run: Run, broken: int, done: int) -> str:
    _, rows = run.loader.batch(broken)
    named = [row for row in rows if row]
    remedy = "lower learning_rate, lengthen warmup_steps, or look at those rows"
    if run.precision == "fp16":
        remedy = "use bf16: true, " + remedy
    return (
        f"step {broken + 1}: the loss or its gradient is not finite. Rows of that step: {', '.join(named)}. "
        f"Weights are those after step {broken}, nothing later was applied or saved (seen after step {done}); {remedy}"
    )


def _profile(train: TrainConfig, progress: Progress, done: int | None) -> None:
    """Starts and stops the JAX profiler around the steps that profile_steps names (1-based, both included)."""
    if train.profile_range is None:
        return
    first, last = train.profile_range
    if done is not None and done + 1 == first:
        jax.profiler.start_trace(str(Path(train.output_dir) / "profile"))
        progress.profiling = True
    elif progress.profiling and (done is None or done == last):
        jax.block_until_ready([metrics["loss"] for metrics in progress.pending])
        jax.profiler.stop_trace()
        progress.profiling = False
