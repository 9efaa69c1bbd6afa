"""From a config to everything a run needs: model, data, optimizer, mesh."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from transformers import PreTrainedTokenizerBase

from gymjax.adapters.lora import LoraSpec, attach
from gymjax.adapters.select import train_all, train_layers, train_modules
from gymjax.adapters.svd_start import SvdStart, split_weight
from gymjax.checkpoint.adapter_base import RESIDUAL, own_base
from gymjax.checkpoint.load import LoadedModel, OpenedBase, load_base, with_own_base
from gymjax.checkpoint.peft import load_adapter
from gymjax.checkpoint.weights import Split
from gymjax.config import AdapterConfig, Config
from gymjax.config.coerce import text
from gymjax.data.loader import Loader
from gymjax.data.prepare import Prepared
from gymjax.dtypes import Precision, policy
from gymjax.models.decoder import Decoder
from gymjax.models.decoder_config import DecoderConfig
from gymjax.models.names import linears
from gymjax.optim.build import build
from gymjax.training.evaluate import eval_loader
from gymjax.training.inputs import Inputs, planned_steps, precision_of
from gymjax.training.mesh import batch_shards, place_weight, shard_state
from gymjax.training.plan import Plan
from gymjax.training.step import StepSettings, TrainState, init_state, split_model

ATTENTION = {"auto": None, "fa": "mosaic_gpu", "cudnn": "cudnn", "disabled": "xla"}


@dataclasses.dataclass(frozen=True)
class Run:
    """What stays the same over a whole run.

    Attributes:
        config: resolved.
        precision: "bf16", "fp16" or "fp32".
        cfg: shape of the decoder.
        source: folder or file the base was read from.
        hf_config: the base's config.json.
        generation_config: the base's generation_config.json, empty without one.
        tokenizer: with the chat template that is trained.
        lora: adapter settings; None when base weights are trained.
        adapter_start: how the adapter's first factors were made from the base; None where they were drawn or loaded.
        given_up: those factors by PEFT's names, where saved adapters add them to the original base again; else empty.
        adapter_base: the model that a saved adapter belongs to, for its adapter_config.json.
        prepared: tokenized data and its report.
        fingerprint: of the training data, to know it again on resume.
        loader: training batches.
        eval_loader: evaluation batches, None without evaluation data.
        mesh: devices.
        graphdef: model structure.
        frozen: frozen weights on the mesh.
        optimizer: of the trained weights.
        settings: of the step.
        plan: how its memory was planned.
        total_steps: updates of the whole run.
    """

    config: Config
    precision: Precision
    cfg: DecoderConfig
    source: Path
    hf_config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    tokenizer: PreTrainedTokenizerBase
    lora: LoraSpec | None
    adapter_start: SvdStart | None
    given_up: Mapping[str, np.ndarray]
    adapter_base: str
    prepared: Prepared
    fingerprint: str
    loader: Loader
    eval_loader: Loader | None
    mesh: Mesh
    graphdef: nnx.GraphDef
    frozen: nnx.State
    optimizer: optax.GradientTransformation
    settings: StepSettings
    plan: Plan
    total_steps: int


def load_model(
    config: Config, mesh: Mesh | None = None, split: Split | None = None, opened: OpenedBase | None = None
) -> LoadedModel:
    """The base a config names, in the run's precision, packed when quantization_bit says so, spread over a mesh.

    An adapter that brought its base along (see checkpoint/adapter_base.py) gets it; `split` as in `load_decoder`,
    `opened` as in `load_base`.
    """
    return load_base(
        with_own_base(config.model, config.model.adapter_name_or_path),
        policy(precision_of(config)),
        cutoff_len=config.data.cutoff_len,
        place=None if mesh is None else functools.partial(place_weight, mesh),
        split=split,
        opened=opened,
    )


def lora_spec(adapter: AdapterConfig) -> LoraSpec:
    """Adapter settings of a config."""
    return LoraSpec(
        rank=adapter.lora_rank,
        alpha=2.0 * adapter.lora_rank if adapter.lora_alpha is None else adapter.lora_alpha,
        dropout=adapter.lora_dropout,
        targets=adapter.lora_target,
        use_rslora=adapter.use_rslora,
        use_dora=adapter.use_dora,
        rank_pattern=adapter.lora_rank_pattern,
        alpha_pattern=adapter.lora_alpha_pattern,
    )


def svd_start(config: Config) -> SvdStart | None:
    """How the adapter's first factors come from the base; None where they are drawn, or there are none."""
    adapter, seed = config.adapter, config.train.seed
    if adapter.pissa_init:
        return SvdStart("pissa", adapter.pissa_iter, seed)
    return SvdStart("loftq", adapter.loftq_iter, seed) if adapter.loftq_init else None


def adapter_base(config: Config) -> str:
    """The model that an adapter of this run belongs to, by path or name."""
    adapter, loaded = config.adapter, config.model.adapter_name_or_path
    if adapter.loftq_init or (adapter.pissa_init and not adapter.pissa_convert):
        return str(Path(config.train.output_dir) / RESIDUAL)
    own = None if loaded is None else own_base(Path(loaded))
    return config.model.model_name_or_path if own is None else str(own)


def choose_trained(
    model: Decoder, config: Config, start: Mapping[str, np.ndarray] | None = None
) -> tuple[Decoder, LoraSpec | None]:
    """Attaches adapters or marks base weights as trained, as finetuning_type says.

    Args:
        model: the base.
        config: of the run.
        start: first factors of the adapters, see `attach`.

    Returns:
        (model, its adapter settings); the model is a new one when layers had to be re-stacked.

    Raises:
        ValueError: what is to be trained does not fit the model; the message names the key.
    """
    adapter = config.adapter
    if adapter.finetuning_type == "full":
        train_all(model)
        return model, None
    if adapter.finetuning_type == "freeze":
        chosen = (adapter.freeze_trainable_layers, adapter.freeze_trainable_modules, adapter.freeze_extra_modules)
        return train_layers(model, *chosen), None
    if config.model.adapter_name_or_path:
        spec = load_adapter(model, config.model.adapter_name_or_path)
        _check_continued(config, model, spec)
        train_modules(model, adapter.additional_target, key="additional_target")
        return model, spec
    spec = lora_spec(adapter)
    attach(model, spec, key=jax.random.key(config.train.seed), start=start)
    train_modules(model, adapter.additional_target, key="additional_target")
    return model, spec


def _check_continued(config: Config, model: Decoder, spec: LoraSpec) -> None:
    """Refuses settings of an adapter that the one to go on with does not have.

    Raises:
        ValueError: naming the key and both values.
    """
    wanted = lora_spec(config.adapter)
    pairs: dict[str, tuple[Any, Any]] = {
        "lora_rank": (wanted.rank, spec.rank),
        "lora_alpha": (wanted.alpha, spec.alpha),
        "lora_dropout": (wanted.dropout, spec.dropout),
        "lora_rank_pattern": (dict(wanted.rank_pattern), dict(spec.rank_pattern)),
        "lora_alpha_pattern": (dict(wanted.alpha_pattern), dict(spec.alpha_pattern)),
        "use_rslora": (wanted.use_rslora, spec.use_rslora),
        "use_dora": (wanted.use_dora, spec.use_dora),
    }
    names = [name for _, row in linears(model) for name in row.values()]
    ours, theirs = ([name for name in names if each.is_target(name)] for each in (wanted, spec))
    if ours != theirs:
        short = dict.fromkeys(name.rsplit(".", 1)[-1] for name in theirs)
        pairs["lora_target"] = (text(wanted.targets), f"{text(list(short))} ({len(theirs)} modules, not {len(ours)})")
    for key, (given, found) in pairs.items():
        if key in config.explicit and given != found:
            raise ValueError(
                f"{key}: {text(given)}, but adapter_name_or_path: {config.model.adapter_name_or_path} has {key}: "
                f"{text(found)}; leave {key} out to go on with it"
            )


def set_up(config: Config, inputs: Inputs, plan: Plan) -> tuple[Run, TrainState]:
    """Loads and builds everything.

    Args:
        config: of the run.
        inputs: what it starts from.
        plan: what its step keeps.

    Raises:
        ValueError: data, model and config do not fit together; the message names the key or the row.
    """
    train, mesh, prepared, loader = config.train, inputs.mesh, inputs.prepared, inputs.loader
    svd, start = svd_start(config), {}
    split = None if svd is None else functools.partial(split_weight, svd, lora_spec(config.adapter), start)
    loaded = load_model(config, mesh, split, inputs.base)
    if prepared.chat_template is not None:
        loaded.tokenizer.chat_template = prepared.chat_template
    model, lora = choose_trained(loaded.model, config, start)
    total_steps = planned_steps(config, loader)
    graphdef, params, frozen = split_model(model)
    params, frozen = shard_state(mesh, params), shard_state(mesh, frozen)
    optimizer = build(config.optim, total_steps, params, lora_plus_ratio=config.adapter.loraplus_lr_ratio)
    state = init_state(params, optimizer, train.loss_scale if inputs.precision == "fp16" else None)
    eval_rows = train.per_device_eval_batch_size * batch_shards(mesh)
    evaluation = None if prepared.eval is None else eval_loader(prepared.eval, eval_rows, config.data.cutoff_len)
    run = Run(
        config=config,
        precision=inputs.precision,
        cfg=model.cfg,
        source=loaded.source,
        hf_config=loaded.hf_config,
        generation_config=loaded.generation_config,
        tokenizer=loaded.tokenizer,
        lora=lora,
        adapter_start=svd,
        given_up=start if config.adapter.pissa_convert else {},
        adapter_base=adapter_base(config),
        prepared=prepared,
        fingerprint=loader.dataset.fingerprint(),
        loader=loader,
        eval_loader=evaluation,
        mesh=mesh,
        graphdef=graphdef,
        frozen=frozen,
        optimizer=optimizer,
        settings=plan.settings,
        plan=plan,
        total_steps=total_steps,
    )
    return run, shard_state(mesh, state)


def step_settings(config: Config, *, dropout: bool, packed: bool) -> StepSettings:
    """What of the config the step depends on; what it keeps is planned."""
    return StepSettings(
        seed=config.train.seed,
        max_grad_norm=config.optim.max_grad_norm,
        attention=ATTENTION[config.model.flash_attn],
        neftune_alpha=config.train.neftune_noise_alpha or 0.0,
        moe_aux_loss_coef=config.train.moe_aux_loss_coef or 0.0,
        router_z_loss_coef=config.train.router_z_loss_coef or 0.0,
        dropout=dropout,
        packed=packed,
        fused_ops=config.model.enable_liger_kernel,
    )
