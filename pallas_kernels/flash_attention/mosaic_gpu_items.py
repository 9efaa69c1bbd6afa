"""What the two forward kernels for Hopper share: items of work, the softmax of a tile, an item's end, and launching.

An item of work is 2 * block_q queries of one head. The memory warpgroup streams tiles of K and V through a ring of
`stages` shared-memory slots; each compute warpgroup multiplies its block_q queries with every tile (scores in
registers), keeps the sum of a base-2 softmax, and accumulates P @ V. The two take turns on the tensor cores: while one
exponentiates, the other multiplies (FlashAttention-3, arXiv 2407.08608, section 3.1). Weights refer to 0, or where
that is not near to a maximum (mosaic_gpu_rescale); capped scores always to 0 if their powers of two fit.

There are as many blocks as the GPU runs at a time, which take the items in rounds, longest first. Every other round
goes through the blocks backwards: otherwise the first block would have the longest item of each. A block loads its next
item's tiles while it finishes this one's.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _platform
from pallas_kernels._hopper import WARPGROUPS, filled, launch, swizzled
from pallas_kernels.flash_attention.bounds import longest_first
from pallas_kernels.flash_attention.mosaic_gpu_powers import LANES, sums_by_thread, weigh
from pallas_kernels.flash_attention.mosaic_gpu_rescale import LOWEST, settle
from pallas_kernels.flash_attention.mosaic_gpu_tiles import LOG2E, Scores, index_along

FEW_KEYS = 128  # rows of so many keys begin with their maximum: a weight that is not exactly 1 would show
ITEMS = 2  # slots for items of queries: the next one's are loaded while one is at work
BOUNDED = 80.0  # of scores in base 2 (a cap of 55): sums of 2**20 of their powers and values of 2**20 fit f32


@dataclasses.dataclass(frozen=True)
class ForwardTiles:
    """Tile sizes and schedule.

    Attributes:
        block_q: queries of a compute warpgroup.
        block_kv: keys of a slot.
        stages: slots of the ring.
        blocks: that share the work; None for as many as the GPU has multiprocessors.
        staged: whether weights go through shared memory, which is what the interpreter can run.
    """

    block_q: int = 64
    block_kv: int = 128
    stages: int = 2
    blocks: int | None = None
    staged: bool = False


class Item(NamedTuple):
    """Where an item lies: row, head, first query, slot of Q, and its tiles of keys (bounds.key_tiles)."""

    row: Any
    head: Any
    first: Any
    slot: Any
    span: tuple


def turns(barriers, warpgroup):
    """(leave_word, await_word) of a compute warpgroup: that the other's products may begin, or this one's."""

    def leave_word():
        plgpu.barrier_arrive(barriers.at[1 - warpgroup])

    def await_word():
        plgpu.barrier_wait(barriers.at[warpgroup])

    return leave_word, await_word


@dataclasses.dataclass(frozen=True)
class Forward:
    """One call of a forward kernel: sizes, and how the work is cut.

    Attributes:
        shape: (B, T, N, H) of q.
        keys: S.
        kv_heads: K.
        dtype: of q, k and v.
        shared: whether all rows have the bounds of the first.
        bounded: whether the powers of two of scores fit f32 and 16 bits as they are, so that no maximum is subtracted.
        scores: from products to scores.
        tiles: sizes of tiles.
    """

    shape: tuple[int, int, int, int]
    keys: int
    kv_heads: int
    dtype: jnp.dtype
    shared: bool
    bounded: bool
    scores: Scores
    tiles: ForwardTiles

    @classmethod
    def of(cls, q, k, lo, sinks, scores: Scores, tiles: ForwardTiles, *, ragged: bool = False) -> "Forward":
        """The call of these arrays; T must be a multiple of 2 * block_q and, unless ragged, S of block_kv."""
        bounded = q.dtype == jnp.bfloat16 and sinks is None and scores.bound <= BOUNDED
        bounded &= k.shape[1] > FEW_KEYS
        call = cls(q.shape, k.shape[1], k.shape[2], q.dtype, lo.shape[0] == 1, bounded, scores, tiles)
        if call.shape[1] % call.rows or (call.keys % tiles.block_kv and not ragged):
            raise ValueError(
                f"T={call.shape[1]} must be a multiple of {call.rows} and S={call.keys} of {tiles.block_kv}; pad them"
            )
        return call

    @property
    def rows(self) -> int:
        """Queries of an item."""
        return WARPGROUPS * self.tiles.block_q

    @property
    def items(self) -> int:
        """Of all rows and heads."""
        batch, tokens, heads, _ = self.shape
        return heads * batch * (tokens // self.rows)

    @property
    def blocks(self) -> int:
        """That share the items."""
        return min(self.items, self.tiles.blocks or _platform.multiprocessors())

    def of_block(self, block):
        """How many items a block has."""
        whole_rounds = jnp.int32(self.items // self.blocks)
        return whole_rounds + (self.number(block, whole_rounds) < self.items).astype(jnp.int32)

    def number(self, block, n):
        """Which item a block does in round n."""
        return n * self.blocks + jnp.where(lax.rem(n, jnp.int32(2)) == 0, block, self.blocks - 1 - block)

    def item(self, ranges_ref, work_ref, block, n) -> Item:
        """The n-th item of a block."""
        _, tokens, heads, _ = self.shape
        q_tiles = tokens // self.rows
        number = self.number(block, n)
        place = work_ref[lax.div(number, jnp.int32(heads))]
        row, q_tile = lax.div(place, jnp.int32(q_tiles)), lax.rem(place, jnp.int32(q_tiles))
        span = tuple(ranges_ref[self.bounds_row(row), q_tile, i] for i in range(4))
        slot = lax.rem(n, jnp.int32(ITEMS))
        return Item(row, lax.rem(number, jnp.int32(heads)), q_tile * self.rows, slot, span)

    def bounds_row(self, row):
        """Where a row's bounds stand."""
        return row * (0 if self.shared else 1)

    def start(self, sinks_ref, head):
        """(reference, running sums by threads) of no keys; a sink is a key that has been seen before the first one.

        Scores about 0 need no other reference, unless 16 bits lack powers of two, or few weights the exact 1.
        """
        rows = self.tiles.block_q
        plain = self.bounded or (self.dtype == jnp.bfloat16 and self.keys > FEW_KEYS)
        top = sinks_ref[0][head] if sinks_ref else 0.0 if plain else LOWEST
        return filled((rows,), top), filled((rows, LANES), 1.0 / LANES if sinks_ref else 0.0)

    def soften(self, product, carry, seen=None):
        """The softmax of one tile of products: (acc scaled, reference, sums with the tile), and its weights in 16 bits.

        Args:
            product: (block_q, block_kv) f32, of queries and keys.
            carry: (acc, reference, sums by threads) of the tiles before.
            seen: tells which scores count, when asked; None for all.
        """
        acc, top, total = carry
        if self.bounded:
            weight = self.scores.weight(product)
            if seen is not None:
                weight = jnp.where(seen(), weight, 0.0)
            total += sums_by_thread(weight, staged=self.tiles.staged)
            weight16 = weight.astype(self.dtype)
            total, weight16 = lax.optimization_barrier((total, weight16))
            return (acc, top, total), weight16
        score, factor = self.scores.squash(product), self.scores.factor
        if seen is not None:
            score = jnp.where(seen(), score, -jnp.inf)
        staged = self.tiles.staged
        weight16, part = weigh(score, factor, top, self.dtype, staged=staged)
        sums, weight16 = settle(score, factor, carry, weight16, part, whole=seen is None, staged=staged)
        return lax.optimization_barrier((sums, weight16))

    def seen(self, index, lo_q, hi_q):
        """Which keys of a tile lie within the bounds of the tile's queries."""
        key = index_along(1, index * self.tiles.block_kv, (self.tiles.block_q, self.tiles.block_kv))
        return (key >= lax.broadcast_in_dim(lo_q, key.shape, [0])) & (key <= lax.broadcast_in_dim(hi_q, key.shape, [0]))

    def normalise(self, acc, top, total):
        """An item's output in 16 bits and its log-sum-exp, from sums over all its keys."""
        total = total.sum(axis=1)
        empty = total == 0.0
        total = jnp.where(empty, 1.0, total)
        acc *= lax.broadcast_in_dim(1.0 / total, acc.shape, [0])
        return acc.astype(self.dtype), jnp.where(empty, jnp.inf, top + jnp.log2(total))

    def finish(self, carry, q_smem, lse_smem, out_ref, lse_ref) -> None:
        """Begins to write an item's results, through the slot that its queries had."""
        q_smem[...], lse_smem[...] = self.normalise(*carry)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_smem, out_ref)
        plgpu.copy_smem_to_gmem(lse_smem, lse_ref)

    def load_queries(self, item: Item, refs, slots, ready) -> None:
        """Begins to load an item's queries and their bounds: (q, lo, hi) from global into shared memory."""
        (q_ref, lo_ref, hi_ref), (q_smem, lo_smem, hi_smem) = refs, slots
        at, ready = pl.ds(item.first, self.rows), ready.at[item.slot]
        plgpu.copy_gmem_to_smem(q_ref.at[item.row, at, item.head], q_smem.at[item.slot], ready)
        plgpu.copy_gmem_to_smem(lo_ref.at[self.bounds_row(item.row), at], lo_smem.at[item.slot], ready)
        plgpu.copy_gmem_to_smem(hi_ref.at[self.bounds_row(item.row), at], hi_smem.at[item.slot], ready)

    def kv_head(self, head):
        """The key head of a query head."""
        return lax.div(head, jnp.int32(self.shape[2] // self.kv_heads))

    def tile(self, *shape: int, dtype=None, width: int | None = None):
        """A shared-memory buffer, by default of q's dtype in the layout of the tensor cores' operands.

        `width`: what the swizzle must divide, if not the last axis.
        """
        return plgpu.SMEM(shape, dtype or self.dtype, transforms=() if dtype else swizzled(width or shape[-1]))

    def scratch(self) -> tuple:
        """Buffers and barriers of a kernel whose items each have a slot of queries."""
        width, tiles = self.shape[-1], self.tiles
        return (
            (
                self.tile(ITEMS, self.rows, width),
                *(self.tile(tiles.stages, tiles.block_kv, width),) * 2,
                self.tile(ITEMS, self.rows, dtype=jnp.float32),
                *(self.tile(ITEMS, self.rows, dtype=jnp.int32),) * 2,
                self.weights(),
            ),
            (
                plgpu.Barrier(num_arrivals=3, num_barriers=ITEMS),
                plgpu.Barrier(),  # the first keys
                plgpu.Barrier(num_arrivals=2, num_barriers=tiles.stages),  # values and the next keys
            ),
            *self.free_and_turn(plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=ITEMS)),
        )

    def weights(self):
        """Where staged weights go, or None."""
        tiles = self.tiles
        return self.tile(WARPGROUPS, tiles.block_q, tiles.block_kv) if tiles.staged else None

    def free_and_turn(self, q_free) -> tuple:
        """Barriers of slots given back, the queries' as given, and of the warpgroups' turns."""
        free = (plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=self.tiles.stages),) * 2
        return (q_free, *free), plgpu.Barrier(num_barriers=WARPGROUPS)

    def launch(self, kernel, scratch, q, k, v, lo, hi, sinks, ranges):
        """Runs a kernel; `ranges` are the items' tiles of keys."""
        batch, tokens, heads, _ = self.shape
        return launch(
            kernel,
            scratch,
            *(q, k, v, lo, hi, ranges, longest_first(ranges, batch)),
            *([] if sinks is None else [sinks * LOG2E]),
            out_type=[q, jax.ShapeDtypeStruct((batch, heads, tokens), jnp.float32)],
            grid={"blocks": self.blocks},
            reduction_bytes=512,  # rows are reduced inside warps
        )
