"""Run by test_devices.py with four simulated devices: losses and gradients of meshes against one device."""

import functools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from gymjax.adapters.lora import LoraSpec, adapters, attach
from gymjax.adapters.select import train_all
from gymjax.config import OptimConfig
from gymjax.models import decoder_config
from gymjax.models.decoder import Decoder
from gymjax.optim.build import build
from gymjax.quant import nf4
from gymjax.training import mesh as meshes
from gymjax.training.step import StepSettings, init_state, make_step, split_model

HF_CONFIG = {
    "model_type": "llama", "vocab_size": 48, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip

EXPERTS = HF_CONFIG | {
    "model_type": "qwen2_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}  # fmt: skip
PLAIN = StepSettings(seed=0, max_grad_norm=0.0)
SETTINGS = StepSettings(seed=0, max_grad_norm=0.0, moe_aux_loss_coef=0.5, router_z_loss_coef=0.01)


def model_of(kind):
    model = Decoder(decoder_config(EXPERTS if kind == "experts" else HF_CONFIG), dtype=jnp.float32)
    rng = np.random.default_rng(0)
    state = nnx.state(model)
    fill = lambda path, leaf: jnp.asarray(rng.normal(0, 0.1, leaf.shape) + (path[-2].key == "scale"), jnp.float32)  # noqa: E731
    nnx.update(model, jax.tree_util.tree_map_with_path(fill, state))
    if kind in ("full", "experts"):
        train_all(model)
        return model
    if kind == "nf4":
        for block in model.stacks[0]:
            for layer in (block.attn.q, block.attn.o, block.mlp.gate, block.mlp.down):
                rows = [nf4.quantize(np.asarray(w), dtype="float32") for w in layer.w.get_value()]
                layer.w = nnx.Param(jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows))
    attach(model, LoraSpec(rank=4, alpha=8, use_dora=kind == "nf4"), key=jax.random.key(1))  # DoRA holds a LoRA
    for lora in adapters(model):
        lora.b.set_value(jnp.full(lora.b.get_value().shape, 0.02))
    return model


def batch_of():
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 48, (2, 4, 32)).astype(np.int32)
    weights = (np.arange(32) < rng.integers(4, 31, (2, 4, 1))).astype(np.float32)  # rows of unequal length
    return {
        "tokens": tokens,
        "targets": np.roll(tokens, -1, -1),
        "loss_weights": weights,
        "segment_ids": np.ones_like(tokens),
        "positions": np.broadcast_to(np.arange(32, dtype=np.int32), tokens.shape),
    }


def run_step(kind, mesh):
    graphdef, params, frozen = split_model(model_of(kind))
    optimizer = optax.sgd(1.0)
    state = init_state(params, optimizer, None)
    batch = {name: jnp.asarray(array) for name, array in batch_of().items()}
    shards = 1
    if mesh is not None:
        state, frozen = meshes.shard_state(mesh, state), meshes.shard_state(mesh, frozen)
        batch = meshes.shard_batch(mesh, batch_of(), rows_axis=1)
        every = [*jax.tree.leaves(frozen), *jax.tree.leaves(state.params)]
        shards = max(leaf.nbytes // leaf.addressable_shards[0].data.nbytes for leaf in every)
    new, metrics = jax.jit(make_step(graphdef, optimizer, SETTINGS if kind == "experts" else PLAIN))(
        state, frozen, batch
    )
    grads = [
        np.asarray(a) - np.asarray(b) for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(new.params), strict=True)
    ]
    return float(metrics["loss"]), grads, shards


def run_optimizer(mesh):
    """Weights after three updates by adamw_8bit with given gradients, and into how many parts its codes are spread."""
    params = split_model(model_of("full"))[1]
    optimizer = build(OptimConfig(optim="adamw_8bit", learning_rate=1e-2, weight_decay=0.1), 10, params)
    state, grads = optimizer.init(params), jax.tree.map(lambda p: jnp.cos(jnp.arange(p.size).reshape(p.shape)), params)
    if mesh is not None:
        params, state, grads = (meshes.shard_state(mesh, tree) for tree in (params, state, grads))

    @jax.jit
    def step(params, state):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(3):
        params, state = step(params, state)
    codes = [leaf for leaf in jax.tree.leaves(state) if leaf.dtype == jnp.uint8]
    shards = max(leaf.nbytes // leaf.addressable_shards[0].data.nbytes for leaf in codes)
    return 0.0, [np.asarray(leaf) for leaf in jax.tree.leaves(params)], shards


def main():
    meshes.SMALLEST_SHARDED = 1024
    found = {}
    for kind in sys.argv[1:]:
        run = run_optimizer if kind == "adamw_8bit" else functools.partial(run_step, kind)
        loss, grads, _ = run(None)
        for dp, fsdp in ((4, 1), (1, 4), (2, 2)):
            other, other_grads, shards = run(meshes.make_mesh(dp, fsdp))
            worst = max(float(np.abs(a - b).max()) for a, b in zip(grads, other_grads, strict=True))
            found[f"{kind}-{dp}x{fsdp}"] = {"loss": abs(loss - other), "grads": worst, "shards": shards}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
