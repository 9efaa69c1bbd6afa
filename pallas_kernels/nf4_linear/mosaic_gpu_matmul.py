"""x @ W.T and dy @ W over packed weights, for Hopper: weights are decoded inside the product, none is written.

Two warpgroups multiply, each half of a tile's rows; two others decode, by turns, the tile of the weight that the next
step needs into a ring of shared-memory slots, and have the copy engine put x's tile beside it. The decoders run ahead
by the length of the ring, into the next tile of the result while the multipliers write this one. Each asks for the
codes and scales of its next step before it decodes those of this one.

There are as many blocks as multiprocessors; block b computes tiles b, b + blocks, ... of the result, x's rows first, so
that blocks at work at the same time share codes in the cache.
"""

import dataclasses
import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _platform
from pallas_kernels._hopper import launch, swizzled
from pallas_kernels.nf4_linear.mosaic_gpu_decode import (
    BLOCK,
    TILE,
    Scales,
    code_values,
    codes_layout,
    decode,
    finish_scales,
    kernel_scales,
    load_scales,
    tiled_layout,
)

MULTIPLIERS, DECODERS = 2, 2
DEPTH = 64  # of a step, along the sum
WIDTH = TILE // DEPTH  # of a tile of the result
PIECE = 64  # rows and columns that leave through one slot of shared memory


@dataclasses.dataclass(frozen=True)
class MatmulTiles:
    """Tile sizes and schedule.

    Attributes:
        rows: of a tile of the result; 128 or 256.
        stages: slots of the ring; a multiple of DECODERS, so that each decoder has slots of its own.
        blocks: that share the work; None for as many as the GPU has multiprocessors.
        staged: whether plain array operations decode, for the interpreter.
    """

    rows: int = 256
    stages: int = 4
    blocks: int | None = None
    staged: bool = False


def suitable_tiles(rows: int, width: int) -> MatmulTiles:
    """Tiles of 256 rows, to decode less often, or of 128 where the multiprocessors then share the work better."""
    blocks = _platform.multiprocessors()

    def time(size: int) -> int:
        return -(-(-(-rows // size) * (width // WIDTH)) // blocks) * size

    return MatmulTiles(rows=128, stages=6) if time(128) < time(256) else MatmulTiles()  # 224 KiB either way


@functools.partial(jax.jit, static_argnames=("shape", "transpose", "tiles"), inline=True)  # for calls one by one
def multiply(x, codes, absmax, nested_absmax, offset, extra=None, *, shape, transpose: bool, tiles: MatmulTiles):
    """x @ W.T + low @ up.T, or x @ W + low @ up with `transpose`, for a packed W of `shape`, summed in f32.

    Args:
        x: (M, I), or (M, O) with `transpose`; M a multiple of tiles.rows, bfloat16 or float16.
        codes: as NF4Weight has them, and so the next three; without leading axes.
        absmax: of the blocks.
        nested_absmax: of double quantization.
        offset: of double quantization.
        extra: None or (low (M, R), up (O, R), or (R, I) with `transpose`), R a multiple of DEPTH, in x's dtype: steps
            more, whose tiles the copy engine loads as they are.
        shape: (O, I), both multiples of WIDTH.
        transpose: whether the sum runs over O.
        tiles: sizes.

    Returns:
        (M, O), or (M, I) with `transpose`, in x.dtype.
    """
    (rows, depth), dtype, staged = x.shape, x.dtype, tiles.staged
    width = shape[1] if transpose else shape[0]
    packed_steps, half, stages = depth // DEPTH, tiles.rows // MULTIPLIERS, tiles.stages
    steps = packed_steps + (0 if extra is None else extra[0].shape[1] // DEPTH)
    if rows % tiles.rows or depth % DEPTH or width % WIDTH:
        raise ValueError(
            f"M={rows} must be a multiple of {tiles.rows}, the sum's length {depth} of {DEPTH}, the width {width} of "
            f"{WIDTH}; pad x"
        )
    of_rows, of_width = rows // tiles.rows, width // WIDTH
    items = of_rows * of_width
    blocks = min(items, tiles.blocks or _platform.multiprocessors())
    weight_rows, weight_columns = (DEPTH, WIDTH) if transpose else (WIDTH, DEPTH)
    layout = tiled_layout(weight_columns)

    def kernel(refs, scratch):
        x_ref, codes_ref, *rest, out_ref = refs
        scales, extra_refs = Scales(*rest[: len(Scales._fields)]), rest[len(Scales._fields) :]
        x_smem, w_smem, out_smem, ready, free = scratch
        block, warpgroup = lax.axis_index("blocks"), lax.axis_index("warpgroup")
        mine = lax.div(items - block + (blocks - 1), jnp.int32(blocks))  # tiles of this block
        total = mine * steps

        def corner(n):
            """First row and column of the n-th tile of this block."""
            item = block + n * blocks
            return lax.rem(item, jnp.int32(of_rows)) * tiles.rows, lax.div(item, jnp.int32(of_rows)) * WIDTH

        @pl.when(warpgroup < MULTIPLIERS)
        def _multiply():
            plgpu.set_max_registers(184, action="increase")
            my_rows = pl.ds(warpgroup * half, half)

            def tile(n, _):
                row, column = corner(n)

                def sum_up(acc_ref):
                    def step(k, _):
                        number = n * steps + k
                        slot = lax.rem(number, jnp.int32(stages))
                        plgpu.barrier_wait(ready.at[slot])
                        w = w_smem.at[slot] if transpose else w_smem.at[slot].transpose((1, 0))
                        plgpu.wgmma(acc_ref, x_smem.at[slot, my_rows], w)
                        plgpu.wgmma_wait(1)
                        before = lax.rem(number + (stages - 1), jnp.int32(stages))
                        pl.when(k > 0)(lambda: plgpu.barrier_arrive(free.at[before]))

                    lax.fori_loop(0, steps, step, None)
                    return acc_ref[...]

                acc = pl.run_scoped(sum_up, plgpu.ACC((half, WIDTH), jnp.float32))
                plgpu.barrier_arrive(free.at[lax.rem(n * steps + (steps - 1), jnp.int32(stages))])
                pieces = [(i, j) for i in range(0, half, PIECE) for j in range(0, WIDTH, PIECE)]
                for turn, (i, j) in enumerate(pieces):
                    piece = out_smem.at[warpgroup, turn % 2]
                    plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                    piece[...] = acc[i : i + PIECE, j : j + PIECE].astype(dtype)
                    plgpu.commit_smem()
                    at = (pl.ds(row + warpgroup * half + i, PIECE), pl.ds(column + j, PIECE))
                    plgpu.copy_smem_to_gmem(piece, out_ref.at[at])

            lax.fori_loop(0, mine, tile, None)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup >= MULTIPLIERS)
        def _decode():
            plgpu.set_max_registers(72, action="decrease")
            me = warpgroup - MULTIPLIERS
            values, offset = code_values(scales), scales.offset[0]

            def place(number):
                """First row and column of a step's tile of the result, and where along the sum it starts."""
                return *corner(lax.div(number, jnp.int32(steps))), lax.rem(number, jnp.int32(steps)) * DEPTH

            def load(number):
                _, column, k = place(number)
                k = jnp.minimum(k, (packed_steps - 1) * DEPTH)
                w_row, w_column = (k, column) if transpose else (column, k)
                across = pl.ds(lax.div(w_column, jnp.int32(2)), weight_columns // 2)
                codes = plgpu.load(codes_ref.at[pl.ds(w_row, weight_rows), across], layout=codes_layout(weight_rows))
                stride = shape[1] // BLOCK
                first = w_row * stride + lax.div(w_column, jnp.int32(BLOCK))
                return codes, *load_scales(scales, first, stride, weight_columns // BLOCK, staged=staged)

            def step(i, loaded):
                number = me + i * DECODERS
                slot = lax.rem(number, jnp.int32(stages))
                following = load(jnp.minimum(number + DECODERS, total - 1))
                pl.when(number >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))
                row, column, k = place(number)

                def copy(ref, at_row, at_column, smem):
                    size = [pl.ds(start, n) for start, n in zip((at_row, at_column), smem.shape[1:], strict=True)]
                    plgpu.copy_gmem_to_smem(ref.at[*size], smem.at[slot], ready.at[slot])

                def decode_tile():
                    copy(x_ref, row, k, x_smem)
                    codes, absmax, factor = loaded
                    found = finish_scales(scales, absmax, factor, offset, staged=staged)
                    w_smem[slot] = decode(codes, values, found, dtype=dtype, layout=layout, staged=staged)
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(ready.at[slot])

                def copy_tiles():
                    low_ref, up_ref = extra_refs
                    at = k - packed_steps * DEPTH
                    copy(low_ref, row, at, x_smem)
                    copy(up_ref, *((at, column) if transpose else (column, at)), w_smem)

                if extra is None:
                    decode_tile()
                else:
                    pl.when(k < packed_steps * DEPTH)(decode_tile)
                    pl.when(k >= packed_steps * DEPTH)(copy_tiles)
                return following

            turns = lax.div(total - me + (DECODERS - 1), jnp.int32(DECODERS))
            lax.fori_loop(0, turns, step, load(jnp.minimum(me, total - 1)))

            def drain(i, _):  # so that no barrier is left with an arrival that nobody saw
                plgpu.barrier_wait(free.at[lax.rem(me + i * DECODERS, jnp.int32(stages))])

            lax.fori_loop(jnp.maximum(turns - stages // DECODERS, 0), turns, drain, None)

    def tile(*shape: int):
        return plgpu.SMEM(shape, dtype, transforms=swizzled(shape[-1], dtype))

    scratch_types = (
        tile(stages, tiles.rows, DEPTH),
        tile(stages, weight_rows, weight_columns),
        tile(MULTIPLIERS, 2, PIECE, PIECE),
        plgpu.Barrier(num_arrivals=2, num_barriers=stages),  # x's tile, and the weight's
        plgpu.Barrier(num_arrivals=MULTIPLIERS, num_barriers=stages),
    )
    weight = codes.reshape(shape[0], shape[1] // 2), *kernel_scales(absmax, nested_absmax, offset)
    out = jax.ShapeDtypeStruct((rows, width), dtype)
    grid, warpgroups = {"blocks": blocks}, MULTIPLIERS + DECODERS
    return launch(kernel, scratch_types, x, *weight, *(extra or ()), out_type=out, grid=grid, warpgroups=warpgroups)
