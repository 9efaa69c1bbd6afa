"""What a training step needs of a device's memory, predicted before anything is loaded or compiled.

What stays (weights, optimizer state) and what the backward pass finds is measured, on shapes: the step's own forward
pass is traced, and what it keeps is added up. The rest is what is alive at the two widest moments: the loss of one
chunk of tokens, and the backward pass of one layer. A letter counts one array of that width a token: D of the residual
stream, Q of the query heads, K of the key heads, F of the feed-forward block.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import PyTree

import pallas_kernels.flash_attention as flash
from gymjax.losses.sft import CHUNK_TOKENS
from gymjax.models.decoder import SAVED_NAMES
from gymjax.models.decoder_config import DecoderConfig, LayerKind, Stack
from gymjax.nn.mlp import CHUNK
from gymjax.optim.labels import Trained
from gymjax.training.step import StepSettings, TrainState, batch_loss
from pallas_kernels.nf4_linear import NF4Weight


@dataclasses.dataclass(frozen=True)
class Workload:
    """What a step's memory depends on; arrays may be jax.ShapeDtypeStruct, with shardings if there are several devices.

    Attributes:
        cfg: of the decoder.
        graphdef: of the decoder.
        state: train state.
        frozen: frozen weights.
        settings: of the step; its remat is not read.
        rows: of one microbatch on one device.
        length: tokens of the longest rows.
        accumulation: microbatches of a step.
        dtype: of activations.
        fsdp: devices that share one copy of the weights.
        shards: devices that share a microbatch's rows.
    """

    cfg: DecoderConfig
    graphdef: nnx.GraphDef
    state: TrainState
    frozen: nnx.State
    settings: StepSettings
    rows: int
    length: int
    accumulation: int
    dtype: jnp.dtype
    fsdp: int = 1
    shards: int = 1

    @property
    def tokens(self) -> int:
        """Of one microbatch on one device, padding included."""
        return self.rows * self.length


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device, by what they are for.

    Attributes:
        frozen: weights that are not trained.
        trained: weights that are, f32.
        optimizer: its state.
        batch: token ids, targets, weights.
        gradients: of the trained weights; two sets where microbatches are summed.
        inputs: what every layer (or group of them) was given.
        offloaded: of these, what lies in the host's memory.
        kept: what else the backward pass finds.
        loss: of the head on one chunk of tokens: logits and their gradient.
        layer: widest moment of one layer's backward pass.
        update: of the optimizer's, beside gradients.
    """

    frozen: int
    trained: int
    optimizer: int
    batch: int
    gradients: int
    inputs: int
    offloaded: int
    kept: int
    loss: int
    layer: int
    update: int

    @property
    def resident(self) -> int:
        """Bytes between two steps."""
        return self.frozen + self.trained + self.optimizer + self.batch

    @property
    def peak(self) -> int:
        """Most bytes at once: a chunk's loss comes before the gradients, unless earlier microbatches left some."""
        summed = self.gradients // 2 if self.gradients > self.trained else 0
        widest = max(self.loss + summed, self.layer + self.gradients)
        step = self.inputs - self.offloaded + self.kept + widest
        return self.resident + max(step, self.gradients - summed + self.update)


def predict(work: Workload, remat: str) -> Memory:
    """Memory of a step with this rematerialisation, see Decoder.trunk."""
    trained = device_bytes(work.state.params)
    inputs = sum(stack.repeats for stack in work.cfg.stacks) * work.tokens * work.cfg.width * work.dtype.itemsize
    return Memory(
        frozen=device_bytes(work.frozen),
        trained=trained,
        optimizer=device_bytes(work.state.opt_state),
        batch=5 * 4 * work.accumulation * work.tokens,
        gradients=trained * min(2, work.accumulation),
        inputs=inputs,
        offloaded=inputs if remat == "offload" else 0,
        kept=max(0, kept_bytes(work, remat) - inputs) + _gathered_bytes(work),
        loss=loss_bytes(work),
        layer=layer_bytes(work, remat) + _tied_bytes(work),
        update=update_bytes(work),
    )


def device_bytes(tree: PyTree) -> int:
    """Bytes of a tree's arrays on one device."""

    def size(leaf: Any) -> int:
        sharding = getattr(leaf, "sharding", None)
        shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
        return math.prod(shape) * leaf.dtype.itemsize

    return sum(size(leaf) for leaf in jax.tree.leaves(tree))


def abstract_batch(rows: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of a microbatch."""
    ints = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    batch = dict.fromkeys(("tokens", "targets", "segment_ids", "positions"), ints)
    return batch | {"loss_weights": jax.ShapeDtypeStruct(ints.shape, jnp.float32)}


def kept_bytes(work: Workload, remat: str) -> int:
    """Bytes that the forward pass leaves for the backward pass, found by tracing both; nothing is computed.

    Weights and the batch, which are there anyway, do not count.
    """
    settings = dataclasses.replace(work.settings, remat=remat)

    def residuals(params: nnx.State, frozen: nnx.State, batch: dict[str, jax.Array]) -> list[jax.Array]:
        def loss(params: nnx.State) -> jax.Array:
            return batch_loss(nnx.merge(work.graphdef, params, frozen), batch, settings, jax.random.key(0))[0]

        given = {id(leaf) for leaf in jax.tree.leaves((params, frozen, batch))}
        return [leaf for leaf in jax.tree.leaves(jax.vjp(loss, params)[1]) if id(leaf) not in given]

    params, frozen = (_unsharded(tree) for tree in (work.state.params, work.frozen))
    kept = jax.eval_shape(residuals, params, frozen, abstract_batch(work.rows, work.length))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kept))


def _unsharded(tree: PyTree) -> PyTree:
    """One device's work does not depend on how the others share the weights."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def loss_bytes(work: Workload) -> int:
    """Of one chunk of tokens the logits in f32 and their gradient in the compute dtype; one D of all tokens.

    A bound on logits (softcap) wants them twice in f32, before and after. A trained head adds its gradient, summed in
    f32; a head stored in another dtype adds its cast.
    """
    cfg, item = work.cfg, work.dtype.itemsize
    chunks = -(-work.tokens * work.shards // CHUNK_TOKENS)  # of what all devices hold together
    chunk = work.rows * -(-work.length // min(chunks, work.length))
    size = chunk * cfg.vocab_size * (4 + (item if cfg.logit_softcap is None else 4)) + work.tokens * cfg.width * item
    model = nnx.merge(work.graphdef, work.state.params, work.frozen)
    head = model.head_variable()
    if isinstance(head, Trained):
        size += 4 * cfg.vocab_size * cfg.width
    if getattr(head.get_value(), "dtype", work.dtype) != work.dtype:
        size += item * cfg.vocab_size * cfg.width
    return size


def layer_bytes(work: Workload, remat: str) -> int:
    """Widest moment of a layer's backward pass: where the feed-forward block's gradients are made.

    Alive are, unless they are among what is kept: of width F gate, up, their product's gradient, and both's own; 4 D:
    the layer's input, the residual stream behind attention, its norm, and the gradient that came in; and what
    attention's backward pass will want, 2 Q + 2 K. Groups of layers that are scanned together are computed again
    together: each layer but one adds all it computes, 3 F + 5 D + 2 Q + 2 K. Beside these stand the weights that are
    unpacked or cast.
    """
    return max(_group(work, stack, remat) for stack in work.cfg.stacks) + _unpacked_bytes(work)


def _tied_bytes(work: Workload) -> int:
    """A trained embedding that is the head too has two gradients, the loss' and the look-up's, which meet at the end.

    Where microbatches are summed, each joins the sum by itself.
    """
    trained = work.cfg.tie_embeddings and "embed" in work.state.params and work.accumulation == 1
    return 4 * work.cfg.vocab_size * work.cfg.width if trained else 0


def _gathered_bytes(work: Workload) -> int:
    """The embedding, which each of several devices that share the weights collects for its look-ups."""
    return work.dtype.itemsize * work.cfg.vocab_size * work.cfg.width if work.fsdp > 1 else 0


def _group(work: Workload, stack: Stack, remat: str) -> int:
    item, more = work.dtype.itemsize, 0
    widest = max(_backward_elements(work, kind, remat) for kind in stack.pattern)
    if remat != "none":
        more = sum(_forward_elements(work, kind, remat) for kind in stack.pattern[1:])
    in_flight = (
        2 * work.tokens * work.cfg.width if remat == "offload" else 0
    )  # of this group and the next, on their way
    return item * (widest + more + in_flight)


def _backward_elements(work: Workload, kind: LayerKind, remat: str) -> int:
    cfg = work.cfg
    chunks = 1 if kind.experts else -(-work.length // CHUNK)
    ffn = (5 - len(kept_names(remat) & {"gate", "up"})) * ffn_elements(cfg, kind) * work.tokens // chunks
    stream = (4 + (chunks > 1)) * cfg.width * work.tokens  # chunks' gradients are joined
    if kind.experts is not None:  # the sorted copy of the tokens, and its gradient
        stream += 2 * kind.experts.top_k * cfg.width * work.tokens
    return ffn + stream + _attention_elements(work, remat)


def _forward_elements(work: Workload, kind: LayerKind, remat: str) -> int:
    ffn = (3 - len(kept_names(remat) & {"gate", "up"})) * ffn_elements(work.cfg, kind)
    return (ffn + 5 * work.cfg.width) * work.tokens + _attention_elements(work, remat)


def _attention_elements(work: Workload, remat: str) -> int:
    cfg, kept = work.cfg, kept_names(remat)
    q, k = cfg.heads * cfg.head_dim, cfg.kv_heads * cfg.head_dim
    widths = {"q": q, "k": k, "v": k, "attention": q}
    size = sum(width for name, width in widths.items() if name not in kept) * work.tokens
    if attention_name(work) == "xla":  # scores, weights and their gradient, f32, of every pair of tokens
        size += 3 * cfg.heads * work.length * work.tokens * 4 // work.dtype.itemsize
    return size


def ffn_elements(cfg: DecoderConfig, kind: LayerKind) -> int:
    """Width of a layer's feed-forward block as one token meets it: of experts its own and the shared one."""
    moe = kind.experts
    return cfg.ffn_width if moe is None else moe.top_k * moe.ffn_width + (moe.shared_ffn_width or 0)


def kept_names(remat: str) -> frozenset[str]:
    """Names that a layer's forward pass keeps; what "none" keeps beside them has none."""
    if remat in ("none", "selective"):
        return frozenset(SAVED_NAMES)
    return frozenset() if remat in ("full", "offload") else frozenset(remat.split(","))


def _unpacked_bytes(work: Workload) -> int:
    """Of a layer's largest weight three copies where it is packed (gate's and up's values, and codes on their way to
    values), one where it is joined with an adapter's, cast, or gathered from other devices.
    """
    stacks = [tree["stacks"] for tree in (work.frozen, work.state.params) if "stacks" in tree]
    weights = jax.tree.leaves(stacks, is_leaf=lambda leaf: isinstance(leaf, NF4Weight))
    return work.dtype.itemsize * max(map(_unpacked_elements, weights))


def _unpacked_elements(weight: Any) -> int:
    if isinstance(weight, NF4Weight):  # its shape is that of one layer's, or of one expert's
        return 3 * math.prod((*weight.codes.shape[1:-1], *weight.shape))
    return math.prod(weight.shape[1:])


def update_bytes(work: Workload) -> int:
    """Of the optimizer's update: it fuses into one pass over each weight, but where moments are kept in 8 bits.

    Then a weight is updated piece by piece, and its gradient and the codes of a moment are there twice.
    """
    if not any(leaf.dtype == jnp.uint8 for leaf in jax.tree.leaves(work.state.opt_state)):
        return 0
    return max(device_bytes(leaf) + leaf.size // work.fsdp for leaf in jax.tree.leaves(work.state.params))


def attention_name(work: Workload) -> str:
    """The attention implementation that the step runs."""
    if work.settings.attention is not None:
        return work.settings.attention
    cfg = work.cfg
    q, k = (
        jax.ShapeDtypeStruct((work.rows, work.length, heads, cfg.head_dim), work.dtype)
        for heads in (cfg.heads, cfg.kv_heads)
    )
    options = {"scale": cfg.attn_scale, "softcap": cfg.attn_softcap, "sinks": cfg.attn_sinks}
    told = flash.explain(q, k, packed=work.settings.packed, **options)
    return told.removeprefix("flash_attention: ").split(" ")[0]
