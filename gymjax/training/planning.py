"""From a config to the plan of its step: shapes alone, so that what does not fit is refused before it is loaded."""

from __future__ import annotations

import jax
import numpy as np
from flax import nnx

from gymjax.adapters.lora import LoraSpec
from gymjax.adapters.select import train_modules
from gymjax.checkpoint.load import blank_base
from gymjax.checkpoint.peft import attach_blank
from gymjax.config import Config
from gymjax.dtypes import policy
from gymjax.models.decoder import Decoder
from gymjax.optim.build import build
from gymjax.training.compile import Program, compile_program, describe_program, jit_step, use_compile_cache
from gymjax.training.inputs import Inputs, open_inputs, planned_steps
from gymjax.training.mesh import batch_sharding, batch_shards, sharded_shapes
from gymjax.training.metrics import GIB, device_memory_gib
from gymjax.training.plan import Plan, choose, describe, refusal
from gymjax.training.setup import choose_trained, step_settings
from gymjax.training.step import init_state, split_model
from gymjax.training.workload import Workload, abstract_batch


def workload(config: Config, inputs: Inputs) -> Workload:
    """What the memory of a config's step depends on; nothing is loaded.

    Raises:
        ValueError: what is to be trained does not fit the model; the message names the key.
    """
    specs: list[LoraSpec | None] = []

    def make() -> Decoder:
        model = blank_base(inputs.base, config.model, policy(inputs.precision))
        if config.model.adapter_name_or_path:
            specs.append(attach_blank(model, config.model.adapter_name_or_path))
            train_modules(model, config.adapter.additional_target, key="additional_target")
            return model
        model, spec = choose_trained(model, config)
        specs.append(spec)
        return model

    model = nnx.eval_shape(make)
    spec = specs[-1]
    graphdef, params, frozen = split_model(model)
    optimizer = _optimizer(config, inputs, params)
    scale = config.train.loss_scale if inputs.precision == "fp16" else None
    state = jax.eval_shape(lambda params: init_state(params, optimizer, scale), params)
    return Workload(
        cfg=model.cfg,
        graphdef=graphdef,
        state=sharded_shapes(inputs.mesh, state),
        frozen=sharded_shapes(inputs.mesh, frozen),
        settings=step_settings(config, dropout=spec is not None and spec.dropout > 0, packed=inputs.prepared.packing),
        rows=config.train.per_device_train_batch_size,
        length=inputs.loader.buckets[-1],
        accumulation=config.train.gradient_accumulation_steps,
        dtype=np.dtype(policy(inputs.precision).compute),
        fsdp=inputs.mesh.shape["fsdp"],
        shards=batch_shards(inputs.mesh),
    )


def _optimizer(config: Config, inputs: Inputs, params: nnx.State):
    steps = planned_steps(config, inputs.loader)
    return build(config.optim, steps, params, lora_plus_ratio=config.adapter.loraplus_lr_ratio)


def plan_run(config: Config, inputs: Inputs) -> Plan:
    """The plan of a config on this machine's devices."""
    limit = device_memory_gib()
    work = workload(config, inputs)
    wanted = config.train.gradient_checkpointing.replace(" ", "")
    return choose(work, wanted, None if limit is None else int(limit * GIB))


def compile_planned(config: Config, inputs: Inputs, plan: Plan) -> tuple[tuple[int, ...], Program]:
    """Compiles the step for the longest rows from shapes alone.

    Done before weights are loaded, what the compiler tries out on the device does not lie beside them.

    Returns:
        (shape of the step's tokens, its program).
    """
    work, mesh = plan.work, inputs.mesh
    step = jit_step(work.graphdef, _optimizer(config, inputs, work.state.params), plan.settings, work.state)
    sharding = batch_sharding(mesh, 1)
    batch = {
        name: jax.ShapeDtypeStruct((work.accumulation, *leaf.shape), leaf.dtype, sharding=sharding)
        for name, leaf in abstract_batch(work.rows * batch_shards(mesh), work.length).items()
    }
    return batch["tokens"].shape, compile_program(step, work.state, work.frozen, batch)


def show_plan(config: Config) -> tuple[list[str], bool]:
    """What `plan_only` prints: the plan, and the compiler's own analysis where it fits; nothing is loaded or written.

    Returns:
        (lines, whether it fits).
    """
    use_compile_cache(config.train.compile_cache_dir)  # the run then finds the program there
    inputs = open_inputs(config)
    plan = plan_run(config, inputs)
    lines = describe(plan)
    if not plan.fits:
        return [*lines, refusal(plan)], False
    shape, program = compile_planned(config, inputs, plan)
    if program.peak_gib is not None:
        share = plan.memory.peak / GIB / program.peak_gib - 1
        lines.append(f"  {'by the compiler':<28} {program.peak_gib:8.3f} GiB (the plan is {share:+.1%} off)")
    return [*lines, describe_program(program, shape)], True
