"""The widest moments of a step as formulas: the loss of a chunk of tokens, a layer's backward pass, the update.

A letter counts one array of that width a token: D of the residual stream, Q of the query heads, K of the key heads, F
of the feed-forward block.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from gymjax.losses.sft import CHUNK_TOKENS, GROUP_TOKENS
from gymjax.models.decoder_config import DecoderConfig, LayerKind, Stack
from gymjax.models.remat import kept_names
from gymjax.nn.mlp import CHUNK
from gymjax.optim.labels import Trained
from gymjax.training.workload import Workload, attention_name, device_bytes
from pallas_kernels.linear_cross_entropy import stores_exponentials, tokens_at_a_time
from pallas_kernels.nf4_linear import NF4Weight, refuses


def loss_bytes(work: Workload) -> int:
    """Of one chunk of tokens the logits in f32, of one group their gradient in the compute dtype; one D of all.

    A bound on logits (softcap) wants them twice in f32, before and after. Where kernels store exponentials these stand
    in the place of both. A trained head adds its gradient, summed in f32; a head stored in another dtype adds its cast.
    Without fused operations all tokens' logits and their gradient are there in f32.
    """
    cfg, item = work.cfg, work.dtype.itemsize
    model = nnx.merge(work.graphdef, work.state.params, work.frozen)
    head = model.head_variable()
    trained = isinstance(head, Trained)
    all_tokens = work.tokens * work.shards  # of what all devices hold together

    def at_a_time(size: int) -> int:
        return work.rows * -(-work.length // min(-(-all_tokens // size), work.length))

    chunk, group = at_a_time(CHUNK_TOKENS), at_a_time(GROUP_TOKENS)
    logits = 4 * chunk + (item * group if cfg.logit_softcap is None else max(item * group, 4 * chunk))
    if stores_exponentials(cfg.width, cfg.vocab_size, work.dtype, softcap=cfg.logit_softcap, trained=trained):
        logits = item * at_a_time(tokens_at_a_time(CHUNK_TOKENS, GROUP_TOKENS, cfg.vocab_size, trained=trained))
    size = cfg.vocab_size * logits + work.tokens * cfg.width * item
    if not work.settings.fused_ops:
        size = 8 * cfg.vocab_size * work.tokens
    if trained:
        size += 4 * cfg.vocab_size * cfg.width
    if getattr(head.get_value(), "dtype", work.dtype) != work.dtype:
        size += item * cfg.vocab_size * cfg.width
    return size


def layer_bytes(work: Workload, remat: str) -> int:
    """Widest moment of a layer's backward pass: where the feed-forward block's gradients are made.

    Alive are, unless they are among what is kept: of width F gate, up, their product's gradient, and both's own (and
    with "offload" and chunks one more, by what the compiler needs at 2,048 to 262,144 tokens of an 8B model); 4 D:
    the layer's input, the residual stream behind attention, its norm, and the gradient that came in; and what
    attention's backward pass will want, 2 Q + 2 K. Groups of layers that are scanned together are computed again
    together: each layer but one adds all it computes, 3 F + 5 D + 2 Q + 2 K. Beside these stand the weights that are
    unpacked or cast.
    """
    return max(_group(work, stack, remat) for stack in work.cfg.stacks) + _unpacked_bytes(work)


def tied_bytes(work: Workload) -> int:
    """A trained embedding that is the head too has two gradients, the loss' and the look-up's, which meet at the end.

    Where microbatches are summed, each joins the sum by itself.
    """
    trained = work.cfg.tie_embeddings and "embed" in work.state.params and work.accumulation == 1
    return 4 * work.cfg.vocab_size * work.cfg.width if trained else 0


def gathered_bytes(work: Workload) -> int:
    """The embedding, which each of several devices that share the weights collects for its look-ups."""
    return work.dtype.itemsize * work.cfg.vocab_size * work.cfg.width if work.fsdp > 1 else 0


def _group(work: Workload, stack: Stack, remat: str) -> int:
    item, more = work.dtype.itemsize, 0
    widest = max(_backward_elements(work, kind, remat) for kind in stack.pattern)
    if remat != "none":
        more = sum(_forward_elements(work, kind, remat) for kind in stack.pattern[1:])
    if remat == "offload":  # the next group's input is there, fetched ahead; the loss' input and its gradient, which
        more -= work.tokens * work.cfg.width  # are counted with what is kept, are not
    return item * (widest + more)


def _backward_elements(work: Workload, kind: LayerKind, remat: str) -> int:
    cfg = work.cfg
    chunks = 1 if kind.experts else -(-work.length // CHUNK)
    wide = 5 + (remat == "offload" and chunks > 1) - len(kept_names(remat) & {"gate", "up"})
    ffn = wide * ffn_elements(cfg, kind) * work.tokens // chunks
    arrays = 4 - ("middle" in kept_names(remat))
    if chunks > 1:  # their gradients are joined, and several rows are put in the order of chunks
        holes = chunks > 2 and remat == "offload"  # that the chunks' arrays leave among those of all tokens
        arrays += 1 + (work.rows > 1 or holes)
    stream = arrays * cfg.width * work.tokens
    if kind.experts is not None:  # the sorted copy of the tokens, and its gradient
        stream += (2 - ("rows" in kept_names(remat))) * kind.experts.top_k * cfg.width * work.tokens
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
    if attention_name(work) == "cudnn" and work.settings.packed:  # its mask
        size += work.length * work.tokens
    return size


def ffn_elements(cfg: DecoderConfig, kind: LayerKind) -> int:
    """Width of a layer's feed-forward block as one token meets it: of experts its own and the shared one."""
    moe = kind.experts
    return cfg.ffn_width if moe is None else moe.top_k * moe.ffn_width + (moe.shared_ffn_width or 0)


def _unpacked_bytes(work: Workload) -> int:
    """Of a layer's largest weight the copies beside it.

    One where it is joined with an adapter's, cast, gathered from other devices, or unpacked by a kernel; three where it
    is unpacked by XLA: gate's and up's values, and codes on their way to values.
    """
    stacks = [tree["stacks"] for tree in (work.frozen, work.state.params) if "stacks" in tree]
    weights = jax.tree.leaves(stacks, is_leaf=lambda leaf: isinstance(leaf, NF4Weight))
    return work.dtype.itemsize * max(_unpacked_elements(weight, work.dtype) for weight in weights)


def _unpacked_elements(weight: Any, dtype: jnp.dtype) -> int:
    if isinstance(weight, NF4Weight):  # its shape is that of one layer's, or of one expert's
        copies = 1 if refuses(weight, dtype) is None else 3
        return copies * math.prod((*weight.codes.shape[1:-1], *weight.shape))
    return math.prod(weight.shape[1:])


def update_bytes(work: Workload) -> int:
    """Of the optimizer's update: it fuses into one pass over each weight, but where moments are kept in 8 bits.

    Then a weight is updated piece by piece, and its gradient and the codes of a moment are there twice.
    """
    if not any(leaf.dtype == jnp.uint8 for leaf in jax.tree.leaves(work.state.opt_state)):
        return 0
    return max(device_bytes(leaf) + leaf.size // work.fsdp for leaf in jax.tree.leaves(work.state.params))
