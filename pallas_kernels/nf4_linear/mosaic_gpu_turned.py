"""x @ W.T and dy @ W over packed weights, for Hopper, turned: W @ x.T and W.T @ dy.T, decoded weights in registers.

The tensor cores take their first operand from registers. With the weight there no decoded tile goes through shared
memory, which is what bounds the product that keeps it there: of a step remain x's tile, written once and read by both
warpgroups, and the packed codes. Two warpgroups multiply, each 64 columns of the result by all rows of a tile, and
decode the next step's operand while the tensor cores work on this one's: one warpgroup's products hide the other's
decoding too. A third warpgroup has the copy engine bring x's tiles, and brings codes and scales itself, in the order in
which the others want them.

Blocks in a cluster of two take neighbouring columns of the result and share x's tile. Where tiles are fewer than
multiprocessors, parts of a tile's sum are blocks of one cluster, or clusters share the steps of all tiles evenly; parts
are added in the kernel (mosaic_gpu_shares.py).
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import utils

from pallas_kernels import _platform
from pallas_kernels._hopper import WARPGROUPS, drain, launch, swizzled
from pallas_kernels.nf4_linear.mosaic_gpu_decode import (
    BLOCK,
    Scales,
    code_values,
    kernel_scales,
    load_absmax_at,
    load_absmax_value,
    load_factor_at,
    multiply_scales,
    use,
    word,
)
from pallas_kernels.nf4_linear.mosaic_gpu_fragments import (
    DEPTH,
    ROWS,
    arrived,
    block_of_thread,
    codes_memory,
    decode_operand,
    scales_memory,
    store_tile,
    tile_of_weight,
    wide_layout,
)
from pallas_kernels.nf4_linear.mosaic_gpu_shares import Shares, add_part, leave_part, sum_in_cluster
from pallas_kernels.nf4_linear.mosaic_gpu_turned_tiles import LEAST, WIDTH, TurnedTiles

PIECE = 64  # rows of the result that are copied to memory at once, at most


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
            more, whose operands are loaded as they are.
        shape: (O, I), both multiples of WIDTH.
        transpose: whether the sum runs over O.
        tiles: sizes.

    Returns:
        (M, O), or (M, I) with `transpose`, in x.dtype.
    """
    (rows, depth), dtype, staged = x.shape, x.dtype, tiles.staged
    width, stages = shape[1] if transpose else shape[0], tiles.stages
    team, parts = 2 if tiles.pair else 1, tiles.parts
    packed_steps = depth // DEPTH
    unit = max(packed_steps // parts, 1) if parts > 1 else tiles.unit or packed_steps
    in_cluster = parts > 1 and not staged  # blocks send their parts; the interpreter has them left in memory
    own_rows, piece_rows = tiles.rows // parts, min(PIECE, tiles.rows // parts)  # that a block writes, and at once
    if own_rows % LEAST or (parts > 1 and stages < 4):
        raise ValueError(f"{tiles.rows} rows in {parts} parts must be multiples of {LEAST}, {stages} stages at least 4")
    if rows % tiles.rows or depth % (DEPTH * unit) or unit % 2 or width % (team * WIDTH):
        raise ValueError(
            f"M={rows} must be a multiple of {tiles.rows}, the sum's length {depth} of {DEPTH * unit} and of "
            f"{2 * DEPTH}, the width {width} of {team * WIDTH}; pad x"
        )
    more = extra or ()
    first_steps = more[0].shape[1] // DEPTH if more else 0  # of a tile: not packed
    steps, of_rows = first_steps + packed_steps, rows // tiles.rows
    items = of_rows * (width // (team * WIDTH))
    blocks = items * parts if parts > 1 else (tiles.blocks or _platform.multiprocessors()) // team
    shares = Shares(items, packed_steps, unit, blocks)
    pieces = shares.pieces
    weight_rows, weight_columns = tile_of_weight(transpose)
    form: dict[str, Any] = {"dtype": dtype, "transpose": transpose, "staged": staged}

    def kernel(refs, scratch):
        x_ref, codes_ref, *rest, parts_ref, out_ref = refs
        scales, more_refs = Scales(*rest[: len(Scales._fields)]), rest[len(Scales._fields) :]
        x_smem, codes_smem, scales_smem, out_smem, staging, ready, free, all_done, all_sent = scratch
        x_smem, *received = x_smem if in_cluster else (x_smem,)
        block, warpgroup = lax.axis_index("blocks"), lax.axis_index("warpgroup")
        member = lax.axis_index("pair") if tiles.pair else jnp.int32(0)
        part = lax.axis_index("part") if parts > 1 else jnp.int32(0)
        piece = pieces - parts * (1 + block) + part
        begin, end = shares.start(piece), shares.start(piece + 1)

        def slot_of(number):
            return lax.rem(number.astype(jnp.uint32), jnp.uint32(stages)).astype(jnp.int32)

        def in_tile(step):
            """The tile of one of all packed steps, and the step's number there."""
            return lax.div(step, jnp.int32(packed_steps)), lax.rem(step, jnp.int32(packed_steps))

        def corner(item):
            """First row and column of a tile."""
            place = lax.div(item, jnp.int32(of_rows)) * team + member
            return lax.rem(item, jnp.int32(of_rows)) * tiles.rows, place * WIDTH

        @pl.when(warpgroup < WARPGROUPS)
        def _multiply():
            plgpu.set_max_registers(216, action="increase")
            values = code_values(scales)
            flags = None
            if shares.cut and parts == 1 and not staged:
                flags = pl.get_global(plgpu.SemaphoreType.REGULAR((pieces, team, WARPGROUPS)))

            def leave(acc):
                leave_part(acc, parts_ref.at[piece, member, warpgroup], staged=staged)
                if flags is not None:
                    plgpu.semaphore_signal(flags.at[piece, member, warpgroup], memory_scope="gpu")

            def with_part(acc, piece):
                if flags is not None:
                    plgpu.semaphore_wait(flags.at[piece, member, warpgroup], decrement=False, memory_scope="gpu")
                return add_part(acc, parts_ref.at[piece, member, warpgroup], staged=staged)

            def decoded(number):
                slot = slot_of(number)
                plgpu.barrier_wait(ready.at[slot])
                return decode_operand(codes_smem.at[slot], scales_smem.at[slot], values, warpgroup, **form)

            def tile(item, number):
                """One tile's steps of this piece, the first of which is the number-th of the piece."""
                row, column = corner(item)
                mine_of_width = pl.ds(column + warpgroup * ROWS, ROWS)
                k = jnp.maximum(begin - item * packed_steps, 0)
                until = jnp.minimum(end - item * packed_steps, packed_steps)
                packed = number + jnp.where(k == 0, first_steps, 0)
                behind = packed + until - k

                def sum_up(acc_ref):
                    def multiply(number, operand):
                        if staged:
                            staging[warpgroup] = operand
                            plgpu.commit_smem()
                            operand = staging.at[warpgroup]
                        plgpu.wgmma(acc_ref, operand, x_smem.at[slot_of(number)].transpose((1, 0)))

                    def multiply_as_it_is(i, _):
                        plgpu.barrier_wait(ready.at[slot_of(number + i)])
                        source = more_refs[1].at[mine_of_width, pl.ds(i * DEPTH, DEPTH)]
                        multiply(number + i, plgpu.load(source, layout=plgpu.Layout.WGMMA, optimized=False))
                        plgpu.wgmma_wait(0)
                        plgpu.barrier_arrive(free.at[slot_of(number + i)])

                    def step(number, operands):
                        """Begins a step's products, frees the slot of those before and decodes for those after."""
                        before, operand = operands
                        multiply(number, operand)
                        plgpu.wgmma_wait(1)
                        if not staged:
                            in_use(before)
                        plgpu.barrier_arrive(free.at[slot_of(number - 1)])
                        return operand, decoded(number + 1)

                    def two_steps(turn, operands):
                        return step(packed + 2 * turn + 2, step(packed + 2 * turn + 1, operands))

                    if more_refs:
                        lax.fori_loop(0, packed - number, multiply_as_it_is, None)
                    operand = decoded(packed)
                    multiply(packed, operand)
                    operands = operand, decoded(packed + 1)
                    operands = lax.fori_loop(0, lax.div(until - k - 2, jnp.int32(2)), two_steps, operands)
                    multiply(behind - 1, operands[1])
                    if not staged:
                        in_use(operands[0])
                    return acc_ref[...]

                acc = pl.run_scoped(sum_up, plgpu.ACC((ROWS, tiles.rows), jnp.float32))
                for back in (2, 1):
                    plgpu.barrier_arrive(free.at[slot_of(behind - back)])

                def write(total):
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    for turn in range(own_rows // piece_rows):
                        slot = out_smem.at[warpgroup, turn]
                        turned = total[:, turn * piece_rows : (turn + 1) * piece_rows].astype(dtype)
                        if staged:
                            slot[...] = turned.T
                        else:
                            slot.transpose((1, 0))[...] = turned
                        plgpu.commit_smem()
                        mine_of_rows = pl.ds(row + part * own_rows + turn * piece_rows, piece_rows)
                        plgpu.copy_smem_to_gmem(slot, out_ref.at[mine_of_rows, mine_of_width])

                def add_and_write():
                    others = shares.piece_of((item + 1) * packed_steps - 1) - piece
                    write(lax.fori_loop(0, others, lambda i, acc: with_part(acc, piece + 1 + i), acc))

                if parts > 1:
                    memory = parts_ref.at[block, member, warpgroup] if staged else received[0].at[warpgroup]
                    barriers = all_done, all_sent.at[warpgroup]
                    write(sum_in_cluster(acc, part, parts, memory, *barriers, staged=staged))
                elif shares.cut:
                    pl.when(k > 0)(lambda: leave(acc))
                    pl.when(k == 0)(add_and_write)
                else:
                    write(acc)
                return behind

            lax.fori_loop(in_tile(begin)[0], in_tile(end - 1)[0] + 1, tile, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == WARPGROUPS)
        def _feed():
            plgpu.set_max_registers(72, action="decrease")
            offset, stride = scales.offset[0], shape[1] // BLOCK
            of_tile = block_of_thread(stride, transpose)

            def with_first_steps(step):
                """The place of one of all packed steps in the row of all steps."""
                item, k = in_tile(step)
                return item * steps + jnp.where(k == 0, 0, first_steps + k)

            origin = with_first_steps(begin)
            total = with_first_steps(end) - origin

            def place(number):
                """First row and column of a step's tile of the result, and which of the packed steps it is."""
                item = lax.div(origin + number, jnp.int32(steps))
                return *corner(item), lax.rem(origin + number, jnp.int32(steps)) - first_steps

            def weight_of(number):
                """First row and column of a step's tile of the weight, and the blocks whose scales threads find."""
                _, column, k = place(jnp.minimum(number, total - 1))
                along = jnp.maximum(k, 0) * DEPTH  # a multiple of DEPTH for the compiler too, for whole loads
                row, column = (along, column) if transpose else (column, along)
                return row, column, row * stride + lax.div(column, jnp.int32(BLOCK)) + of_tile

            def load_absmax(turn):
                return tuple(load_absmax_at(scales, weight_of(2 * turn + i)[2], staged=staged) for i in range(2))

            def load(turn, absmax):
                """Asks for two steps' codes and what their scales are made of, and for the absmax of the next two."""
                codes, values, factors = [], [], []
                for i in range(2):
                    row, column, blocks = weight_of(2 * turn + i)
                    across = pl.ds(lax.div(column, jnp.int32(2)), weight_columns // 2)
                    tile = codes_ref.at[pl.ds(row, weight_rows), across]
                    codes.append(plgpu.load(tile, layout=wide_layout(transpose), optimized=False))
                    values.append(load_absmax_value(scales, absmax[i], staged=staged))
                    factors.append(load_factor_at(scales, blocks, staged=staged))
                return tuple(codes), tuple(values), tuple(factors), load_absmax(turn + 1)

            def ask_for_rows(number):
                slot = slot_of(number)
                row, _, k = place(number)

                def copy(ref, k):
                    source = ref.at[pl.ds(row, tiles.rows), pl.ds(k * DEPTH, DEPTH)]
                    shared = "pair" if tiles.pair else None
                    plgpu.copy_gmem_to_smem(source, x_smem.at[slot], ready.at[slot], collective_axes=shared)

                if more_refs:
                    pl.when(k >= 0)(lambda: copy(x_ref, k))
                    pl.when(k < 0)(lambda: copy(more_refs[0], k + first_steps))
                else:
                    copy(x_ref, k)

            def fill(number, codes, scales_of_tile):
                slot = slot_of(number)

                @pl.when(number >= stages)
                def _again():
                    plgpu.barrier_wait(free.at[slot])
                    ask_for_rows(number)

                store_tile(codes, scales_of_tile, codes_smem.at[slot], scales_smem.at[slot], **form)
                plgpu.barrier_arrive(ready.at[slot])

            def two_steps(turn, loaded):
                """Fills two slots with what is loaded, after it has asked for what the next two get."""
                codes, values, factors, absmax = loaded
                found = [multiply_scales(scales, *one, offset, staged=staged) for one in zip(values, factors)]
                words = arrived(codes, found, transpose=transpose, staged=staged)
                following = load(turn + 1, absmax)
                fill(2 * turn, words[0], found[0])
                pl.when(2 * turn + 1 < total)(lambda: fill(2 * turn + 1, words[1], found[1]))
                return following

            first = load_absmax(jnp.int32(0))  # three loads wait for each other: meanwhile rows arrive
            lax.fori_loop(0, jnp.minimum(total, stages), lambda number, _: ask_for_rows(number), None)
            lax.fori_loop(0, lax.div(total + 1, jnp.int32(2)), two_steps, load(jnp.int32(0), first))
            drain(total, stages, free)

    def tile(*shape: int):
        return plgpu.SMEM(shape, dtype, transforms=swizzled(shape[-1], dtype))

    if tiles.pair:
        free = plgpu.ClusterBarrier(collective_axes=("pair",), num_arrivals=WARPGROUPS, num_barriers=stages)
    else:
        free = plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages)
    ring, one = tile(stages, tiles.rows, DEPTH), {"collective_axes": ("part",)}
    scratch_types = (
        plgpu.RefUnion(ring, plgpu.SMEM((WARPGROUPS, parts, ROWS, own_rows), jnp.float32)) if in_cluster else ring,
        codes_memory(stages, transpose, staged=staged),
        scales_memory(stages, staged=staged),
        tile(WARPGROUPS, own_rows // piece_rows, piece_rows, ROWS),
        tile(WARPGROUPS, ROWS, DEPTH) if staged else None,
        plgpu.Barrier(num_arrivals=2, num_barriers=stages),  # x's tile, and the weight's
        free,
        plgpu.ClusterBarrier(num_arrivals=WARPGROUPS, **one) if parts > 1 else None,
        plgpu.ClusterBarrier(num_barriers=WARPGROUPS, **one) if parts > 1 else None,
    )
    weight = codes.reshape(shape[0], shape[1] // 2), *kernel_scales(absmax, nested_absmax, offset)
    left = (pieces // parts, team, WARPGROUPS, *((parts, parts) if parts > 1 else ()), ROWS, own_rows)
    left = left if shares.cut and not in_cluster else (1,) * len(left)
    out = jax.ShapeDtypeStruct(left, jnp.float32), jax.ShapeDtypeStruct((rows, width), dtype)
    cluster = ({"pair": 2} if tiles.pair else {}) | ({"part": parts} if parts > 1 else {})
    grid = {"blocks": pieces // parts}  # of clusters, where there are any
    return launch(kernel, scratch_types, x, *weight, *more, out_type=out, grid=grid, cluster=cluster)[1]


def in_use(operand) -> None:
    """Keeps the compiler from decoding into the registers of an operand that the tensor cores still read."""

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,))
    def read(_, array):
        use([utils.bitcast(register, word()) for register in array.registers.flat])

    read(operand)
