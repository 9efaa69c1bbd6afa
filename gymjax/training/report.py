"""What a run says before it trains: what is trained, on what data, through which kernels, in how much memory."""

from __future__ import annotations

import math

import jax
from flax import nnx

import pallas_kernels.flash_attention as flash
import pallas_kernels.grouped_matmul as grouped_matmul
from gymjax.dtypes import policy
from gymjax.models.decoder_config import DecoderConfig
from gymjax.models.names import hf_weights, linears
from gymjax.optim.labels import Trained
from gymjax.training.metrics import linear_weights
from gymjax.training.outputs import model_with
from gymjax.training.plan import describe
from gymjax.training.setup import Run
from gymjax.training.step import TrainState


def parameter_counts(run: Run, state: TrainState) -> tuple[int, int]:
    """(all, trained) numbers of weights; packed weights count as what they stand for."""
    trained = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    base = sum(math.prod(weight.shape) for weight in hf_weights(run.cfg))
    layers = linears(model_with(run, state.params))
    attached = [nnx.state(layer.adapter, Trained) for layer, _ in layers if layer.adapter is not None]
    added = sum(leaf.size for leaf in jax.tree.leaves(attached))
    return base + added, trained


def explain_attention(run: Run, width: int) -> str:
    """Which attention implementation the step runs for rows of `width` tokens."""
    cfg, dtype = run.cfg, policy(run.precision).compute
    q = jax.ShapeDtypeStruct((run.loader.rows, width, cfg.heads, cfg.head_dim), dtype)
    k = jax.ShapeDtypeStruct((run.loader.rows, width, cfg.kv_heads, cfg.head_dim), dtype)
    if run.settings.attention is not None:
        return f"flash_attention: {run.settings.attention}, as flash_attn says"
    options = {"scale": cfg.attn_scale, "softcap": cfg.attn_softcap, "sinks": cfg.attn_sinks}
    return flash.explain(q, k, packed=run.settings.packed, **options)


def explain_experts(run: Run, width: int) -> str:
    """Which implementation of grouped products the step runs for rows of `width` tokens; nothing for a dense model."""
    experts, dtype = run.cfg.experts, policy(run.precision).compute
    if experts is None:
        return ""
    x = jax.ShapeDtypeStruct((run.loader.rows * width * experts.top_k, run.cfg.width), dtype)
    w = jax.ShapeDtypeStruct((experts.experts, experts.ffn_width, run.cfg.width), dtype)
    return f"; {grouped_matmul.explain(x, w)}"


def _experts(cfg: DecoderConfig) -> list[str]:
    """What a mixture of experts is made of; nothing for a dense model."""
    if cfg.experts is None:
        return []
    return [
        f"experts: {cfg.experts.experts} in each of {cfg.sparse_layers} layers, {cfg.experts.top_k} a token; "
        f"a token meets {linear_weights(cfg):,} weights"
    ]


def before_training(run: Run, state: TrainState) -> list[str]:
    """Lines to print before the first step."""
    train = run.config.train
    every, trained = parameter_counts(run, state)
    rows = run.loader.rows_per_step
    return [
        *run.prepared.report.lines(),
        f"model: {run.source}, {run.cfg.layers} layers, {every:,} parameters, {trained:,} trained"
        f" ({trained / every:.2%})",
        *_experts(run.cfg),
        f"precision: {run.precision}, trained weights and optimizer state f32",
        f"kernels: {explain_attention(run, run.loader.buckets[-1])}{explain_experts(run, run.loader.buckets[-1])}",
        *describe(run.plan),
        f"steps: {run.total_steps} of {rows} rows ({train.per_device_train_batch_size} a device x"
        f" {run.loader.rows // train.per_device_train_batch_size} devices x {run.loader.accumulation} accumulated),"
        f" {run.loader.steps_per_epoch} an epoch",
    ]
