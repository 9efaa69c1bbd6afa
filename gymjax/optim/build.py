"""The optimizer of a run: schedule, and one transformation per label of trained weight (optax.partition)."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from optax.contrib import MuonDimensionNumbers, muon

from gymjax.config import OptimConfig
from gymjax.optim.adam8bit import scale_by_adam_8bit
from gymjax.optim.labels import labels


def warmup_steps(optim: OptimConfig, total_steps: int) -> int:
    """Steps of linear warm-up: warmup_steps, or warmup_ratio of the run rounded up, as transformers does."""
    return optim.warmup_steps or -int(-total_steps * optim.warmup_ratio // 1)


def schedule(optim: OptimConfig, total_steps: int) -> Callable[[jax.Array], jax.Array]:
    """Learning rate of update `step` (0-based), as transformers' schedulers give it.

    Linear warm-up from 0 over `warmup_steps`, then with progress p in [0, 1] over the rest: constant 1; linear 1 - p;
    cosine (1 + cos(pi p)) / 2; both of the latter scaled to end at `min_lr_ratio`.
    """
    warmup = warmup_steps(optim, total_steps)
    floor = optim.min_lr_ratio

    def learning_rate(step: jax.Array) -> jax.Array:
        progress = jnp.clip((step - warmup) / max(1, total_steps - warmup), 0.0, 1.0)
        if optim.lr_scheduler_type in ("constant", "constant_with_warmup"):
            factor = jnp.ones_like(progress)
        else:
            shape = 1 - progress if optim.lr_scheduler_type == "linear" else (1 + jnp.cos(jnp.pi * progress)) / 2
            factor = floor + (1 - floor) * shape
        return optim.learning_rate * jnp.where(step < warmup, step / max(1, warmup), factor)

    return learning_rate


def build(optim: OptimConfig, total_steps: int, trained: nnx.State, *, lora_plus_ratio: float | None = None):
    """The run's optimizer; clipping is the step's, because it also reports the norm.

    Args:
        optim: optimizer section of the config.
        total_steps: updates in the whole run.
        trained: state whose variables are `Trained`; their types choose the transformation.
        lora_plus_ratio: learning rate of LoRA's B over that of A (arXiv 2402.12354).

    Returns:
        An optax.GradientTransformation over `trained`.
    """
    labelled = labels(trained)
    present = sorted(set(jax.tree.leaves(labelled)))
    rate = schedule(optim, total_steps)

    def transformation(label: str) -> optax.GradientTransformation:
        ratio = lora_plus_ratio if lora_plus_ratio and label == "lora_b" else 1.0
        decay = 0.0 if label.endswith("/no_decay") else optim.weight_decay
        # Muon is for matrices: scales and biases, which look like some once layers and experts are stacked, take AdamW.
        name = "adamw" if optim.optim == "muon" and label.endswith("/no_decay") else optim.optim
        return OPTIMIZERS[name](optim, lambda step: ratio * rate(step), decay)

    return optax.partition({label: transformation(label) for label in present}, labelled)


def _adamw(optim: OptimConfig, rate, decay: float) -> optax.GradientTransformation:
    return optax.adamw(rate, optim.adam_beta1, optim.adam_beta2, optim.adam_epsilon, weight_decay=decay)


def _adamw_8bit(optim: OptimConfig, rate, decay: float) -> optax.GradientTransformation:
    adam = scale_by_adam_8bit(optim.adam_beta1, optim.adam_beta2, optim.adam_epsilon)
    return optax.chain(adam, optax.add_decayed_weights(decay), optax.scale_by_learning_rate(rate))


def _adafactor(optim: OptimConfig, rate, decay: float) -> optax.GradientTransformation:
    return optax.adafactor(rate, multiply_by_parameter_scale=False, weight_decay_rate=decay or None)


def _lion(optim: OptimConfig, rate, decay: float) -> optax.GradientTransformation:
    return optax.lion(rate, optim.adam_beta1, optim.adam_beta2, weight_decay=decay)


def _sgd(optim: OptimConfig, rate, decay: float) -> optax.GradientTransformation:
    return optax.chain(optax.add_decayed_weights(decay), optax.sgd(rate))


def _muon(optim: OptimConfig, rate, decay: float) -> optax.GradientTransformation:
    """Muon on matrices (all leading axes are batches of matrices), AdamW on the rest."""

    def matrices(params):
        return jax.tree.map(lambda p: MuonDimensionNumbers(p.ndim - 1, p.ndim - 2) if p.ndim > 2 else None, params)

    return muon(
        rate,
        weight_decay=decay,
        adam_b1=optim.adam_beta1,
        adam_b2=optim.adam_beta2,
        adam_weight_decay=decay,
        muon_weight_dimension_numbers=matrices,
    )


OPTIMIZERS = {
    "adamw": _adamw,
    "adamw_8bit": _adamw_8bit,
    "adafactor": _adafactor,
    "lion": _lion,
    "sgd": _sgd,
    "muon": _muon,
}
