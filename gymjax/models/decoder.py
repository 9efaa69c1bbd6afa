"""One decoder for every family: stacked layers, scanned, their features chosen by DecoderConfig."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from gymjax.models import remat as kept
from gymjax.models.block import Block
from gymjax.models.decoder_config import DecoderConfig
from gymjax.models.in_place import refuse_gradients, scan_in_place
from gymjax.models.offload import scan_offloaded
from gymjax.nn.attention import LayerCache, RopeTables
from gymjax.nn.linear import Linear
from gymjax.nn.norm import RMSNorm
from gymjax.nn.rope import document_lengths, rope_tables
from gymjax.nn.routing import RouterStats
from gymjax.optim.labels import Trained
from pallas_kernels import Implementation


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Static key-value cache of a whole model.

    Attributes:
        k: for each stack, for each layer of its group, keys (repeats, B, S, K, H).
        v: values, likewise.
        length: (B,) int32, tokens stored in each row.
        context: (B,) int32, length that the row's rotary angles are made for, where they depend on it: what the row can
            grow to (its prompt and the slots left for its answer), fixed when the prompt is read, as keys are stored
            rotated. A full pass with `context_B` gives the same.
    """

    k: tuple[tuple[Array, ...], ...]
    v: tuple[tuple[Array, ...], ...]
    length: Int[Array, " B"]
    context: Int[Array, " B"]


def empty_cache(cfg: DecoderConfig, batch: int, slots: int, dtype: jnp.dtype) -> KVCache:
    """A cache for `batch` rows of up to `slots` tokens."""

    def zeros() -> tuple[tuple[Array, ...], ...]:
        shape = (batch, slots, cfg.kv_heads, cfg.head_dim)
        return tuple(tuple(jnp.zeros((s.repeats, *shape), dtype) for _ in s.pattern) for s in cfg.stacks)

    return KVCache(zeros(), zeros(), jnp.zeros(batch, jnp.int32), jnp.full(batch, slots, jnp.int32))


class Decoder(nnx.Module):
    """Embedding, stacks of layers, final norm, head (absent when tied to the embedding)."""

    def __init__(self, cfg: DecoderConfig, *, dtype: jnp.dtype, compute_dtype: jnp.dtype | None = None):
        self.cfg = cfg
        self.compute_dtype = jnp.dtype(compute_dtype or dtype)
        self.embed = nnx.Param(jnp.zeros((cfg.vocab_size, cfg.width), dtype))
        self.stacks = nnx.List(
            [
                nnx.List([Block(cfg, kind, dtype=dtype, leading=(stack.repeats,)) for kind in stack.pattern])
                for stack in cfg.stacks
            ]
        )
        self.norm = RMSNorm(cfg.width, eps=cfg.norm_eps, offset=cfg.norm_offset, dtype=dtype)
        self.head = None if cfg.tie_embeddings else Linear(cfg.width, cfg.vocab_size, use_bias=False, dtype=dtype)

    def embed_tokens(self, tokens_BT: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Embeddings of tokens in the compute dtype."""
        x_BTD = self.embed.get_value()[tokens_BT].astype(self.compute_dtype)
        return x_BTD if self.cfg.embed_scale == 1 else x_BTD * jnp.asarray(self.cfg.embed_scale, x_BTD.dtype)

    def head_weight(self) -> Float[Array, "V D"]:
        """The output projection, whether tied or not, with its adapter where it has one."""
        return self.embed.get_value() if self.head is None else self.head.effective_weight()

    def head_variable(self) -> nnx.Param:
        """The variable behind the output projection."""
        return self.embed if self.head is None else self.head.w

    def logits(self, hidden_BTD: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
        """Vocabulary scores in f32; for generation and checks, never for training."""
        head_VD = self.head_weight().astype(hidden_BTD.dtype)
        logits_BTV = jnp.einsum("...D,VD->...V", hidden_BTD, head_VD, preferred_element_type=jnp.float32)
        logits_BTV *= self.cfg.logit_scale
        cap = self.cfg.logit_softcap
        return logits_BTV if cap is None else cap * jnp.tanh(logits_BTV / cap)

    def __call__(self, tokens_BT: Int[Array, "B T"], **options: Any) -> Float[Array, "B T D"]:
        """Hidden states of tokens; options as in `trunk`."""
        return self.trunk(self.embed_tokens(tokens_BT), **options)[0]

    def trunk(
        self,
        x_BTD: Float[Array, "B T D"],
        *,
        positions_BT: Int[Array, "B T"] | None = None,
        segment_ids_BT: Int[Array, "B T"] | None = None,
        context_B: Int[Array, " B"] | None = None,
        key: jax.Array | None = None,
        remat: str = "none",
        attention: Implementation | None = None,
        counted_BT: Bool[Array, "B T"] | None = None,
        fused_ops: bool = True,
    ) -> tuple[Float[Array, "B T D"], RouterStats | None]:
        """All layers and the final norm.

        Args:
            x_BTD: embedded tokens.
            positions_BT: rotary positions; default 0..T-1.
            segment_ids_BT: 1, 2, ... per packed document, 0 for padding; None: one document a row.
            context_B: length that each row's rotary angles are made for, where RopeConfig.by_length; None: each
                document's own length (transformers takes the longest row's for the whole batch).
            key: randomness of the adapters' dropout; None turns it off.
            remat: "none" keeps activations, "full" recomputes whole layers, "selective" keeps all names, names of
                SAVED_NAMES joined by commas keep those, "offload" is "full" with the layers' inputs in the host's
                memory. But for "none", only Trained weights get gradients where a model has some; of others they raise.
            attention: flash-attention implementation; None picks the fastest.
            counted_BT: tokens that count in the routers' statistics; None: none are made.
            fused_ops: norms, rotations and gates as kernels with gradients of their own, and what layers keep written
                where it stays, see `scan_in_place`; False: as plain jnp, in a scan that `jax.grad` turns around.

        Returns:
            (hidden states after the final norm, statistics of every router, stacked over the layers that have one, or
            None where none were asked for or the model is dense).

        Raises:
            ValueError: remat is no known name.
        """
        kept.check(remat)
        if positions_BT is None:
            positions_BT = jnp.arange(x_BTD.shape[1])[None]
        tables = self._tables(jnp.broadcast_to(positions_BT, x_BTD.shape[:2]), segment_ids_BT, context_B)
        x_BTD, _, stats = self._layers(
            x_BTD, tables, segment_ids_BT, None, key, remat, attention, counted_BT, fused_ops
        )
        return self.norm(x_BTD, fused_ops=fused_ops), stats

    def cached(
        self,
        tokens_BT: Int[Array, "B T"],
        cache: KVCache,
        *,
        segment_ids_BT: Int[Array, "B T"] | None = None,
        attention: Implementation | None = None,
    ) -> tuple[Float[Array, "B T D"], KVCache]:
        """Hidden states of tokens, and the cache with their keys and values.

        Args:
            tokens_BT: T > 1: prompts padded on the right, stored from slot 0; T = 1: each row's next token.
            cache: room for the tokens.
            segment_ids_BT: 1 for a prompt's tokens, 0 for padding; None: no padding.
            attention: flash-attention implementation of prompts; None picks the fastest.
        """
        B, T = tokens_BT.shape
        if T == 1:
            positions_BT, length, context = cache.length[:, None], cache.length + 1, cache.context
        else:
            positions_BT = jnp.broadcast_to(jnp.arange(T), (B, T))
            length = jnp.full((B,), T, jnp.int32)
            if segment_ids_BT is not None:
                length = jnp.sum(segment_ids_BT != 0, axis=1, dtype=jnp.int32)
            context = length + (cache.k[0][0].shape[2] - T)
        tables = self._tables(positions_BT, segment_ids_BT, context)
        x_BTD = self.embed_tokens(tokens_BT)
        x_BTD, (k, v), _ = self._layers(x_BTD, tables, segment_ids_BT, cache, None, "none", attention, None)
        return self.norm(x_BTD), KVCache(k, v, length, context)

    def _tables(self, positions_BT, segment_ids_BT, context_B) -> tuple[RopeTables, ...]:
        """cos and sin of each of the model's rotary settings."""
        lengths_BT = None
        if context_B is not None:
            lengths_BT = jnp.broadcast_to(context_B[:, None], positions_BT.shape)
        elif any(rope.by_length for rope in self.cfg.ropes):
            lengths_BT = document_lengths(positions_BT, segment_ids_BT)
        return tuple(rope_tables(positions_BT, rope, self.cfg.head_dim, lengths_BT) for rope in self.cfg.ropes)

    def _layers(self, x_BTD, tables, segment_ids_BT, cache, key, remat, attention, counted_BT, fused_ops=True):
        """Every stack in turn; returns (states, (keys, values) of the stacks' caches, router statistics)."""
        run = functools.partial(
            _run_group,
            tables=tables,
            segment_ids_BT=segment_ids_BT,
            attention=attention,
            length=None if cache is None else cache.length,
            counted_BT=counted_BT,
            fused_ops=fused_ops,
        )
        keys, values, stats = [], [], []
        for i, blocks in enumerate(self.stacks):
            stack_key = None if key is None else jax.random.fold_in(key, i)
            kv = (None, None) if cache is None else (cache.k[i], cache.v[i])
            x_BTD, (k, v), stack_stats = _scan_stack(run, blocks, x_BTD, kv, stack_key, remat, fused_ops)
            keys.append(k)
            values.append(v)
            stats += [layer for layer in stack_stats if layer is not None]
        joined = jax.tree.map(lambda *layers: jnp.concatenate(layers), *stats) if stats else None
        return x_BTD, (tuple(keys), tuple(values)), joined


def _scan_stack(run, blocks: nnx.List, x_BTD: Array, kv, key: jax.Array | None, remat: str, fused_ops: bool):
    """Scans `run` over the repetitions of a stack; the cache travels in the carry, so that it is updated in place."""
    graphdef, trained, state = nnx.split(blocks, Trained, ...)
    repeats = jax.tree.leaves((trained, state))[0].shape[0]
    keys = None if key is None else jax.random.split(key, repeats)
    rest = (state, jnp.arange(repeats), keys)

    def body(carry, trained, rest):
        (x_BTD, kv), (state, layer, key) = carry, rest
        x_BTD, kv, stats = run(nnx.merge(graphdef, trained, state), x_BTD, kv, layer=layer, key=key)
        return (x_BTD, kv), stats

    def without_cache(x_BTD, *layer):  # while training there is none
        (x_BTD, _), stats = body((x_BTD, kv), *layer)
        return x_BTD, stats

    why = f"with remat={remat!r} only Trained weights have one; declare it Trained, or use 'none'"
    if remat == "offload":
        refuse_gradients(rest, why)
        x_BTD, stats = scan_offloaded(without_cache, x_BTD, trained, rest)
        return x_BTD, kv, stats
    run_layer = body
    if remat != "none":
        policy = kept.policy(remat)
        if fused_ops and jax.tree.leaves(trained):  # where none is declared, all weights may be differentiated
            refuse_gradients(rest, why)
            x_BTD, stats = scan_in_place(without_cache, x_BTD, trained, rest, policy)
            return x_BTD, kv, stats
        run_layer = jax.checkpoint(body, prevent_cse=False, policy=policy)
    (x_BTD, kv), stats = jax.lax.scan(lambda carry, layer: run_layer(carry, *layer), (x_BTD, kv), (trained, rest))
    return x_BTD, kv, stats


def _run_group(blocks, x_BTD, kv, *, layer, key, tables, segment_ids_BT, attention, length, counted_BT, fused_ops):
    """One repetition of a stack's group of layers; `kv` is (keys, values) per layer of the group, or (None, None).

    Returns:
        (states, kv, router statistics of each layer of the group, None for those that make none).
    """
    keys, values = kv
    caches, stats = [], []
    for p, block in enumerate(blocks):
        cache = None if keys is None else LayerCache(keys[p], values[p], length, layer)
        block_key = None if key is None else jax.random.fold_in(key, p)
        options = {
            "key": block_key,
            "attention": attention,
            "cache": cache,
            "counted_BT": counted_BT,
            "fused_ops": fused_ops,
        }
        x_BTD, cache, layer_stats = block(x_BTD, tables, segment_ids_BT, **options)
        caches.append(cache)
        stats.append(layer_stats)
    if keys is not None:
        kv = tuple(cache.k for cache in caches), tuple(cache.v for cache in caches)
    return x_BTD, kv, tuple(stats)
