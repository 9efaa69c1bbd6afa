"""`python -m gymjax.train CONFIG.yaml key=value ...`: fine-tunes a model."""

from __future__ import annotations

from collections.abc import Sequence

from gymjax.config import TrainConfig, load
from gymjax.training.command import flag, keys_text, run_process, split_arguments, take
from gymjax.training.mesh import start_processes
from gymjax.training.planning import show_plan
from gymjax.training.train import train

OWN = {"plan_only": "true: show what lies where, the predicted peak and the compiler's, then stop"}


def usage() -> str:
    """Text of --help."""
    return f"""
usage: python -m gymjax.train CONFIG.yaml [key=value ...]

Fine-tunes a model and leaves weights, logs and plots in output_dir. Stopped by Ctrl-C or SIGTERM it saves a checkpoint
and ends; the same command goes on from there. Keys and their defaults:
{keys_text(("model", "data", "adapter", "optim", "train"), OWN)}
"""


def stopped(train_config: TrainConfig, step: int) -> str:
    """What a run that was stopped says: how to go on, where that is possible."""
    folder = train_config.output_dir
    if train_config.save_only_model:
        where = f"{folder}/checkpoint-{step}"
        return (
            f"stopped after step {step}; {where} has its weights, but save_only_model: true kept nothing to go on from"
        )
    # overwrite_output_dir means to start anew, so there going on has to be asked for.
    how = "adding resume_from_checkpoint=true" if train_config.overwrite_output_dir else "the same command"
    return f"stopped after step {step}; {how} goes on from {folder}"


def main(arguments: Sequence[str]) -> int:
    """Loads the config, trains, and says what was left where; or only shows what training would need."""
    path, overrides = split_arguments(arguments)
    own, overrides = take(overrides, OWN)
    config = load(path, overrides)
    start_processes()
    if flag(own, "plan_only"):
        lines, fits = show_plan(config)
        print(*config.notes, *lines, sep="\n")
        return 0 if fits else 1
    result = train(config)
    folder = config.train.output_dir
    if result.interrupted:
        print(stopped(config.train, int(result.state.step)))
        return 130
    for name, value in result.metrics.items():
        print(f"{name}: {value:,.6g}")
    print(f"weights, logs and results are in {folder}")
    return 0


if __name__ == "__main__":
    run_process(main, usage)
