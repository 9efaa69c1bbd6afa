"""What a run starts from, before a weight is read: devices, the base's files, tokenized data and its batches."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import jax
from jax.sharding import Mesh

from gymjax.checkpoint.hf import stored_dtype
from gymjax.checkpoint.load import OpenedBase, open_base, with_own_base
from gymjax.config import Config
from gymjax.data.loader import Loader
from gymjax.data.prepare import Prepared, prepare
from gymjax.dtypes import Precision, resolve_precision
from gymjax.models.decoder_config import DecoderConfig
from gymjax.training.mesh import batch_shards, make_mesh


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What a run starts from.

    Attributes:
        mesh: devices.
        precision: "bf16", "fp16" or "fp32".
        base: the opened base model.
        prepared: tokenized data and its report.
        loader: training batches.
    """

    mesh: Mesh
    precision: Precision
    base: OpenedBase
    prepared: Prepared
    loader: Loader


def open_inputs(config: Config) -> Inputs:
    """Opens and checks what a run starts from, in the order in which mistakes are cheapest to find.

    Raises:
        ValueError: data, model and config do not fit together; the message names the key or the row.
        FileNotFoundError: a file is not there.
    """
    train = config.train
    mesh = make_mesh(train.dp_size, train.fsdp_size)
    base = open_base(with_own_base(config.model, config.model.adapter_name_or_path), cutoff_len=config.data.cutoff_len)
    check_experts(config, base.cfg)
    if config.adapter.finetuning_type != "lora" and config.export.export_dtype is None:
        stored_dtype(base.hf_config)  # a whole model is saved in this
    prepared = prepare_data(config, base.tokenizer)
    if prepared.train is None:
        raise ValueError("dataset must be given: a name in dataset_info.json, a file, a folder or a hub id")
    check_positions(base.cfg, prepared)
    loader = Loader(
        prepared.train,
        train.per_device_train_batch_size * batch_shards(mesh),
        accumulation=train.gradient_accumulation_steps,
        cutoff_len=config.data.cutoff_len,
        packing=prepared.packing,
        seed=train.seed if train.data_seed is None else train.data_seed,
        shuffle=not config.data.disable_shuffling,
    )
    return Inputs(mesh, precision_of(config), base, prepared, loader)


def check_positions(cfg: DecoderConfig, prepared: Prepared) -> None:
    """Refuses rows that reach beyond the positions that the model is made for.

    Raises:
        ValueError: naming the longest row.
    """
    for data in (prepared.train, prepared.eval):
        if data is not None and data.lengths.max() > cfg.max_positions:
            longest = int(data.lengths.argmax())
            raise ValueError(
                f"{data.sources[longest]}: {data.lengths[longest]} tokens, but the model has {cfg.max_positions} "
                f"positions; set cutoff_len: {cfg.max_positions}, or rope_scaling: yarn, which extends the model to "
                "cutoff_len"
            )


def planned_steps(config: Config, loader: Loader) -> int:
    """Updates of the whole run."""
    if config.train.max_steps > 0:
        return config.train.max_steps
    return math.ceil(config.train.num_train_epochs * loader.steps_per_epoch)


def precision_of(config: Config) -> Precision:
    """Precision of a run on this machine's devices."""
    return resolve_precision(config.train.bf16, config.train.fp16, jax.default_backend() == "gpu")


def prepare_data(config: Config, tokenizer) -> Prepared:
    """Tokenized data of a config; kept in tokenized_path, by default in ~/.cache/gymjax/tokenized."""
    cache = config.data.tokenized_path or Path.home() / ".cache" / "gymjax" / "tokenized"
    return prepare(
        config.data,
        tokenizer,
        stage=config.train.stage,
        seed=config.train.seed,
        cache_dir=cache,
        hub_cache=config.model.cache_dir,
    )


def check_experts(config: Config, cfg: DecoderConfig) -> None:
    """Refuses losses of routers for a model that has none.

    Raises:
        ValueError: naming the key.
    """
    for key in ("moe_aux_loss_coef", "router_z_loss_coef"):
        if getattr(config.train, key) and not cfg.sparse_layers:
            raise ValueError(f"{key} would do nothing: this model has no mixture of experts; remove it")
