"""Models that training steps are timed and compiled with: shapes of public ones, random weights, what is trained."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from gymjax.adapters.lora import LoraSpec, attach
from gymjax.adapters.select import train_all
from gymjax.config import OptimConfig
from gymjax.models import decoder_config
from gymjax.models.decoder import Decoder
from gymjax.models.decoder_config import DecoderConfig
from gymjax.models.names import hf_weights, node_at
from gymjax.optim.build import build
from gymjax.training.compile import compiler_options
from gymjax.training.plan import Plan, choose
from gymjax.training.step import StepSettings, init_state, make_step, split_model
from gymjax.training.workload import Workload
from pallas_kernels.nf4_linear import NF4Weight

SHAPES = {
    "llama3.1-8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
    },
    "llama3.1-70b": {
        "vocab_size": 128256,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
    },
    "llama2-7b": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5,
    },
    "olmoe-1b-7b": {
        "model_type": "olmoe",
        "vocab_size": 50304,
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "rms_norm_eps": 1e-5,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
    },
    "mixtral-8x7b": {
        "model_type": "mixtral",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-5,
    },
    "smollm2-135m": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "rope_theta": 100000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
    "tiny-moe": {
        "model_type": "olmoe",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
RANK = 16


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a step is made of.

    Attributes:
        shape: one of SHAPES.
        base: "nf4" or "bf16", how the base is stored.
        finetune: "lora", adapters on every linear layer, experts' too; "full", every weight.
        optim: optimizer, "adamw" or "adamw_8bit".
        remat: what is kept for the backward pass.
        rows: of the batch.
        length: tokens a row.
        attention: implementation; None for the fastest.
        fused: whether loss, norms, rotations and gates are kernels, or plain jnp.
    """

    shape: str
    base: str
    finetune: str
    optim: Literal["adamw", "adamw_8bit"]
    remat: str
    rows: int
    length: int
    attention: str | None
    fused: bool = True

    @property
    def name(self) -> str:
        """Of a result line."""
        trained = f"r{RANK}" if self.finetune == "lora" else f"full-{self.optim}"
        name = f"{self.shape}-{self.base}-{self.rows}x{self.length}-{trained}-{self.remat}-remat"
        return name + (f"-{self.attention}" if self.attention else "") + ("" if self.fused else "-unfused")


def add_options(parser: argparse.ArgumentParser, *, attention: str | None = None) -> None:
    """Options of a setting but remat and batch, of which some scripts take several."""
    parser.add_argument("--shape", choices=SHAPES, default="llama3.1-8b")
    parser.add_argument("--base", choices=("nf4", "bf16"), default="nf4")
    parser.add_argument("--finetune", choices=("lora", "full"), default="lora")
    parser.add_argument("--optim", choices=("adamw", "adamw_8bit"), default="adamw")
    parser.add_argument("--attention", choices=("cudnn", "mosaic_gpu", "xla"), default=attention)


def setting_of(options: argparse.Namespace, batch: str, remat: str, *, fused: bool = True) -> Setting:
    """The setting that the options name; a batch is "4x2048", rows by tokens."""
    rows, length = map(int, batch.split("x"))
    chosen = options.shape, options.base, options.finetune, options.optim, remat, rows, length, options.attention
    return Setting(*chosen, fused)


def decoder_cfg(shape: str) -> DecoderConfig:
    """DecoderConfig of a shape; one that names no family is a Llama."""
    return decoder_config({"model_type": "llama", **SHAPES[shape]})


def trained_model(setting: Setting) -> Decoder:
    """A model with random weights: its base frozen below adapters, or all trained.

    Raises:
        ValueError: packed weights that are to be trained.
    """
    if setting.finetune == "full" and setting.base != "bf16":
        raise ValueError(f"--finetune full trains the base, which --base {setting.base} freezes; use --base bf16")
    model = random_model(setting.shape, setting.base)
    if setting.finetune == "full":
        train_all(model)
    else:
        attach(model, LoraSpec(rank=RANK, alpha=RANK), key=jax.random.key(1))
    return model


def planned_step(setting: Setting, limit: int | None) -> tuple[Plan, optax.GradientTransformation, Any]:
    """(plan of its memory, optimizer, jitted step that donates its state), from shapes alone, which plan.work holds.

    Args:
        setting: of the step.
        limit: bytes of the device, None where it tells none.
    """
    graphdef, params, frozen = jax.eval_shape(lambda: split_model(trained_model(setting)))
    optimizer = build(OptimConfig(learning_rate=1e-4, optim=setting.optim), 1000, params)
    state = jax.eval_shape(lambda params: init_state(params, optimizer, None), params)
    settings = StepSettings(
        seed=0, max_grad_norm=1.0, attention=setting.attention, packed=False, fused_ops=setting.fused
    )
    cfg, rows, length = decoder_cfg(setting.shape), setting.rows, setting.length
    work = Workload(cfg, graphdef, state, frozen, settings, rows, length, 1, jnp.dtype(jnp.bfloat16))
    plan = choose(work, setting.remat, limit)
    step = make_step(graphdef, optimizer, plan.settings)
    return plan, optimizer, jax.jit(step, donate_argnums=0, compiler_options=compiler_options(plan.settings))


def random_model(shape: str, base: str) -> Decoder:
    """A decoder with random weights made on the device, layer by layer, so that making it costs no extra memory."""
    cfg = decoder_cfg(shape)
    model = nnx.eval_shape(lambda: Decoder(cfg, dtype=jnp.bfloat16))
    packed = {weight.path: base == "nf4" and weight.quantizable for weight in hf_weights(cfg)}
    for i, (path, is_packed) in enumerate(packed.items()):
        variable, key = node_at(model, path), jax.random.fold_in(jax.random.key(0), i)
        shape_ = variable.get_value().shape
        if path[-1] == "scale":
            value = jnp.ones(shape_, jnp.bfloat16)
        elif path[0] != "stacks":
            value = jax.jit(_dense, static_argnums=1)(key, shape_)
        else:
            make = _packed if is_packed else _dense
            each = jax.jit(lambda keys, make=make, rest=shape_[1:]: jax.lax.map(lambda k: make(k, rest), keys))
            value = each(jax.random.split(key, shape_[0]))
        variable.set_value(value)
    return model


def _dense(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(key, shape, jnp.bfloat16) * 0.02


def _packed(key: jax.Array, shape: tuple[int, ...]) -> NF4Weight:
    """Random codes and scales of weights (*E, O, I)."""
    *leading, out_width, in_width = shape
    blocks = out_width * in_width // 64
    codes_key, absmax_key = jax.random.split(key)
    return NF4Weight(
        codes=jax.random.bits(codes_key, (*leading, out_width * in_width // 2), jnp.uint8),
        absmax=jax.random.bits(absmax_key, (*leading, blocks), jnp.uint8),
        nested_absmax=jnp.full((*leading, -(-blocks // 256)), 0.01, jnp.float32),
        offset=jnp.full(leading, 0.04, jnp.float32),
        shape=(out_width, in_width),
        dtype="bfloat16",
    )
