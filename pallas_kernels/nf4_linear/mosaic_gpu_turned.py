"""x @ W.T and dy @ W over packed weights, for Hopper, turned: W @ x.T and W.T @ dy.T, decoded weights in registers.

The tensor cores take their first operand from registers. With the weight there no decoded tile goes through shared
memory, which is what bounds the product that keeps it there: of a step remain x's tile, written once and read by both
warpgroups, and the packed codes. Two warpgroups multiply, each 64 columns of the result by all rows of a tile, and
decode the next step's operand while the tensor cores work on this one's: one warpgroup's products hide the other's
decoding too. A third warpgroup has the copy engine bring x's tiles, and brings codes and scales itself, in the order in
which the others want them.

Blocks in a cluster of two take neighbouring columns of the result and share x's tile. Where there are fewer tiles than
multiprocessors, blocks share the sum: each writes a part in f32, and XLA adds them up.
"""

import dataclasses
import functools
import itertools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, vector

from pallas_kernels import _platform
from pallas_kernels._hopper import WARPGROUPS, drain, launch, swizzled
from pallas_kernels.nf4_linear.mosaic_gpu_decode import (
    BLOCK,
    WARP,
    Scales,
    code_values,
    finish_scales,
    i32,
    kernel_scales,
    load_scales_at,
    threads,
    word,
)
from pallas_kernels.nf4_linear.mosaic_gpu_fragments import (
    DEPTH,
    ROWS,
    SCALES,
    codes_memory,
    decode_operand,
    store_tile,
    tile_of_weight,
    wide_layout,
)

WIDTH = WARPGROUPS * ROWS  # columns of a tile of the result
PIECE = 64  # rows of the result that leave through one slot of shared memory


@dataclasses.dataclass(frozen=True)
class TurnedTiles:
    """Tile sizes and schedule.

    Attributes:
        rows: of a tile of the result; 64, 128 or 256.
        stages: slots of the ring.
        splits: parts of the sum, each another block's.
        pair: whether the blocks of a cluster of two take neighbouring columns and share x's tiles.
        blocks: that share the work; None for as many as the GPU has multiprocessors.
        staged: whether operands go through shared memory and array operations decode, for the interpreter.
    """

    rows: int = 256
    stages: int = 4
    splits: int = 1
    pair: bool = True
    blocks: int | None = None
    staged: bool = False


def suitable_turned(rows: int, depth: int, width: int) -> TurnedTiles:
    """Tiles and parts of the sum that should take the fewest cycles, by what goes through shared memory."""
    blocks, steps = _platform.multiprocessors(), depth // DEPTH

    def cycles(form: tuple[int, int]) -> float:
        """Those of a block: a step reads x's tile twice and writes it once, and decodes; parts are added up by XLA."""
        size, splits = form
        items = -(-rows // size) * (width // WIDTH) * splits
        of_parts = 5000 + splits * rows * width / 200 if splits > 1 else 0
        return -(-items // blocks) * (steps // splits) * (3 * size + 350) + of_parts

    parts = [one for one in (1, 2, 3, 4, 8) if steps % one == 0 and steps >= 2 * one]
    size, splits = min(itertools.product((64, 128, 256), parts), key=cycles)
    pair, stages = width % (2 * WIDTH) == 0, 4 if size == 256 else 8  # 172 KiB, 197 at most
    return TurnedTiles(rows=size, stages=stages, splits=splits, pair=pair)


@functools.partial(jax.jit, static_argnames=("shape", "transpose", "tiles"), inline=True)  # for calls one by one
def multiply_turned(x, codes, absmax, nested_absmax, offset, extra=None, *, shape, transpose: bool, tiles: TurnedTiles):
    """x @ W.T + low @ up.T, or x @ W + low @ up.T with `transpose`, for a packed W of `shape`, summed in f32.

    Args:
        x: (M, I), or (M, O) with `transpose`; M a multiple of tiles.rows, bfloat16 or float16.
        codes: as NF4Weight has them, and so the next three; without leading axes.
        absmax: of the blocks.
        nested_absmax: of double quantization.
        offset: of double quantization.
        extra: None or (low (M, R), up (O, R), or (I, R) with `transpose`), R a multiple of DEPTH, in x's dtype: steps
            more, whose operands are loaded as they are; where the sum is in parts they are XLA's.
        shape: (O, I), both multiples of WIDTH.
        transpose: whether the sum runs over O.
        tiles: sizes.

    Returns:
        (M, O), or (M, I) with `transpose`, in x.dtype.
    """
    (rows, depth), dtype, staged = x.shape, x.dtype, tiles.staged
    width, stages, splits = shape[1] if transpose else shape[0], tiles.stages, tiles.splits
    team = 2 if tiles.pair else 1
    packed_steps, left = divmod(depth, DEPTH * splits)
    more = extra if splits == 1 and extra is not None else ()
    steps = packed_steps + (more[0].shape[1] // DEPTH if more else 0)
    if rows % tiles.rows or left or packed_steps < 2 or width % (team * WIDTH):
        raise ValueError(
            f"M={rows} must be a multiple of {tiles.rows}, the sum's length {depth} of {DEPTH * splits} and more, the "
            f"width {width} of {team * WIDTH}; pad x"
        )
    of_rows = rows // tiles.rows
    items = of_rows * splits * (width // (team * WIDTH))
    blocks = min(items, (tiles.blocks or _platform.multiprocessors()) // team)
    weight_rows, weight_columns = tile_of_weight(transpose)

    def kernel(refs, scratch):
        x_ref, codes_ref, *rest, out_ref = refs
        scales, more_refs = Scales(*rest[: len(Scales._fields)]), rest[len(Scales._fields) :]
        x_smem, codes_smem, scales_smem, out_smem, staging, ready, free = scratch
        block, warpgroup = lax.axis_index("blocks"), lax.axis_index("warpgroup")
        mine = lax.div(items - block + (blocks - 1), jnp.int32(blocks))  # tiles of this block

        def corner(n):
            """First row and column of the n-th tile of this block, and its part of the sum."""
            item = block + n * blocks
            rest = lax.div(item, jnp.int32(of_rows))
            place = lax.div(rest, jnp.int32(splits)) * team + (lax.axis_index("pair") if tiles.pair else 0)
            return lax.rem(item, jnp.int32(of_rows)) * tiles.rows, place * WIDTH, lax.rem(rest, jnp.int32(splits))

        @pl.when(warpgroup < WARPGROUPS)
        def _multiply():
            plgpu.set_max_registers(216, action="increase")
            values = code_values(scales)

            def slot_of(number):
                return lax.rem(number, jnp.int32(stages))

            def decoded(number):
                slot = slot_of(number)
                plgpu.barrier_wait(ready.at[slot])
                return decode_operand(
                    *(codes_smem.at[slot], scales_smem.at[slot], values, warpgroup),
                    dtype=dtype,
                    transpose=transpose,
                    staged=staged,
                )

            def tile(n, _):
                row, column, split = corner(n)
                mine_of_width = pl.ds(column + warpgroup * ROWS, ROWS)

                def sum_up(acc_ref):
                    def multiply(number, operand):
                        if staged:
                            staging[warpgroup] = operand
                            plgpu.commit_smem()
                            operand = staging.at[warpgroup]
                        plgpu.wgmma(acc_ref, operand, x_smem.at[slot_of(number)].transpose((1, 0)))

                    def multiply_next(number, operands):
                        """Begins a step's products and gives back the slot of those before, which are done."""
                        before, operand = operands
                        multiply(number, operand)
                        plgpu.wgmma_wait(1)
                        if not staged:
                            in_use(before)
                        plgpu.barrier_arrive(free.at[slot_of(number - 1)])
                        return operand

                    def step(number, operands):
                        return multiply_next(number, operands), decoded(number + 1)

                    def two_steps(turn, operands):
                        return step(first + 2 * turn + 2, step(first + 2 * turn + 1, operands))

                    first = n * steps
                    operand = decoded(first)
                    multiply(first, operand)
                    operands = operand, decoded(first + 1)
                    operands = lax.fori_loop(0, (packed_steps - 2) // 2, two_steps, operands)
                    if packed_steps % 2:
                        operands = step(first + packed_steps - 2, operands)
                    for k in range(packed_steps, steps):
                        operand = multiply_next(first + k - 1, operands)
                        plgpu.barrier_wait(ready.at[slot_of(first + k)])
                        source = more_refs[1].at[mine_of_width, pl.ds((k - packed_steps) * DEPTH, DEPTH)]
                        operands = operand, plgpu.load(source, layout=plgpu.Layout.WGMMA, optimized=False)
                    multiply(first + steps - 1, operands[1])
                    if not staged:
                        in_use(operands[0])
                    return acc_ref[...]

                acc = pl.run_scoped(sum_up, plgpu.ACC((ROWS, tiles.rows), jnp.float32))
                for back in (2, 1):
                    plgpu.barrier_arrive(free.at[slot_of((n + 1) * steps - back)])
                if splits > 1:
                    store_part(acc, out_ref.at[split, pl.ds(row, tiles.rows), mine_of_width], staged=staged)
                    return
                for turn in range(tiles.rows // PIECE):
                    piece = out_smem.at[warpgroup, turn % 2]
                    plgpu.wait_smem_to_gmem(min(1, tiles.rows // PIECE - 1), wait_read_only=True)
                    turned = acc[:, turn * PIECE : (turn + 1) * PIECE].astype(dtype)
                    if staged:
                        piece[...] = turned.T
                    else:
                        piece.transpose((1, 0))[...] = turned
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(piece, out_ref.at[pl.ds(row + turn * PIECE, PIECE), mine_of_width])

            lax.fori_loop(0, mine, tile, None)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == WARPGROUPS)
        def _feed():
            plgpu.set_max_registers(72, action="decrease")
            offset, stride, total = scales.offset[0], shape[1] // BLOCK, mine * steps
            of_tile = threads() * stride  # blocks from the tile's first; in two columns of blocks along O
            if transpose:
                of_tile = (threads() & (ROWS - 1)) * stride + (threads() >> (ROWS.bit_length() - 1))

            def place(number):
                """First row and column of a step's tile of the result, and where along the sum it starts."""
                row, column, split = corner(lax.div(number, jnp.int32(steps)))
                return row, column, (split * steps + lax.rem(number, jnp.int32(steps))) * DEPTH

            def load(number):
                _, column, k = place(jnp.minimum(number, total - 1))
                k = jnp.minimum(k, (splits * packed_steps - 1) * DEPTH)
                w_row, w_column = (k, column) if transpose else (column, k)
                across = pl.ds(lax.div(w_column, jnp.int32(2)), weight_columns // 2)
                codes_of_tile = codes_ref.at[pl.ds(w_row, weight_rows), across]
                codes = plgpu.load(codes_of_tile, layout=wide_layout(transpose), optimized=False)
                first = w_row * stride + lax.div(w_column, jnp.int32(BLOCK))
                return codes, *load_scales_at(scales, first + of_tile, staged=staged)

            def step(number, loaded):
                slot = lax.rem(number, jnp.int32(stages))
                row, _, k = place(number)
                pl.when(number >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))

                def copy(ref, first):
                    source = ref.at[pl.ds(row, tiles.rows), pl.ds(first, DEPTH)]
                    shared = "pair" if tiles.pair else None
                    plgpu.copy_gmem_to_smem(source, x_smem.at[slot], ready.at[slot], collective_axes=shared)

                if more_refs:
                    pl.when(k < depth)(lambda: copy(x_ref, k))
                    pl.when(k >= depth)(lambda: copy(more_refs[0], k - depth))
                else:
                    copy(x_ref, k)
                codes, absmax, factor = loaded
                found = finish_scales(scales, absmax, factor, offset, staged=staged)
                store_tile(codes, found, codes_smem.at[slot], scales_smem.at[slot], transpose=transpose, staged=staged)
                following = load(number + 2)  # in front of a barrier, behind which LLVM moves no load to its use
                plgpu.barrier_arrive(ready.at[slot])
                return following

            def two_steps(turn, loaded):  # two, so that nothing waits for a load to move it to other registers
                return tuple(step(2 * turn + i, one) for i, one in enumerate(loaded))

            def last_step():
                step(total - 1, loaded[0])

            loaded = lax.fori_loop(0, lax.div(total, jnp.int32(2)), two_steps, (load(jnp.int32(0)), load(jnp.int32(1))))
            pl.when(lax.rem(total, jnp.int32(2)) == 1)(last_step)
            drain(total, stages, free)

    def tile(*shape: int):
        return plgpu.SMEM(shape, dtype, transforms=swizzled(shape[-1], dtype))

    if tiles.pair:
        free = plgpu.ClusterBarrier(collective_axes=("pair",), num_arrivals=WARPGROUPS, num_barriers=stages)
    else:
        free = plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages)
    scratch_types = (
        tile(stages, tiles.rows, DEPTH),
        codes_memory(stages, transpose, staged=staged),
        plgpu.SMEM((stages, SCALES), jnp.float32),
        tile(WARPGROUPS, 2, PIECE, ROWS) if splits == 1 else None,
        tile(WARPGROUPS, ROWS, DEPTH) if staged else None,
        plgpu.Barrier(num_arrivals=2, num_barriers=stages),  # x's tile, and the weight's
        free,
    )
    weight = codes.reshape(shape[0], shape[1] // 2), *kernel_scales(absmax, nested_absmax, offset)
    of_parts = ((splits, rows, width), jnp.float32) if splits > 1 else ((rows, width), dtype)
    out = jax.ShapeDtypeStruct(*of_parts)
    cluster = {"pair": 2} if tiles.pair else None
    y = launch(kernel, scratch_types, x, *weight, *more, out_type=out, grid={"blocks": blocks}, cluster=cluster)
    if splits == 1:
        return y
    if extra is None:
        return y.sum(0).astype(dtype)
    return (y.sum(0) + jnp.einsum("mr,or->mo", *extra, preferred_element_type=jnp.float32)).astype(dtype)


def in_use(operand) -> None:
    """Keeps the compiler from decoding into the registers of an operand that the tensor cores still read."""

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,))
    def read(_, array):
        words = [utils.bitcast(register, word()) for register in array.registers.flat]
        llvm.inline_asm(ir.Type.parse("!llvm.void"), words, "", ",".join("r" * len(words)), has_side_effects=True)

    read(operand)


def store_part(acc, ref, *, staged: bool) -> None:
    """Writes (ROWS, rows) f32 to (rows, ROWS) in memory from registers: 8 threads of a warp fill a sector."""
    if staged:
        ref[...] = acc.T
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()))
    def store(_, array, ref):
        thread = arith.remui(utils.thread_idx(), i32(4 * WARP))
        warp, lane = arith.divui(thread, i32(WARP)), arith.remui(thread, i32(WARP))
        column = arith.addi(arith.muli(warp, i32(16)), arith.divui(lane, i32(4)))
        row = arith.muli(arith.remui(lane, i32(4)), i32(2))

        def index(start, more: int):
            return arith.index_cast(ir.IndexType.get(), arith.addi(start, i32(more)))

        for number, register in enumerate(array.registers.flat):
            eight, half = divmod(number, 2)
            for i in range(2):
                one = vector.extract(register, [], [i])
                memref.store(one, ref, [index(row, 8 * eight + i), index(column, 8 * half)])

    store(acc, ref)
