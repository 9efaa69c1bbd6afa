"""One optimizer update as a pure function, and the loss it minimises."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

from gymjax.losses.sft import sft_loss
from gymjax.nn.routing import RouterStats
from gymjax.optim.labels import Trained
from gymjax.training import loss_scale as scaling
from gymjax.training.router import router_loss, router_metrics

Batch = Mapping[str, Array]
Metrics = dict[str, Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a step changes, and so everything that a checkpoint holds.

    Attributes:
        step: () int32, updates done, skipped ones included.
        params: the model's `Trained` variables, f32.
        opt_state: the optimizer's.
        loss_scale: fp16 only.
        broken_step: () int32, first step whose loss or gradient was not finite, -1 so far; from it on nothing changes.
    """

    step: Int[Array, ""]
    params: nnx.State
    opt_state: optax.OptState
    loss_scale: scaling.LossScale | None
    broken_step: Int[Array, ""]


@dataclasses.dataclass(frozen=True)
class StepSettings:
    """What of the config the step depends on.

    Attributes:
        seed: randomness of dropout and noise; the step number is folded in, so that resuming needs no state.
        max_grad_norm: global norm above which gradients are scaled down; 0 turns clipping off.
        remat: activation rematerialisation, see Decoder.trunk.
        attention: flash-attention implementation, None for the fastest.
        neftune_alpha: scale of the noise on embeddings (arXiv 2310.05914); 0 turns it off.
        dropout: whether adapters drop inputs, so that keys are threaded only where they are used.
        packed: whether rows hold several documents. Where they do not, causality alone keeps every token from the
            padding at its right, and attention needs no segments.
        moe_aux_loss_coef: of the routers' load-balancing loss.
        router_z_loss_coef: of the routers' z-loss.
        fused_ops: whether loss, norms, rotations and gates are kernels with gradients of their own, or plain jnp.
    """

    seed: int
    max_grad_norm: float
    remat: str = "none"
    attention: str | None = None
    neftune_alpha: float = 0.0
    dropout: bool = False
    packed: bool = True
    moe_aux_loss_coef: float = 0.0
    router_z_loss_coef: float = 0.0
    fused_ops: bool = True


def split_model(model: nnx.Module) -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
    """(structure, trained variables, frozen variables) of a model."""
    graphdef, params, frozen = nnx.split(model, Trained, ...)
    return graphdef, params, frozen


def init_state(
    params: nnx.State, optimizer: optax.GradientTransformation, initial_loss_scale: float | None
) -> TrainState:
    """The state before the first step."""
    scale = None if initial_loss_scale is None else scaling.initial(initial_loss_scale)
    return TrainState(jnp.int32(0), params, optimizer.init(params), scale, jnp.int32(-1))


def batch_loss(
    model, batch: Batch, settings: StepSettings, key: jax.Array | None
) -> tuple[Float[Array, ""], RouterStats | None]:
    """Summed loss of one microbatch and, while training a mixture of experts, its routers' statistics without padding.

    `key` None means evaluation: no dropout, no noise, no statistics.

    Args:
        model: decoder.
        batch: tokens, targets, segment_ids, positions (B, T) int32, loss_weights (B, T) f32.
        settings: of the step.
        key: randomness of this microbatch.
    """
    x_BTD = model.embed_tokens(batch["tokens"])
    dropout_key = None
    if key is not None:
        noise_key, dropout_key = jax.random.split(key)
        if settings.neftune_alpha:
            x_BTD = _neftune(x_BTD, batch["segment_ids"], settings.neftune_alpha, noise_key)
    hidden_BTD, stats = model.trunk(
        x_BTD,
        positions_BT=batch["positions"],
        segment_ids_BT=batch["segment_ids"] if settings.packed else None,
        key=dropout_key if settings.dropout else None,
        remat="none" if key is None else settings.remat,
        attention=settings.attention,
        counted_BT=None if key is None else batch["segment_ids"] != 0,
        fused_ops=settings.fused_ops,
    )
    adapted_head = model.head is not None and model.head.adapter is not None
    frozen_head = not adapted_head and not isinstance(model.head_variable(), Trained)
    loss = sft_loss(
        hidden_BTD,
        model.head_weight(),
        batch["targets"],
        batch["loss_weights"],
        frozen_head=frozen_head,
        logit_scale=model.cfg.logit_scale,
        logit_softcap=model.cfg.logit_softcap,
        fused_ops=settings.fused_ops,
    )
    return loss, stats


def _neftune(x_BTD: Array, segment_ids_BT: Array, alpha: float, key: jax.Array) -> Array:
    """Adds uniform noise of magnitude alpha / sqrt(length * D) to every token (arXiv 2310.05914, algorithm 1)."""
    length_B1 = jnp.sum(segment_ids_BT != 0, axis=1, keepdims=True)
    bound_B11 = alpha * jax.lax.rsqrt(jnp.maximum(length_B1, 1) * float(x_BTD.shape[-1]))[..., None]
    noise = jax.random.uniform(key, x_BTD.shape, jnp.float32, -1.0, 1.0) * bound_B11
    return x_BTD + jnp.where(segment_ids_BT[..., None] != 0, noise, 0.0).astype(x_BTD.dtype)


class _Totals(NamedTuple):
    """Of the global batch, what a microbatch's loss needs.

    Attributes:
        scale: of the loss, with fp16.
        factor: scale over the weight of supervised tokens.
        tokens: without padding.
        counts: (L, E), tokens sent to each expert; None: the microbatch is the whole batch, and they are its own.
    """

    scale: Array
    factor: Array
    tokens: Array
    counts: Array | None


def make_step(
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    settings: StepSettings,
    loss_fn: Callable = batch_loss,
) -> Callable[[TrainState, nnx.State, Batch], tuple[TrainState, Metrics]]:
    """The update function, to be jitted with the state donated.

    Its batch has a leading accumulation axis A: a scan sums gradients over the A microbatches in f32, and the sum is
    divided once by the weight of all supervised tokens, so that how a batch is cut into microbatches or spread over
    devices never changes the update. That holds for the routers' losses too. The load-balancing loss is a product of
    two sums over the whole batch, the tokens that each expert gets and the probabilities; the gradient of a
    microbatch's probabilities needs the former, so that with it and several microbatches a first scan counts: a forward
    pass more, without the head, beside the three or four that a step with full rematerialisation amounts to. Nothing is
    added where there is one microbatch or no such loss.

    Returns:
        step(state, frozen, batch) -> (state, metrics); metrics are loss (mean per supervised token), grad_norm (before
        clipping), tokens (not padding), supervised (weight of trained tokens), broken_step (see TrainState), with fp16
        loss_scale and skipped_steps, and with experts those of `router_metrics`.
    """

    def loss(params, frozen, microbatch, key, totals: _Totals):
        value, stats = loss_fn(nnx.merge(graphdef, params, frozen), microbatch, settings, key)
        nll = totals.factor * value
        if stats is None:
            return nll, (nll, None)
        coefficients = {"balance": settings.moe_aux_loss_coef, "z": settings.router_z_loss_coef}
        counts = stats.counts if totals.counts is None else totals.counts
        return nll + totals.scale * router_loss(stats, counts, totals.tokens, **coefficients), (nll, stats)

    def step(state: TrainState, frozen: nnx.State, batch: Batch) -> tuple[TrainState, Metrics]:
        supervised, tokens = jnp.sum(batch["loss_weights"]), jnp.sum(batch["segment_ids"] != 0)
        scale = jnp.float32(1) if state.loss_scale is None else state.loss_scale.scale
        totals = _Totals(scale, scale / jnp.maximum(supervised, 1e-8), tokens, None)
        key = jax.random.fold_in(jax.random.key(settings.seed), state.step)

        def count(_, scanned):
            index, microbatch = scanned
            model = nnx.merge(graphdef, state.params, frozen)
            return None, loss_fn(model, microbatch, settings, jax.random.fold_in(key, index))[1].counts

        def accumulate(total, scanned):
            index, microbatch = scanned
            gradient = jax.value_and_grad(loss, has_aux=True)
            (value, (nll, stats)), grads = gradient(
                state.params, frozen, microbatch, jax.random.fold_in(key, index), totals
            )
            return jax.tree.map(jnp.add, total, (value, nll, grads)), stats

        accumulation = batch["tokens"].shape[0]
        zero = (jnp.float32(0), jnp.float32(0), jax.tree.map(jnp.zeros_like, state.params))
        if accumulation == 1:
            (value, nll, grads), stats = accumulate(zero, (0, jax.tree.map(lambda leaf: leaf[0], batch)))
        else:
            scanned = jnp.arange(accumulation), batch
            if settings.moe_aux_loss_coef:
                totals = totals._replace(counts=jnp.sum(jax.lax.scan(count, None, scanned)[1], axis=0))
            (value, nll, grads), stats = jax.lax.scan(accumulate, zero, scanned)
            stats = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), stats)
        value, nll, grads = value / scale, nll / scale, jax.tree.map(lambda grad: grad / scale, grads)
        norm = optax.tree.norm(grads)
        finite = jnp.isfinite(value) & jnp.isfinite(norm)
        state = _update(state, grads, norm, finite, optimizer, settings.max_grad_norm)
        metrics = {"loss": nll, "grad_norm": norm, "supervised": supervised, "broken_step": state.broken_step}
        metrics["tokens"] = tokens
        if state.loss_scale is not None:
            metrics |= {"loss_scale": state.loss_scale.scale, "skipped_steps": state.loss_scale.skipped}
        return state, metrics if stats is None else metrics | router_metrics(stats, tokens)

    return step


def _update(state: TrainState, grads, norm, finite, optimizer, max_grad_norm: float) -> TrainState:
    """Applies clipped gradients where they are finite and nothing broke before; else keeps weights and optimizer."""
    if max_grad_norm:
        clip = jnp.minimum(1.0, max_grad_norm / (norm + 1e-6))
        grads = jax.tree.map(lambda grad: grad * clip, grads)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    apply = finite & (state.broken_step < 0)
    params, opt_state = jax.tree.map(
        lambda new, old: jnp.where(apply, new, old), (params, opt_state), (state.params, state.opt_state)
    )
    broken, loss_scale = ~finite, state.loss_scale
    if loss_scale is not None:
        broken, loss_scale = scaling.exhausted(loss_scale, finite), scaling.adjust(loss_scale, finite)
    broken_step = jnp.where((state.broken_step < 0) & broken, state.step, state.broken_step)
    return TrainState(state.step + 1, params, opt_state, loss_scale, broken_step)


def make_eval_step(graphdef: nnx.GraphDef, settings: StepSettings, loss_fn: Callable = batch_loss):
    """eval_step(params, frozen, batch) -> (summed loss, weight of supervised tokens) of one microbatch (B, T)."""

    def eval_step(params: nnx.State, frozen: nnx.State, batch: Batch) -> tuple[Array, Array]:
        loss, _ = loss_fn(nnx.merge(graphdef, params, frozen), batch, settings, None)
        return loss, jnp.sum(batch["loss_weights"])

    return eval_step
