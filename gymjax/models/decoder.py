"""One decoder for every family: stacked layers, scanned, their features chosen by DecoderConfig."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from gymjax.nn.attention import Attention, LayerCache, RopeTables
from gymjax.nn.linear import Linear
from gymjax.nn.mlp import GatedMLP
from gymjax.nn.norm import RMSNorm
from gymjax.nn.rope import RopeConfig, rope_tables
from pallas_kernels import Implementation

SAVED_NAMES = ("q", "k", "v", "attention", "attention_lse", "gate", "up")
REMAT = ("none", "full", "selective")


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """What may differ between the layers of one model; static, so that kernels can specialise on it."""

    window: int | None = None


@dataclasses.dataclass(frozen=True)
class Stack:
    """`repeats` repetitions of a group of layers; one scan runs over the repetitions."""

    pattern: tuple[LayerKind, ...]
    repeats: int


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Shape and features of a decoder; widths in elements."""

    vocab_size: int
    width: int
    ffn_width: int
    heads: int
    kv_heads: int
    head_dim: int
    stacks: tuple[Stack, ...]
    rope: RopeConfig
    norm_eps: float
    max_positions: int
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kind of every layer, first to last."""
        return tuple(kind for stack in self.stacks for _ in range(stack.repeats) for kind in stack.pattern)

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.kinds)


def stack_layers(kinds: tuple[LayerKind, ...], cut: int | None = None) -> tuple[Stack, ...]:
    """Groups layers into as few scans as their kinds allow; `cut` forces a boundary before that layer.

    A kind sequence of period p <= 8 becomes one stack of groups of p and, where p does not divide it, one more for the
    rest; any other sequence becomes runs of equal layers.
    """
    if cut:
        return stack_layers(kinds[:cut]) + stack_layers(kinds[cut:])
    for period in range(1, min(8, len(kinds)) + 1):
        pattern, whole = kinds[:period], len(kinds) // period
        if all(kind == pattern[i % period] for i, kind in enumerate(kinds)) and (period == 1 or whole > 1):
            rest = kinds[whole * period :]
            return (Stack(pattern, whole), *((Stack(rest, 1),) if rest else ()))
    runs: list[Stack] = []
    for kind in kinds:
        if runs and runs[-1].pattern == (kind,):
            runs[-1] = Stack((kind,), runs[-1].repeats + 1)
        else:
            runs.append(Stack((kind,), 1))
    return tuple(runs)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Static key-value cache of a whole model.

    Attributes:
        k: for each stack, for each layer of its group, keys (repeats, B, S, K, H).
        v: values, likewise.
        length: (B,) int32, tokens stored in each row.
    """

    k: tuple[tuple[Array, ...], ...]
    v: tuple[tuple[Array, ...], ...]
    length: Int[Array, " B"]


def empty_cache(cfg: DecoderConfig, batch: int, slots: int, dtype: jnp.dtype) -> KVCache:
    """A cache for `batch` rows of up to `slots` tokens."""

    def zeros() -> tuple[tuple[Array, ...], ...]:
        shape = (batch, slots, cfg.kv_heads, cfg.head_dim)
        return tuple(tuple(jnp.zeros((s.repeats, *shape), dtype) for _ in s.pattern) for s in cfg.stacks)

    return KVCache(zeros(), zeros(), jnp.zeros(batch, jnp.int32))


class Block(nnx.Module):
    """Pre-norm transformer layer: `x + attn(norm(x))`, then `x + mlp(norm(x))`."""

    def __init__(self, cfg: DecoderConfig, kind: LayerKind, *, dtype: jnp.dtype, leading: tuple[int, ...]):
        shared = {"dtype": dtype, "leading": leading}
        self.attn_norm = RMSNorm(cfg.width, eps=cfg.norm_eps, **shared)
        self.attn = Attention(
            width=cfg.width,
            heads=cfg.heads,
            kv_heads=cfg.kv_heads,
            head_dim=cfg.head_dim,
            qkv_bias=cfg.qkv_bias,
            out_bias=cfg.out_bias,
            qk_norm_eps=cfg.norm_eps if cfg.qk_norm else None,
            window=kind.window,
            **shared,
        )
        self.mlp_norm = RMSNorm(cfg.width, eps=cfg.norm_eps, **shared)
        self.mlp = GatedMLP(cfg.width, cfg.ffn_width, use_bias=cfg.mlp_bias, **shared)

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        tables: RopeTables,
        segment_ids_BT: Int[Array, "B T"] | None,
        *,
        key: jax.Array | None,
        attention: Implementation | None,
        cache: LayerCache | None,
    ) -> tuple[Float[Array, "B T D"], LayerCache | None]:
        """One layer; see Attention for the cache."""
        attn_key, mlp_key = (None, None) if key is None else jax.random.split(key)
        out_BTD, cache = self.attn(
            self.attn_norm(x_BTD), tables, segment_ids_BT, key=attn_key, implementation=attention, cache=cache
        )
        x_BTD = x_BTD + out_BTD
        return x_BTD + self.mlp(self.mlp_norm(x_BTD), mlp_key), cache


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
        self.norm = RMSNorm(cfg.width, eps=cfg.norm_eps, dtype=dtype)
        self.head = None if cfg.tie_embeddings else Linear(cfg.width, cfg.vocab_size, use_bias=False, dtype=dtype)

    def embed_tokens(self, tokens_BT: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Embeddings of tokens in the compute dtype."""
        return self.embed.get_value()[tokens_BT].astype(self.compute_dtype)

    def head_weight(self) -> Float[Array, "V D"]:
        """The output projection, whether tied or not, with its adapter where it has one."""
        return self.embed.get_value() if self.head is None else self.head.effective_weight()

    def head_variable(self) -> nnx.Param:
        """The variable behind the output projection."""
        return self.embed if self.head is None else self.head.w

    def logits(self, hidden_BTD: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
        """Vocabulary scores in f32; for generation and checks, never for training."""
        head_VD = self.head_weight().astype(hidden_BTD.dtype)
        return jnp.einsum("...D,VD->...V", hidden_BTD, head_VD, preferred_element_type=jnp.float32)

    def __call__(self, tokens_BT: Int[Array, "B T"], **options: Any) -> Float[Array, "B T D"]:
        """Hidden states of tokens; options as in `trunk`."""
        return self.trunk(self.embed_tokens(tokens_BT), **options)

    def trunk(
        self,
        x_BTD: Float[Array, "B T D"],
        *,
        positions_BT: Int[Array, "B T"] | None = None,
        segment_ids_BT: Int[Array, "B T"] | None = None,
        key: jax.Array | None = None,
        remat: str = "none",
        attention: Implementation | None = None,
    ) -> Float[Array, "B T D"]:
        """All layers and the final norm.

        Args:
            x_BTD: embedded tokens.
            positions_BT: rotary positions; default 0..T-1.
            segment_ids_BT: 1, 2, ... per packed document, 0 for padding; None: one document a row.
            key: randomness of the adapters' dropout; None turns it off.
            remat: "none" keeps activations, "full" recomputes whole layers, "selective" keeps SAVED_NAMES.
            attention: flash-attention implementation; None picks the fastest.

        Returns:
            Hidden states after the final norm.

        Raises:
            ValueError: remat is no known name.
        """
        if remat not in REMAT:
            raise ValueError(f"remat must be one of {', '.join(REMAT)}, not {remat!r}")
        if positions_BT is None:
            positions_BT = jnp.arange(x_BTD.shape[1])[None]
        x_BTD, _ = self._layers(x_BTD, positions_BT, segment_ids_BT, None, key, remat, attention)
        return self.norm(x_BTD)

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
        positions_BT = cache.length[:, None] if T == 1 else jnp.arange(T)[None]
        x_BTD = self.embed_tokens(tokens_BT)
        x_BTD, (k, v) = self._layers(x_BTD, positions_BT, segment_ids_BT, cache, None, "none", attention)
        if T == 1:
            length = cache.length + 1
        elif segment_ids_BT is None:
            length = jnp.full((B,), T, jnp.int32)
        else:
            length = jnp.sum(segment_ids_BT != 0, axis=1, dtype=jnp.int32)
        return self.norm(x_BTD), KVCache(k, v, length)

    def _layers(self, x_BTD, positions_BT, segment_ids_BT, cache, key, remat, attention):
        """Every stack in turn; returns (states, (keys, values) of the stacks' caches)."""
        positions_BT = jnp.broadcast_to(positions_BT, x_BTD.shape[:2])
        tables = rope_tables(positions_BT, self.cfg.rope, self.cfg.head_dim)
        run = functools.partial(
            _run_group,
            tables=tables,
            segment_ids_BT=segment_ids_BT,
            attention=attention,
            length=None if cache is None else cache.length,
        )
        keys, values = [], []
        for i, blocks in enumerate(self.stacks):
            stack_key = None if key is None else jax.random.fold_in(key, i)
            kv = (None, None) if cache is None else (cache.k[i], cache.v[i])
            x_BTD, (k, v) = _scan_stack(run, blocks, x_BTD, kv, stack_key, remat)
            keys.append(k)
            values.append(v)
        return x_BTD, (tuple(keys), tuple(values))


def _scan_stack(run, blocks: nnx.List, x_BTD: Array, kv, key: jax.Array | None, remat: str):
    """Scans `run` over the repetitions of a stack; the cache travels in the carry, so that it is updated in place."""
    graphdef, state = nnx.split(blocks)
    repeats = jax.tree.leaves(state)[0].shape[0]

    def body(carry, scanned):
        state, layer, key = scanned
        return run(nnx.merge(graphdef, state), *carry, layer=layer, key=key), None

    if remat == "full":
        body = jax.checkpoint(body, prevent_cse=False)
    elif remat == "selective":
        policy = jax.checkpoint_policies.save_only_these_names(*SAVED_NAMES)
        body = jax.checkpoint(body, prevent_cse=False, policy=policy)
    keys = None if key is None else jax.random.split(key, repeats)
    carry, _ = jax.lax.scan(body, (x_BTD, kv), (state, jnp.arange(repeats), keys))
    return carry


def _run_group(blocks, x_BTD, kv, *, layer, key, tables, segment_ids_BT, attention, length):
    """One repetition of a stack's group of layers; `kv` is (keys, values) per layer of the group, or (None, None)."""
    keys, values = kv
    caches = []
    for p, block in enumerate(blocks):
        cache = None if keys is None else LayerCache(keys[p], values[p], length, layer)
        block_key = None if key is None else jax.random.fold_in(key, p)
        x_BTD, cache = block(x_BTD, tables, segment_ids_BT, key=block_key, attention=attention, cache=cache)
        caches.append(cache)
    if keys is None:
        return x_BTD, kv
    return x_BTD, (tuple(cache.k for cache in caches), tuple(cache.v for cache in caches))
