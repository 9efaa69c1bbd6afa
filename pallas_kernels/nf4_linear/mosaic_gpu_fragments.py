"""NF4 tiles as the tensor cores' first operand: decoded in the registers of the warpgroup that multiplies.

The operand of 64 rows by 64 of the sum gives a thread, of 8 neighbours along the sum, two in each of two rows: bytes of
its codes lie far apart in the weight. So another warpgroup loads codes with wide loads, brings together what a thread
needs (4 bytes in a word, by permutations of bytes) and leaves the words in shared memory, where a warp's 32 stand side
by side, and for each block a table of products in place of its scale (mosaic_gpu_tables.py).

Where the sum runs along I (`x @ W.T`), a tile is 128 rows of the weight by 64 columns, and each row has one scale.
Where it runs along O (`dy @ W`), it is 64 by 128: the operand's rows are the weight's columns, and each step along the
sum has a scale of its own, in both operands.

The interpreter runs no inline assembly: with `staged`, codes and scales stay as they are and plain array operations
decode.
"""

import itertools

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jax.typing import DTypeLike
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.nf4_linear.mosaic_gpu_decode import (
    BLOCK,
    EACH,
    THREADS,
    WARP,
    element,
    i32,
    threads,
    use,
    word,
)
from pallas_kernels.nf4_linear.mosaic_gpu_tables import (
    ROW,
    look_up_in_memory,
    look_up_in_planes,
    planes_of,
    table_of,
)
from pallas_kernels.nf4_linear.mosaic_gpu_tables import WORDS as TABLE
from pallas_kernels.nf4_linear.mosaic_gpu_words import load, store, times, total, transposed, vector_of, words_of

ROWS, DEPTH = 64, 64  # of one operand: a warpgroup's
FRAGMENTS = 2  # operands of a tile, each another warpgroup's
WORDS = FRAGMENTS * ROWS * DEPTH // 8  # of a tile's codes
SCALES = FRAGMENTS * ROWS  # of a tile, whichever way it lies


def tile_of_weight(transpose: bool) -> tuple[int, int]:
    """Rows and columns of the weight's tile: FRAGMENTS operands side by side along the result."""
    return (DEPTH, FRAGMENTS * ROWS) if transpose else (FRAGMENTS * ROWS, DEPTH)


def wide_layout(transpose: bool):
    """How the loading warpgroup holds a tile's codes (rows, columns / 2) uint8: 4 words a thread.

    Along I, 16 neighbouring bytes of two rows. Along O, 8 neighbouring bytes of rows k, k + 1, k + 8 and k + 9.
    """
    rows, columns = tile_of_weight(transpose)
    if not transpose:
        return plgpu.Layout.WG_STRIDED((rows, columns // 2), vec_size=16)
    tiling = plgpu.Tiling(((rows, columns // 2), (16, columns // 2), (8, columns // 2), (2, 8)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-8,), lane_dims=(-4, -3), vector_dim=-1)


def codes_memory(stages: int, transpose: bool, *, staged: bool):
    """Shared memory for so many tiles' codes."""
    if staged:
        rows, columns = tile_of_weight(transpose)
        return plgpu.SMEM((stages, rows, columns // 2), jnp.uint8)
    return plgpu.SMEM((stages, WORDS), jnp.int32)


def scales_memory(stages: int, *, staged: bool):
    """Shared memory for so many tiles' tables of products, or with `staged` their scales."""
    return plgpu.SMEM((stages, SCALES), jnp.float32) if staged else plgpu.SMEM((stages, SCALES * TABLE), jnp.int32)


def block_of_thread(stride: int, transpose: bool):
    """(128,) int32: from the tile's first, the block whose scale a thread of the loading warpgroup finds.

    Along I, each row of the tile has one. Along O, neighbouring threads have the two of a row, which lie in one line,
    and four such pairs have rows two apart, whose tables fill shared memory's banks.
    """
    if not transpose:
        return threads() * stride
    row = (threads() >> 4) * 8 + (threads() >> 1 & 3) * 2 + (threads() >> 3 & 1)
    return row * stride + (threads() & 1)


def arrived(codes, scales, *, transpose: bool, staged: bool):
    """Waits for what has been loaded of two tiles, and brings together what threads of `decode_operand` need.

    The assembler has few counters for loads in flight, and waits for all that share one: for loads that this one's
    users come before it must not wait.

    Args:
        codes: two of (rows, columns / 2) uint8 in `wide_layout`.
        scales: two of (SCALES,) f32.
        transpose: whether the sum runs along O.
        staged: whether array operations decode; then codes stay as they are.

    Returns:
        For each tile (WORDS,) int32, of each thread 8 words, for `store_tile`.
    """
    if staged:
        return codes
    arrange = _arrange_along_o if transpose else _arrange_along_i
    wide, held = wide_layout(transpose), plgpu.Layout.WG_STRIDED((WORDS,), vec_size=1)
    result = plgpu.ShapeDtypeStruct((WORDS,), jnp.int32, held)

    @plgpu.inline_mgpu(arg_types=(wide, wide, EACH, EACH), return_type=(result, result))
    def run(_, first, second, *scales):
        tiles = [arrange([words_of(register) for register in one.registers.flat]) for one in (first, second)]
        use([*itertools.chain(*tiles), *(utils.bitcast(element(one), word()) for one in scales)])
        utils.warpgroup_barrier()
        vectors = [np.array([vector_of([one]) for one in words], object) for words in tiles]
        return tuple(mgpu.FragmentedArray(_registers=v, _layout=held.to_mgpu(), _is_signed=True) for v in vectors)

    return run(*codes, *scales)


def store_tile(codes, scales, codes_ref, scales_ref, *, dtype: DTypeLike, transpose: bool, staged: bool) -> None:
    """Leaves a tile's codes and tables of products in shared memory, for `decode_operand`.

    Args:
        codes: of `arrived`.
        scales: (SCALES,) f32, those of each thread's `block_of_thread`; left by columns of blocks with `staged`.
        codes_ref: a slot of `codes_memory`.
        scales_ref: a slot of `scales_memory`.
        dtype: of the decoded weight.
        transpose: whether the sum runs along O.
        staged: whether array operations decode.
    """
    if staged:
        codes_ref[...] = codes
        scales_ref[...] = scales.reshape(8, 2, 4, 2).transpose(3, 0, 2, 1).reshape(SCALES) if transpose else scales
        return
    place = _place_along_o if transpose else _place_along_i
    held = plgpu.Layout.WG_STRIDED((WORDS,), vec_size=1)

    @plgpu.inline_mgpu(arg_types=(held, EACH, plgpu.RefType(), plgpu.RefType()))
    def place_all(_, codes, scales, codes_ref, scales_ref):
        thread = arith.remui(utils.thread_idx(), i32(THREADS))
        words = [vector.extract(register, [], [0]) for register in codes.registers.flat]
        place(words, utils.memref_ptr(codes_ref), thread)
        pointer, table = utils.memref_ptr(scales_ref), table_of(element(scales), jnp.dtype(dtype))
        if transpose:
            _store_table_along_o(table, pointer, thread)
            return
        for half, four in enumerate(planes_of(table)):
            store(pointer, _table_at(half, thread), vector_of(four))

    place_all(codes, scales, codes_ref, scales_ref)


def decode_operand(
    codes_ref,
    scales_ref,
    values,
    warpgroup,
    *,
    dtype: DTypeLike,
    transpose: bool,
    staged: bool,
):
    """A warpgroup's operand (ROWS, DEPTH) of a tile: `values[code] * scale` rounded once.

    Args:
        codes_ref: a slot of `codes_memory`, as `store_tile` left it.
        scales_ref: likewise.
        values: (128,) f32, from `code_values`; used with `staged`, else products come from the tables.
        warpgroup: its number, 0 or 1.
        dtype: bfloat16 or float16.
        transpose: whether the sum runs along O.
        staged: whether plain array operations do it.
    """
    dtype = jnp.dtype(dtype)
    if staged:
        return _decode_staged(codes_ref, scales_ref, values, warpgroup, dtype, transpose)
    layout = plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((ROWS, DEPTH), dtype, layout),
    )
    def look_up(_, codes_ref, scales_ref):
        codes, tables = (utils.memref_ptr(ref) for ref in (codes_ref, scales_ref))
        registers = np.empty(layout.to_mgpu().registers_shape((ROWS, DEPTH)), dtype=object)
        fragment = fragment_along_o if transpose else fragment_along_i
        registers.flat = fragment(codes, tables, utils.thread_idx(), dtype)
        array = mgpu.FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=None)
        return fragmented_array.optimization_barrier(array)  # before whatever waits for the products in flight

    return look_up(codes_ref, scales_ref)


def fragment_along_i(codes, tables, thread, dtype) -> list:
    """A thread's registers of the operand, 8 neighbours of the sum after each other, of each row r and row r + 8."""
    warp, lane, row = _thread(thread)
    four = ir.VectorType.get((4,), word())
    found: list = [None] * 16
    for half in range(2):
        at = arith.addi(row, i32(half * 8))
        negative, positive = (words_of(load(tables, _table_at(sign, at), four)) for sign in range(2))
        for chunk in range(2):
            code = load(codes, _along_i(warp, half, chunk, lane), word())
            found[8 * chunk + half : 8 * chunk + 8 : 2] = look_up_in_planes(code, negative, positive, dtype)
    return found


def fragment_along_o(codes, tables, thread, dtype) -> list:
    """Likewise where the sum runs along the weight's rows: the nibbles of a byte are of rows r and r + 8."""
    warp, lane, _ = _thread(thread)
    mine = times(arith.remui(thread, i32(4)), 4 * TABLE * 0x01010101)
    of_fragment = times(arith.divui(thread, i32(THREADS)), 4 * TABLE * ROWS)
    of_fragment = arith.addi(llvm.ptrtoint(word(), tables), of_fragment)
    found = []
    for sixteen in range(4):
        code = load(codes, _along_o(warp, sixteen, lane), word())
        rows = [(4 * sixteen + byte) * ROW for byte in range(4)]
        found += look_up_in_memory(code, of_fragment, mine, rows, dtype)
    return found


def _arrange_along_i(words: list) -> list:
    """Of two rows' 16 bytes, words for each of the four threads that share a row."""
    return [one for four in words for one in transposed(four)]


def _place_along_i(words: list, ref, thread) -> None:
    row, chunk = arith.divui(thread, i32(2)), arith.remui(thread, i32(2))
    lane = arith.muli(arith.remui(row, i32(8)), i32(4))
    warp, half = arith.divui(row, i32(16)), arith.remui(arith.divui(row, i32(8)), i32(2))
    for fragment in range(FRAGMENTS):
        at = _along_i(arith.addi(warp, i32(4 * fragment)), half, chunk, lane)
        store(ref, at, vector_of(words[4 * fragment : 4 * fragment + 4]))


def _arrange_along_o(words: list) -> list:
    """Of four rows' 8 bytes, words of four bytes for 8 threads, in nibbles of rows r and r + 8 of the operand."""
    high, low = i32(-0x0F0F0F10), i32(0x0F0F0F0F)  # 0xF0F0F0F0 as a signed number
    even, odd = [], []
    for first, second in words:
        even.append(arith.ori(arith.andi(first, high), arith.andi(arith.shrui(second, i32(4)), low)))
        odd.append(arith.ori(arith.andi(arith.shli(first, i32(4)), high), arith.andi(second, low)))
    return [one for both in zip(transposed(even), transposed(odd), strict=True) for one in both]


def _place_along_o(words: list, ref, thread) -> None:
    sixteen = arith.divui(thread, i32(WARP))
    lane = arith.remui(thread, i32(WARP))
    quarter, warp = arith.divui(lane, i32(8)), arith.remui(lane, i32(8))
    # Addresses that depend on the slot cannot be held in registers from step to step, which are few here.
    first = arith.addi(llvm.ptrtoint(word(), ref), times(_along_o(warp, sixteen, quarter), 4))
    for row, one in enumerate(words):
        at = llvm.inttoptr(llvm.PointerType.get(3), arith.xori(first, i32(16 * row)))
        llvm.store(one, at, alignment=4)


def _along_i(warp, half, chunk, lane):
    """Where a lane's word is; lanes of the two chunks that are stored together use other banks."""
    plane = total(times(warp, 4), times(half, 2), chunk)
    return total(times(plane, WARP), arith.xori(total(lane), times(chunk, WARP // 2)))


def _along_o(warp, sixteen, lane):
    """Likewise; of the eight warps."""
    plane = total(times(warp, 4), sixteen)
    return total(times(plane, WARP), arith.xori(total(lane), times(warp, 4)))


def _decode_staged(codes_ref, scales_ref, values, warpgroup, dtype, transpose: bool):
    codes = codes_ref[...]
    tile = values[jnp.stack([codes >> 4, codes & 15], -1).reshape(codes.shape[0], -1).astype(jnp.int32)]
    scales = scales_ref[...].reshape(-1, tile.shape[0])
    tile = (tile * jnp.repeat(scales.T, BLOCK, axis=1)).astype(dtype)
    tile = tile.T if transpose else tile
    return jnp.where(warpgroup == 0, tile[:ROWS], tile[ROWS:])


def _thread(thread):
    """Of a thread of the multiplying warpgroups: its warp, its lane and its first row of the tile."""
    warp, lane = arith.divui(thread, i32(WARP)), arith.remui(thread, i32(WARP))
    return warp, lane, arith.addi(arith.muli(warp, i32(16)), arith.divui(lane, i32(4)))


def _store_table_along_o(table: list, pointer, thread) -> None:
    """Leaves a table of four rows two apart side by side, by columns of blocks; of those next to it the other half."""
    column = arith.remui(thread, i32(FRAGMENTS))
    four = total(times(arith.divui(thread, i32(8)), 4), arith.remui(arith.divui(thread, i32(2)), i32(4)))
    at = times(total(four, times(column, ROWS)), TABLE)
    second = arith.cmpi(arith.CmpIPredicate.ne, column, i32(0))
    halves = table[: TABLE // 2], table[TABLE // 2 :]
    for turn in range(2):  # eight threads that store at once fill all banks
        chosen = [arith.select(second, *both) for both in zip(halves[1 - turn], halves[turn], strict=True)]
        half = arith.xori(column, i32(turn))
        store(pointer, total(at, times(half, TABLE // 2)), vector_of(chosen))


def _table_at(half: int, row):
    """Where a half of a row's table is: halves apart, so that neighbouring rows' stand side by side."""
    return times(total(row, half * SCALES), TABLE // 2)
