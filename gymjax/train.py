"""`python -m gymjax.train CONFIG.yaml key=value ...`: fine-tunes a model."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from gymjax.config import load
from gymjax.training.mesh import start_processes
from gymjax.training.train import TrainResult, train


def main(arguments: Sequence[str]) -> TrainResult:
    """Loads the config, trains, and says what was left where."""
    config = load(*split_arguments(arguments))
    start_processes()
    return train(config)


if __name__ == "__main__":
    main(sys.argv[1:])
