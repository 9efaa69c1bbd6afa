"""A product with a low-rank adapter's added to it, in one kernel on Hopper, which copies neither operand.

Tiles of x @ w.T are multiplied as in grouped_matmul, 64 columns of x at a time; a few steps more add the low product,
x @ down.T in 16 bits, times the up-projection, in the same f32 sums. Who has no low product yet gets it here: blocks
that have a tile fewer than others begin with it, one tile of rows after another, and every block asks for its rows' low
product only when it has multiplied all else.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels import _platform
from pallas_kernels._hopper import WARPGROUPS, drain, launch, swizzled
from pallas_kernels._tiles import (
    DEPTH,
    HALF,
    ROWS,
    Tiles,
    left_slots,
    left_views,
    multiply_slots,
    parts_of,
    store_buffers,
    store_part,
    store_rows,
    walk,
)

TILES = Tiles(band=8)
FEWEST = 4  # steps, during which a tile's sums leave
MOST_MADE = 128  # columns of a low product that is made here


def refuses(depth: int, across: int) -> str | None:
    """Return why the kernel does not multiply (rows, depth) by (depth, across), or None."""
    if depth % DEPTH or across % DEPTH:
        return f"widths must be multiples of {DEPTH}, and are {depth} and {across}"
    if depth < FEWEST * DEPTH:
        return f"x must be at least {FEWEST * DEPTH} wide, and is {depth}"
    return None


@functools.partial(jax.jit, static_argnames=("first", "transpose", "tiles"), inline=True)  # of equal calls one compiled
def adapted_product(
    x: Float[Array, "M K"],
    w: Float[Array, "N K"] | Float[Array, "K N"],
    up: Float[Array, "N R"] | Float[Array, "R N"],
    low: Float[Array, "M P"],
    *,
    first: int = 0,
    transpose: bool = False,
    tiles: Tiles = TILES,
) -> Float[Array, "M N"]:
    """Return `x @ w.T + low[:, first : first + R] @ up.T`, summed in f32 and rounded once.

    Args:
        x: bf16 or f16, K and N not refused.
        w: x.dtype, or w.T with `transpose`.
        up: x.dtype, R a multiple of 64; or up.T with `transpose`.
        low: x.dtype.
        first: a multiple of 64.
        transpose: whether w and up are transposed.
        tiles: sizes and order, of blocks alone; `staged` for the interpreter.
    """
    return _run(x, w, up, low, None, first, transpose, tiles)[0]


@functools.partial(jax.jit, static_argnames=("first", "tiles"), inline=True)
def adapted_product_and_low(
    x: Float[Array, "M K"],
    w: Float[Array, "N K"],
    up: Float[Array, "N R"],
    down: Float[Array, "P K"],
    *,
    first: int = 0,
    tiles: Tiles = TILES,
) -> tuple[Float[Array, "M N"], Float[Array, "M P"]]:
    """As `adapted_product` of `low = x @ down.T`, rounded to x.dtype, and low; P at most MOST_MADE."""
    return _run(x, w, up, None, down, first, False, tiles)


def _run(x, w, up, low, down, first: int, transpose: bool, tiles: Tiles):
    (rows, depth), across = x.shape, w.shape[1 if transpose else 0]
    columns, stages = tiles.columns, tiles.stages
    high, wide, steps = -(-rows // ROWS), -(-across // columns), depth // DEPTH
    more = up.shape[0 if transpose else 1] // DEPTH
    blocks = min(high * wide, tiles.blocks or _platform.multiprocessors())
    helpers = 0 if down is None else makers(high, high * wide, blocks)
    ranks = 0 if down is None else down.shape[0]
    whole = steps + more

    def kernel(refs, scratch):
        x_ref, w_ref, up_ref, given_ref, out_ref, *made_ref = refs
        low_ref = given_ref if down is None else made_ref[0]
        x_slots, w_smem, stored_smem, ready, free = scratch
        x_rows, x_tiles = left_views(x_slots, tiles)
        made: Any = None if down is None else pl.get_global(plgpu.SemaphoreType.REGULAR((high,)))
        block, warpgroup = lax.axis_index("blocks"), lax.axis_index("warpgroup")
        behind = blocks - 1 - block  # the last blocks have the fewest tiles
        lows = jnp.where(behind < helpers, lax.div(high - 1 - behind, jnp.int32(max(helpers, 1))) + 1, 0)
        mine = lax.div(high * wide - 1 - block, jnp.int32(blocks)) + 1

        def low_item(n):
            """The tile of rows of this block's n-th low product, and the turn of its first step."""
            return behind + n * helpers, n * steps

        def item(n):
            """Likewise of its n-th product, and the tile of columns."""
            row, column = walk(block + n * blocks, high, wide, tiles.band)
            return row, lows * steps + n * whole, column

        def each(number, do):
            lax.fori_loop(0, number, lambda n, _: do(n), None)

        @pl.when(warpgroup < WARPGROUPS)
        def _compute():
            plgpu.set_max_registers(232, action="increase")
            buffers = stored_smem.at[warpgroup]

            def low_product(n):
                tile, turn = low_item(n)
                part = w_smem.at[:, pl.ds(0, ranks)]
                sums = multiply_slots(x_tiles, part, ready, free, turn, steps, ranks, transposed=True)
                store_rows(sums, buffers, low_ref, tile * ROWS + warpgroup * HALF, 0)
                plgpu.wait_smem_to_gmem(0)
                pl.semaphore_signal(made.at[tile])

            def target(n):
                tile, _, column = item(n)
                return out_ref, tile * ROWS + warpgroup * HALF, column * columns

            def product(n, kept):
                """The sums of the n-th tile, while those of the one before are stored."""

                def store(index):
                    pl.when(n > 0)(lambda: store_part(index, kept, buffers, *target(n - 1)))

                _, turn, _ = item(n)
                beside = [functools.partial(store, index) for index in range(parts_of(kept, buffers))]
                sums = multiply_slots(x_tiles, w_smem, ready, free, turn, whole, columns, not transpose, beside)
                return sums.astype(x.dtype)

            if helpers:
                each(lows, low_product)
            nothing = plgpu.layout_cast(jnp.zeros((HALF, columns), x.dtype), plgpu.Layout.WGMMA)
            kept = lax.fori_loop(0, mine, product, nothing)
            store_rows(kept, buffers, *target(mine - 1))
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == WARPGROUPS)
        def _feed():
            plgpu.set_max_registers(40, action="decrease")

            def load(turn, tile, left_ref, inner, right, right_smem):
                slot = lax.rem(turn, jnp.int32(stages))
                pl.when(turn >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))
                for half in range(WARPGROUPS):
                    left = left_ref.at[pl.ds(tile * ROWS + half * HALF, HALF), inner]
                    plgpu.copy_gmem_to_smem(left, x_rows.at[slot, half], ready.at[slot])
                plgpu.copy_gmem_to_smem(right, right_smem.at[slot], ready.at[slot])

            def low_product(n):
                tile, turn = low_item(n)

                def step(k):
                    inner = pl.ds(k * DEPTH, DEPTH)
                    load(turn + k, tile, x_ref, inner, given_ref.at[:, inner], w_smem.at[:, pl.ds(0, ranks)])

                each(steps, step)

            def product(n):
                tile, turn, column = item(n)

                def loads(count, turn, left_ref, right_ref, start):
                    def step(k):
                        inner, own = pl.ds(k * DEPTH, DEPTH), pl.ds(column * columns, columns)
                        right = right_ref.at[inner, own] if transpose else right_ref.at[own, inner]
                        load(turn + k, tile, left_ref, pl.ds(start + k * DEPTH, DEPTH), right, w_smem)

                    each(count, step)

                loads(steps, turn, x_ref, w_ref, 0)
                if helpers:
                    pl.semaphore_wait(made.at[tile], WARPGROUPS, decrement=False)
                loads(more, turn + steps, low_ref, up_ref, first)

            if helpers:
                each(lows, low_product)
            each(mine, product)
            drain(lows * steps + mine * whole, stages, free)

    w_tile = (DEPTH, columns) if transpose else (columns, DEPTH)
    outs = [jax.ShapeDtypeStruct((rows, across), x.dtype)]
    if down is not None:
        outs.append(jax.ShapeDtypeStruct((rows, ranks), x.dtype))
    return launch(
        kernel,
        (
            left_slots(x.dtype, tiles),
            plgpu.SMEM((stages, *w_tile), x.dtype, transforms=swizzled(w_tile[-1])),
            store_buffers(x.dtype),
            plgpu.Barrier(num_arrivals=WARPGROUPS + 1, num_barriers=stages),
            plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
        ),
        *(x, w, up, low if down is None else down),
        out_type=outs,
        grid={"blocks": blocks},
    )


def makers(high: int, items: int, blocks: int) -> int:
    """How many blocks make the low products of `high` tiles of rows: those with a tile fewer, if they are not few."""
    idle = -items % blocks
    return min(high, idle if 3 * idle >= high else blocks)
