"""Loss and perplexity over a whole dataset."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from gymjax.data.loader import Dataset, Loader
from gymjax.training.mesh import make_mesh, shard_batch
from gymjax.training.step import StepSettings, make_eval_step, split_model


def evaluate(
    model: nnx.Module, dataset: Dataset, *, rows: int, cutoff_len: int, attention: str | None = None
) -> dict[str, float]:
    """Evaluates a model that is in memory.

    Args:
        model: decoder, with or without adapters.
        dataset: tokenized conversations or documents.
        rows: of one batch.
        cutoff_len: longest row, in tokens.
        attention: flash-attention implementation.

    Returns:
        eval_loss (mean per supervised token), perplexity, eval_tokens (supervised).
    """
    graphdef, params, frozen = split_model(model)
    step = eval_step(graphdef, StepSettings(seed=0, max_grad_norm=0.0, attention=attention))
    loader = eval_loader(dataset, rows, cutoff_len)
    return run_evaluation(step, params, frozen, loader, make_mesh(-1, 1) if rows % jax.device_count() == 0 else None)


def eval_loader(dataset: Dataset, rows: int, cutoff_len: int) -> Loader:
    """Every example once, in order, padded to length buckets."""
    return Loader(dataset, rows=rows, accumulation=1, cutoff_len=cutoff_len, packing=False, seed=0, shuffle=False)


def eval_step(graphdef: nnx.GraphDef, settings: StepSettings) -> Callable:
    """The jitted step for `eval_loader`'s batches: (params, frozen, batch) -> (summed loss, weight)."""
    return jax.jit(make_eval_step(graphdef, dataclasses.replace(settings, packed=False)))


def run_evaluation(
    step: Callable, params: nnx.State, frozen: nnx.State, loader: Loader, mesh: Mesh | None
) -> dict[str, float]:
    """Sums a jitted eval step over all batches of a loader."""
    loss, weight = 0.0, 0.0
    for i in range(loader.steps_per_epoch):
        batch, _ = loader.batch(i)
        arrays: dict[str, Any] = {name: array[0] for name, array in dict[str, Any](batch).items()}
        arrays = arrays if mesh is None else shard_batch(mesh, arrays, rows_axis=0)
        batch_loss, batch_weight = jax.device_get(step(params, frozen, arrays))
        loss, weight = loss + float(batch_loss), weight + float(batch_weight)
    mean = loss / weight
    return {"eval_loss": mean, "perplexity": math.exp(min(mean, 700.0)), "eval_tokens": weight}
