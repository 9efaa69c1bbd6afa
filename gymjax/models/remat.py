"""What the backward pass finds of a layer's forward pass, beside the layer's input, and what it computes again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from gymjax.config.remat import is_list
from gymjax.config.sections import KEPT_NAMES
from gymjax.nn.routing import ROUTING_NAME
from pallas_kernels.lora_linear import LOW_NAME
from pallas_kernels.rms_norm import RRMS_NAME

# Kept whatever is recomputed: at most a tenth of a layer's input. A router that ran twice could choose twice.
SMALL_NAMES = (LOW_NAME, ROUTING_NAME, RRMS_NAME)
# Attention's output and log-sum-exp get their names inside the kernels whose backward starts from them: named outside
# too, the output would be kept twice.
SAVED_NAMES = (*SMALL_NAMES, *KEPT_NAMES)
REMAT = ("none", "full", "selective", "offload")


def check(remat: str) -> None:
    """Raises ValueError where `remat` is nothing that `Decoder.trunk` knows."""
    if remat not in REMAT and not is_list(remat, SAVED_NAMES):
        names = f"{', '.join(REMAT)}, or names of {', '.join(SAVED_NAMES)} joined by commas"
        raise ValueError(f"remat must be one of {names}, not {remat!r}")


def kept_names(remat: str) -> frozenset[str]:
    """Names that a layer's forward pass keeps beside SMALL_NAMES; what "none" keeps beside them has none."""
    if remat in ("full", "offload"):
        return frozenset()
    return frozenset(KEPT_NAMES if remat in ("none", "selective") else remat.split(","))


def policy(remat: str) -> Callable[..., Any]:
    """Of `jax.checkpoint`: keeps the names."""
    return jax.checkpoint_policies.save_only_these_names(*SMALL_NAMES, *kept_names(remat))
