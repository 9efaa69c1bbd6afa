"""Products with low-rank factors on Hopper: one pass over a wide array for its product, a factor's gradient, or both.

Such products move bytes and hardly compute. A block owns some columns of x and some of its rows, which stream by; per
tile of rows one compute warpgroup, in turn, multiplies the tile by the factor, and both add to the gradient of their
columns. Sums over columns (of the product) and over rows (of the gradient) end outside, over a few partial results.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels import _platform, nf4_linear
from pallas_kernels._hopper import WARPGROUPS, add_product, drain, filled, launch, store_through, swizzled
from pallas_kernels.lora_linear import mosaic_gpu_product as wide
from pallas_kernels.lora_linear import reference
from pallas_kernels.lora_linear.mosaic_gpu_product import refuses as refuses_product
from pallas_kernels.nf4_linear import NF4Weight
from pallas_kernels.nf4_linear.mosaic_gpu_join import write_edge

MAX_RANK = 64  # beyond, accumulators leave no registers, and x is no longer what is mostly read
_MULTIPLE = 8  # of ranks, as the tensor cores' products want them
FEWEST_ROWS = 1024  # below, there is little to stream
_SHARED_MEMORY = 226 * 1024  # bytes of a block's that tiles may fill


@dataclasses.dataclass(frozen=True)
class NarrowTiles:
    """How the work is cut.

    Attributes:
        rows: of a tile.
        columns: that a warpgroup owns.
        blocks: to spread over, at most; None for one a multiprocessor.
        staged: whether accumulators are read after every product, as the CPU interpreter wants it.
    """

    rows: int = 64
    columns: int = 256
    blocks: int | None = None
    staged: bool = False


def refuses(x: Array | jax.ShapeDtypeStruct, ws: Sequence[Array | NF4Weight]) -> str | None:
    """Return why the kernels have nothing to do for adapters of x (..., N) and these weights, or None."""
    reason = _refuses_narrow(x)
    if reason is None or any(isinstance(w, NF4Weight) and nf4_linear.refuses(w, x.dtype) is None for w in ws):
        return None
    return reason


def _refuses_narrow(x: Array | jax.ShapeDtypeStruct) -> str | None:
    rows = math.prod(x.shape[:-1])
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it needs bfloat16 or float16, and x is {x.dtype}"
    if rows < FEWEST_ROWS:
        return f"it is for at least {FEWEST_ROWS} rows, and x has {rows}"
    return _platform.why_not_hopper(one_device=True)


def narrow_products(
    x: Float[Array, "*B N"],
    factor: Float[Array, "R N"] | None,
    low: Float[Array, "*B R"] | None,
    *,
    width: int | None = None,
    rank_first: bool = False,
) -> Any:
    """As reference.narrow_products, in one pass over x; by XLA where tiles are not whole or the rank is too large."""
    tiles, leading, width = NarrowTiles(), x.shape[:-1], width or x.shape[-1]
    rank = next(array for array in (low, None if factor is None else factor.T) if array is not None).shape[-1]
    more = -rank % _MULTIPLE
    rows = math.prod(leading)
    whole = rows % tiles.rows == 0 and width % (WARPGROUPS * tiles.columns) == 0
    if _refuses_narrow(x) or not whole or rank + more > MAX_RANK:
        return reference.narrow_products(x, factor, low, width=width, rank_first=rank_first)
    wide_factor = None if factor is None else jnp.pad(factor, ((0, more), (0, 0)))
    wide_low = None if low is None else jnp.pad(low.reshape(rows, rank), ((0, 0), (0, more)))
    product, gradient = one_pass(_flat(x), wide_factor, wide_low, tiles, width)
    product = None if product is None else product[:, :rank].reshape(*leading, rank)
    if gradient is None:
        return product, None
    return product, gradient[:, :rank].T if rank_first else gradient[:, :rank]


def puts_last(x: Array | jax.ShapeDtypeStruct) -> bool:
    """Whether `put_last` is a kernel's for an x of whole columns, so that x may be what a kernel has just made."""
    return x.shape[-1] % _MULTIPLE == 0 and _refuses_narrow(x) is None


def put_last(whole: Float[Array, "*B I+C"], more: Float[Array, "*B C"]) -> Float[Array, "*B I+C"]:
    """As reference.put_last, by the copy engine where it can."""
    if not puts_last(whole) or more.shape[-1] % _MULTIPLE:
        return reference.put_last(whole, more)
    return write_edge(_flat(whole), _flat(more)).reshape(whole.shape)


def adapted_product(
    x: Float[Array, "*B I"],
    w: Float[Array, "O I"],
    up: Float[Array, "O R"],
    low: Float[Array, "*B P"],
    *,
    first: int = 0,
    transpose: bool = False,
) -> Float[Array, "*B O"]:
    """As reference.adapted_product, in one kernel where its shapes allow."""
    if _refuses_narrow(x) or refuses_product(x.shape[-1], w.shape[1 if transpose else 0]):
        return reference.adapted_product(x, w, up, low, first=first, transpose=transpose)
    product = wide.adapted_product(_flat(x), w, up, _flat(low), first=first, transpose=transpose)
    return product.reshape(*x.shape[:-1], -1)


def adapted_product_and_low(
    x: Float[Array, "*B I"],
    w: Float[Array, "O I"],
    up: Float[Array, "O R"],
    down: Float[Array, "P I"],
    *,
    first: int = 0,
) -> tuple[Float[Array, "*B O"], Float[Array, "*B P"]]:
    """As reference.adapted_product_and_low, likewise."""
    if len(down) > wide.MOST_MADE or _refuses_narrow(x) or refuses_product(x.shape[-1], w.shape[0]):
        low, _ = narrow_products(x, down, None)
        low = low.astype(x.dtype)
        return adapted_product(x, w, up, low, first=first), low
    product, low = wide.adapted_product_and_low(_flat(x), w, up, down, first=first)
    return product.reshape(*x.shape[:-1], -1), low.reshape(*x.shape[:-1], -1)


KERNELS = reference.Kernels(narrow_products, adapted_product, wide.DEPTH, adapted_product_and_low, put_last, None)


def _flat(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])


@functools.partial(jax.jit, static_argnames=("tiles", "width"), inline=True)  # of equal calls one is compiled
def one_pass(
    x: Float[Array, "M N"],
    factor: Float[Array, "R N"] | None,
    low: Float[Array, "M R"] | None,
    tiles: NarrowTiles,
    width: int | None = None,
) -> tuple[Float[Array, "M R"] | None, Float[Array, "N R"] | None]:
    """The kernel: `x @ factor.T` and `x.T @ low` in f32, each None where its argument is; one of them is there.

    Args:
        x: bf16 or f16, M a multiple of tiles.rows, N of 2 * tiles.columns.
        factor: x.dtype, R at most MAX_RANK and a multiple of 8.
        low: x.dtype, likewise.
        tiles: how the work is cut.
        width: N where x has more columns, which are not read.
    """
    rows, width = x.shape[0], width or x.shape[1]
    low_RM = None if low is None else low.T
    given = [array for array in (factor, low_RM) if array is not None]
    rank = given[0].shape[0]
    block, owned = tiles.rows, tiles.columns
    across, down = width // (WARPGROUPS * owned), rows // block
    groups = max(1, min(down, (tiles.blocks or _platform.multiprocessors()) // across))
    per_group = -(-down // groups)
    groups = -(-down // per_group)
    stages = _stages(tiles, rank, factor is not None, low is not None, x.dtype.itemsize)

    def kernel(refs, scratch):
        x_ref, *others = refs
        factor_ref: Any = others.pop(0) if factor is not None else None
        low_ref: Any = others.pop(0) if low is not None else None
        product_ref: Any = others.pop(0) if factor is not None else None
        gradient_ref: Any = others.pop(0) if low is not None else None
        x_smem, factor_smem, low_smem, sum_smem, factor_ready, ready, free = scratch
        column, group = lax.axis_index("across"), lax.axis_index("down")
        warpgroup = lax.axis_index("warpgroup")
        first = group * per_group
        visits = jnp.minimum(per_group, down - first)

        @pl.when(warpgroup < WARPGROUPS)
        def _compute():
            plgpu.set_max_registers(232, action="increase")
            my_sum = sum_smem.at[warpgroup]
            if factor is not None:
                plgpu.barrier_wait(factor_ready)

            def multiply(visit, slot):
                def product(acc):
                    for half in range(WARPGROUPS):
                        plgpu.wgmma(acc, x_smem.at[slot, half], factor_smem.at[half].transpose((1, 0)))
                    return acc[...]

                total = pl.run_scoped(product, plgpu.ACC((block, rank), jnp.float32))
                store_through(my_sum, total, product_ref.at[column, pl.ds((first + visit) * block, block)])

            def step(visit, gradient):
                slot = lax.rem(visit, jnp.int32(stages))
                plgpu.barrier_wait(ready.at[slot])
                if low is not None:
                    gradient = add_product(
                        gradient,
                        x_smem.at[slot, warpgroup].transpose((1, 0)),
                        low_smem.at[slot].transpose((1, 0)),
                        tiles.staged,
                    )
                if factor is not None:
                    pl.when(lax.rem(visit, jnp.int32(WARPGROUPS)) == warpgroup)(lambda: multiply(visit, slot))
                plgpu.barrier_arrive(free.at[slot])
                return gradient

            start = filled((owned, rank), 0.0) if low is not None else None
            gradient = lax.fori_loop(0, visits, step, start)
            if low is not None:
                for part in range(owned // block):
                    at = (column * WARPGROUPS + warpgroup) * owned + part * block
                    store_through(
                        my_sum, gradient[part * block : (part + 1) * block], gradient_ref.at[group, pl.ds(at, block)]
                    )
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == WARPGROUPS)
        def _feed():
            plgpu.set_max_registers(40, action="decrease")

            def half(i):
                return pl.ds((column * WARPGROUPS + i) * owned, owned)

            if factor is not None:
                for i in range(WARPGROUPS):
                    plgpu.copy_gmem_to_smem(factor_ref.at[:, half(i)], factor_smem.at[i], factor_ready)

            def load(visit, _):
                slot, at = lax.rem(visit, jnp.int32(stages)), pl.ds((first + visit) * block, block)
                pl.when(visit >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))
                for i in range(WARPGROUPS):
                    plgpu.copy_gmem_to_smem(x_ref.at[at, half(i)], x_smem.at[slot, i], ready.at[slot])
                if low is not None:
                    plgpu.copy_gmem_to_smem(low_ref.at[:, at], low_smem.at[slot], ready.at[slot])

            lax.fori_loop(0, visits, load, None)
            drain(visits, stages, free)

    def tile(*shape):
        return plgpu.SMEM(shape, x.dtype, transforms=swizzled(shape[-1]))

    outs = []
    if factor is not None:
        outs.append(jax.ShapeDtypeStruct((across, rows, rank), jnp.float32))
    if low is not None:
        outs.append(jax.ShapeDtypeStruct((groups, width, rank), jnp.float32))
    results = launch(
        kernel,
        (
            tile(stages, WARPGROUPS, block, owned),
            tile(WARPGROUPS, rank, owned) if factor is not None else None,
            tile(stages, rank, block) if low is not None else None,
            plgpu.SMEM((WARPGROUPS, block, rank), jnp.float32, transforms=swizzled(rank, jnp.float32)),
            plgpu.Barrier(num_arrivals=WARPGROUPS),
            plgpu.Barrier(num_arrivals=WARPGROUPS + (low is not None), num_barriers=stages),
            plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
        ),
        x,
        *given,
        out_type=outs,
        grid={"across": across, "down": groups},
    )
    sums = [part.sum(axis=0) for part in results]
    product = sums.pop(0) if factor is not None else None
    return product, sums.pop() if low is not None else None


def _stages(tiles: NarrowTiles, rank: int, product: bool, gradient: bool, itemsize: int) -> int:
    """Slots of tiles that fit beside what stays in shared memory."""
    columns = WARPGROUPS * tiles.columns
    stay = rank * columns * itemsize * product + WARPGROUPS * tiles.rows * rank * 4
    slot = tiles.rows * (columns + rank * gradient) * itemsize
    return min(4, (_SHARED_MEMORY - stay) // slot)
