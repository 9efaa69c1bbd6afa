"""The head's product on Hopper with the softmax' exponentials as its result: logits never leave the registers.

Each tile of x @ head.T, 128 rows by 256 columns, is multiplied as in grouped_matmul. While its sums are in registers,
every logit becomes the exponential of what it is above its row's reference, which is known before; 16 bits of it are
stored, in f32 it is added up. bf16 has the exponents of f32, so that how exact a stored exponential is does not depend
on the reference, as long as it is nowhere near the end of the range. Where it is to be rounded once more, after a
factor, a code is stored instead: its logarithm in steps of 1/720 octave, which rounds by 4.8e-4 at most where bf16
rounds by 3.9e-3.
"""

import functools
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap
from jaxtyping import Array, BFloat16, Float, Int, Shaped

from pallas_kernels import _platform
from pallas_kernels._hopper import WARPGROUPS, drain, launch, padded, swizzled
from pallas_kernels._tiles import (
    DEPTH,
    HALF,
    ROWS,
    Tiles,
    free_slots,
    multiply_slots,
    shape,
    store_buffers,
    store_rows,
    walk,
)
from pallas_kernels.linear_cross_entropy.mosaic_gpu_codes import ONE, STEPS, code

LOG2E = math.log2(math.e)
ALONE, PAIRS = Tiles(), Tiles(pair=True, band=8)
PAIRED = 1024  # rows from which pairs are 3 % faster
PART = DEPTH  # columns whose exponentials are made and stored at a time, all of them inside the vocabulary or none
_OF_ROW = plgpu.Layout.WGMMA.reduce(1)


def refuses_shapes(width: int, vocabulary: int, dtype: Any) -> str | None:
    """Return why the kernel cannot multiply such hidden states with such a head, or None."""
    if dtype != jnp.bfloat16:
        return f"it needs bfloat16, and x is {dtype}"
    if width % DEPTH or vocabulary % DEPTH:
        return f"width and vocabulary must be multiples of {DEPTH}, and are {width} and {vocabulary}"
    return None


def exponentials(
    x: BFloat16[Array, "M D"],
    head: BFloat16[Array, "V D"],
    labels: Int[Array, " M"],
    reference: Float[Array, " M"],
    *,
    scale: float,
    coded: bool = False,
    tiles: Tiles | None = None,
) -> tuple[Shaped[Array, "tiled V"], Float[Array, " M"], Float[Array, " M"]]:
    """Return each token's exponentials but its label's, their sum, and the label's product.

    Args:
        x: hidden states.
        head: output weight.
        labels: int32; of a label outside the vocabulary the product is 0, and no exponential is left out.
        reference: f32, what exponents of 2 are taken relative to: exp2(log2(e) * scale * x @ head.T - reference).
        scale: factor on the products.
        coded: whether to return codes in place of exponentials, see mosaic_gpu_codes; they are right below 2**51.
        tiles: sizes, by default those that are fastest; with `pair` two blocks have tiles of the same columns and share
            the head's slots.

    Returns:
        (exponentials, 0 where the label is, as bf16, or codes of all as int16, with some more rows up to whole tiles,
        of x = 0; the exponentials' sums but for the label's, of what they are in f32; x[m] @ head[label]).

    Raises:
        ValueError: dtype or widths are not the kernel's.
    """
    if why := refuses_shapes(x.shape[1], head.shape[0], x.dtype):
        raise ValueError(f"linear_cross_entropy: {why}")
    rows = len(x)
    tiles = tiles or (PAIRS if rows >= PAIRED else ALONE)
    team = tiles.team
    x, labels, reference = padded(x, team * ROWS, 1), padded(labels, team * ROWS), padded(reference, team * ROWS)
    run = sequential_vmap(functools.partial(_run, scale=scale, coded=coded, tiles=tiles))
    stored, parts = run(x, head, labels.astype(jnp.int32), reference.astype(jnp.float32))
    total, label_product = jnp.sum(parts, axis=1)[:, :rows]
    return stored, total, label_product


def _run(x, head, labels, reference, *, scale: float, coded: bool, tiles: Tiles):
    (rows, depth), vocabulary = x.shape, head.shape[0]
    columns, stages, team = tiles.columns, tiles.stages, tiles.team
    high, wide, steps = rows // (team * ROWS), -(-vocabulary // columns), depth // DEPTH
    blocks = min(high * wide, (tiles.blocks or _platform.multiprocessors()) // team)
    unit, dtype = scale * LOG2E, jnp.dtype(jnp.int16 if coded else x.dtype)
    of_labels = (labels // columns).reshape(-1, HALF, 1)
    labelled = jnp.any(of_labels == jnp.arange(wide), axis=1).astype(jnp.int32)  # (halves, wide): whether it has any

    def kernel(refs, scratch):
        x_ref, head_ref, labels_ref, labelled_ref, reference_ref, stored_ref, parts_ref = refs
        x_smem, head_smem, stored_smem, ready, free = scratch
        shared = "pair" if tiles.pair else None
        block, warpgroup = lax.axis_index("blocks"), lax.axis_index("warpgroup")
        mine = lax.div(high * wide - 1 - block, jnp.int32(blocks)) + 1

        def item(n):
            """First row and column tile of this block's n-th tile."""
            row, column = walk(block + n * blocks, high, wide, tiles.band)
            place = lax.axis_index("pair") if tiles.pair else 0
            return (row * team + place) * ROWS, column

        @pl.when(warpgroup < WARPGROUPS)
        def _compute():
            plgpu.set_max_registers(232, action="increase")

            def tile(n, _):
                first, column = item(n)
                at = pl.ds(first + warpgroup * HALF, HALF)
                label, row_reference = (
                    plgpu.load(ref.at[at], layout=_OF_ROW, optimized=False) for ref in (labels_ref, reference_ref)
                )
                sums = multiply_slots(x_smem, head_smem, ready, free, n * steps, steps, columns, transposed=True)
                label -= column * columns
                has_labels = labelled_ref[lax.div(at.start, jnp.int32(HALF)), column] > 0
                total = label_product = nothing = plgpu.layout_cast(jnp.zeros((HALF,), jnp.float32), _OF_ROW)
                for begin in range(0, columns, PART):
                    product = sums[:, begin : begin + PART]
                    above = _by_row(row_reference, product.shape)
                    power = jnp.exp2(product * unit - above)

                    def without_labels(power=power, product=product, begin=begin):
                        """Zeros where labels are, whose products are added up."""
                        place = plgpu.broadcasted_iota(jnp.int32, product.shape, 1, layout=plgpu.Layout.WGMMA)
                        is_label = place == _by_row(label - begin, product.shape)
                        return jnp.where(is_label, 0.0, power), jnp.sum(jnp.where(is_label, product, 0.0), axis=1)

                    power, product_there = lax.cond(has_labels, without_labels, lambda p=power: (p, nothing))
                    stored = code(product * (unit * STEPS) - (above * STEPS - ONE)) if coded else power
                    store_rows(stored, stored_smem.at[warpgroup], stored_ref, at.start, column * columns + begin)
                    label_product += product_there
                    inside = jnp.broadcast_to(column * columns + begin < vocabulary, total.shape)
                    total += jnp.where(plgpu.layout_cast(inside, _OF_ROW), jnp.sum(power, axis=1), 0.0)
                parts_ref[0, column, at] = total
                parts_ref[1, column, at] = label_product

            lax.fori_loop(0, mine, tile, None)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == WARPGROUPS)
        def _feed():
            plgpu.set_max_registers(40, action="decrease")

            def tile(n, _):
                first, column = item(n)

                def load(k, _):
                    turn = n * steps + k
                    slot = lax.rem(turn, jnp.int32(stages))
                    inner = pl.ds(k * DEPTH, DEPTH)
                    pl.when(turn >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))
                    for half in range(WARPGROUPS):
                        source = x_ref.at[pl.ds(first + half * HALF, HALF), inner]
                        plgpu.copy_gmem_to_smem(source, x_smem.at[slot, half], ready.at[slot])
                    source = head_ref.at[pl.ds(column * columns, columns), inner]
                    plgpu.copy_gmem_to_smem(source, head_smem.at[slot], ready.at[slot], collective_axes=shared)

                lax.fori_loop(0, steps, load, None)

            lax.fori_loop(0, mine, tile, None)
            drain(mine * steps, stages, free)

    return launch(
        kernel,
        (
            plgpu.SMEM((stages, WARPGROUPS, HALF, DEPTH), x.dtype, transforms=swizzled(DEPTH)),
            plgpu.SMEM((stages, columns, DEPTH), x.dtype, transforms=swizzled(DEPTH)),
            store_buffers(dtype),
            plgpu.Barrier(num_arrivals=WARPGROUPS + 1, num_barriers=stages),
            free_slots(tiles),
        ),
        *(x, head, labels, labelled, reference),
        out_type=(
            jax.ShapeDtypeStruct((rows, vocabulary), dtype),
            jax.ShapeDtypeStruct((2, wide, rows), jnp.float32),
        ),
        **shape(blocks, tiles),
    )


def _by_row(values, of_shape: tuple[int, int]):
    return lax.broadcast_in_dim(values, of_shape, (0,))
