"""What the attention kernels for Hopper share: shared-memory layouts, products of tiles, and scores in base 2."""

import dataclasses
import math

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.flash_attention.mosaic_gpu_tanh import power_of_tanh, tanh

LOG2E = math.log2(math.e)
LAST = 4096  # tokens at the end of each row whose tiles are done after all others, where that is half a row or more
FEW_ROWS = 16  # rows of keys, of all heads: of more, tiles of few would share what they stream


@dataclasses.dataclass(frozen=True)
class Scores:
    """How a product p of a query and a key becomes a score in base 2: `factor * squash(p)`.

    Without a cap that is `log2(e) * scale * p`, with one `log2(e) * cap * tanh(p * scale / cap)`; weights are powers of
    two of it, as the hardware's exponential is. `staged` as that of tanh.
    """

    scale: float
    softcap: float | None = None
    staged: bool = False

    @property
    def factor(self) -> float:
        """What a squashed product is multiplied by."""
        return LOG2E * (self.scale if self.softcap is None else self.softcap)

    def squash(self, product):
        """The product, or the tanh of its capped score."""
        if self.softcap is None:
            return product
        return tanh(product, self.scale / self.softcap, staged=self.staged)

    @property
    def bound(self) -> float:
        """What no score's size is beyond."""
        return math.inf if self.softcap is None else self.factor

    def weight(self, product):
        """Two to the power of the score."""
        if self.softcap is None:
            return jnp.exp2(product * self.factor)
        return power_of_tanh(product, self.scale / self.softcap, self.factor, staged=self.staged)

    def chain(self, weight, squashed):
        """`weight` times the derivative of the score by `scale * p`."""
        return weight if self.softcap is None else weight * (1.0 - squashed * squashed)


@dataclasses.dataclass(frozen=True)
class Order:
    """The blocks of a backward kernel in the order in which they start, one for each tile of each head of each row.

    Head after head, so that blocks at work at a time stream the same rows from the L2 cache; but of few and short rows
    the last tiles of all heads, the shortest work under a causal mask, at the end, tile after tile, so that
    multiprocessors end together.

    Attributes:
        heads: that own tiles.
        tiles: of each.
        batch: rows.
        last: how many tiles of each come at the end.
    """

    heads: int
    tiles: int
    batch: int
    last: int

    @classmethod
    def of(cls, heads: int, kv_heads: int, tiles: int, batch: int, rows: int) -> "Order":
        """The order for tiles of so many rows."""
        short = tiles * rows <= 2 * LAST and kv_heads * batch <= FEW_ROWS
        return cls(heads, tiles, batch, min(tiles, LAST // rows) if short else 0)

    @property
    def grid(self) -> dict[str, int]:
        """For launching."""
        return {"blocks": self.heads * self.tiles * self.batch}

    def place(self):
        """(head, tile, row) of this block."""
        first = self.tiles - self.last
        before_end = self.heads * first * self.batch
        block = lax.axis_index("blocks")
        at_end = block >= before_end
        block = jnp.where(at_end, block - before_end, block)
        rest, row = lax.div(block, jnp.int32(self.batch)), lax.rem(block, jnp.int32(self.batch))
        span = jnp.where(at_end, self.heads, first)
        outer, inner = lax.div(rest, span), lax.rem(rest, span)
        return jnp.where(at_end, inner, outer), jnp.where(at_end, first + outer, inner), row


def by_row(smem, shape: tuple[int, int]):
    """A vector in shared memory, one value a row of a tile."""
    return lax.broadcast_in_dim(plgpu.load(smem, layout=plgpu.Layout.WGMMA.reduce(1)), shape, [0])


def by_column(smem, shape: tuple[int, int]):
    """A vector in shared memory, one value a column of a tile."""
    return lax.broadcast_in_dim(plgpu.load(smem, layout=plgpu.Layout.WGMMA.reduce(0)), shape, [1])


def index_along(axis: int, first, shape: tuple[int, int]):
    """first, first + 1, ... along one axis of a tile."""
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA) + first


def anew(index):
    """The index, such that the compiler forms what depends on it where it is used.

    Otherwise it forms the addresses of all operands once, before a loop, and keeps more of them than registers hold.
    """
    return lax.optimization_barrier(jnp.int32(index))


def add(sum_ref, a, b, staging) -> None:
    """Begins `sum_ref += a @ b` for an accumulator, a in registers and b in shared memory.

    The interpreter has no products from registers: there a goes through `staging`, a tile in shared memory.
    """
    if staging is not None:
        staging[...] = a
        plgpu.commit_smem()
        a = staging
    plgpu.wgmma(sum_ref, a, b)


def accumulate(sums, staging, products):
    """Calls `products(add_0, add_1, ...)`, where `add_i(a, b)` adds a @ b to the i-th sum; returns the sums.

    With a None `staging`, a comes from registers and sums are formed in place, in flight until an accumulator is read.
    The interpreter can do neither: then a goes through `staging`, a tile in shared memory, and each product through an
    accumulator of its own.
    """
    if staging is None:

        def in_place(refs):
            products(*(lambda a, b, ref=ref: plgpu.wgmma(ref, a, b) for ref in refs))

        return pl.run_state(in_place)(tuple(plgpu.ACC.init(value) for value in sums))
    sums = list(sums)

    def add(i, a, b):
        staging[...] = a
        plgpu.commit_smem()

        def product(ref):
            plgpu.wgmma(ref, staging, b)
            return ref[...]

        sums[i] += pl.run_scoped(product, plgpu.ACC(sums[i].shape, jnp.float32))

    products(*(lambda a, b, i=i: add(i, a, b) for i in range(len(sums))))
    return tuple(sums)


def two_products(first, second, shape: tuple[int, int]):
    """`a @ b` of two pairs of shared-memory tiles, in flight together so that they wait once."""

    def multiply(first_ref, second_ref):
        plgpu.wgmma(first_ref, *first)
        plgpu.wgmma(second_ref, *second)
        return first_ref[...], second_ref[...]

    return pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32), plgpu.ACC(shape, jnp.float32))


def weights_by_key(scores: Scores, product, lse, bounds, first_key):
    """Weights of a tile of keys by queries, and what turns their gradient into that of `scale * product`.

    Args:
        scores: from products to scores.
        product: of keys and queries.
        lse: of the tile's queries, in shared memory.
        bounds: their first and last keys, in shared memory; None where every query sees the whole tile.
        first_key: of the tile.
    """
    score, shape = scores.squash(product), product.shape
    weight = jnp.exp2(score * scores.factor - by_column(lse, shape))
    if bounds is not None:
        key = index_along(0, first_key, shape)
        seen = (key >= by_column(bounds[0], shape)) & (key <= by_column(bounds[1], shape))
        weight = jnp.where(seen, weight, 0.0)
    return weight, scores.chain(weight, score)


def visit(ranges, step, carry):
    """Runs `step(index, carry, masked=)` over the tiles of one block; those that every row sees whole are not masked.

    `ranges` is (begin, clear_begin, clear_end, end), see bounds.key_tiles.
    """
    begin, clear_begin, clear_end, end = ranges

    def masked(index, carry):
        return step(index, carry, masked=True)

    carry = lax.fori_loop(begin, clear_begin, masked, carry)
    carry = lax.fori_loop(clear_begin, clear_end, lambda index, carry: step(index, carry, masked=False), carry)
    return lax.fori_loop(clear_end, end, masked, carry)
