"""`python -m gymjax.plot OUTPUT_DIR`: draws the curves of a run."""

from __future__ import annotations

from collections.abc import Sequence

from gymjax.training.command import run_process
from gymjax.training.plotting import plot_losses, read_history

USAGE = """
usage: python -m gymjax.plot OUTPUT_DIR

Draws training_loss.png and, where the run was evaluated, training_eval_loss.png into OUTPUT_DIR, from the log_history
of its trainer_state.json (of its newest checkpoint while the run goes on). With a mixture of experts it adds
training_moe_aux_loss.png and training_expert_load.png.
"""


def main(arguments: Sequence[str]) -> None:
    """Draws the curves of one output folder."""
    if len(arguments) != 1:
        raise ValueError(f"gymjax.plot takes one argument, the output folder of a run; got {len(arguments)}")
    files = plot_losses(arguments[0], read_history(arguments[0]))
    print("\n".join(f"wrote {path}" for path in files) or f"{arguments[0]}: nothing was logged yet, nothing to draw")


if __name__ == "__main__":
    run_process(main, lambda: USAGE)
