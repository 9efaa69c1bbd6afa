"""NF4 tiles as the tensor cores' first operand: decoded in the registers of the warpgroup that multiplies.

The operand of 64 rows by 64 of the sum gives a thread, of 8 neighbours along the sum, two in each of two rows: bytes of
its codes lie far apart in the weight. So another warpgroup loads codes with wide loads, brings together what a thread
needs (4 bytes in a word, by permutations of bytes) and leaves the words in shared memory, where a warp's 32 stand side
by side. Then a nibble costs one shift, one shuffle that looks its value up, one multiplication and half a conversion.

Where the sum runs along I (`x @ W.T`), a tile is 128 rows of the weight by 64 columns, and each row has one scale.
Where it runs along O (`dy @ W`), it is 64 by 128: the operand's rows are the weight's columns, and each step along the
sum has a scale of its own, in both operands.

With `tables` along I, the loading warpgroup leaves a table of products for each row in place of its scale
(mosaic_gpu_tables.py), and no shuffle is needed.

The interpreter runs no inline assembly: with `staged`, codes stay as they are and plain array operations decode.
"""

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
    scaled_pair,
    shuffle,
    threads,
    word,
)
from pallas_kernels.nf4_linear.mosaic_gpu_tables import WORDS as TABLE
from pallas_kernels.nf4_linear.mosaic_gpu_tables import look_up as look_up_in_table
from pallas_kernels.nf4_linear.mosaic_gpu_tables import look_up_values, table_of, transposed, words_of

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


def scales_memory(stages: int, *, tables: bool, staged: bool):
    """Shared memory for so many tiles' scales, or tables of products."""
    if tables and not staged:
        return plgpu.SMEM((stages, SCALES * TABLE), jnp.int32)
    return plgpu.SMEM((stages, SCALES), jnp.float32)


def block_of_thread(stride: int, transpose: bool):
    """(128,) int32: from the tile's first, the block whose scale a thread of the loading warpgroup finds.

    Along I, each row of the tile has one. Along O, neighbouring threads have the two of a row, which lie in one line.
    """
    return (threads() >> 1) * stride + (threads() & 1) if transpose else threads() * stride


def store_tile(
    codes, scales, codes_ref, scales_ref, *, dtype: DTypeLike, transpose: bool, tables: bool, staged: bool
) -> None:
    """Leaves a tile's codes and scales in shared memory, for `decode_operand`.

    Args:
        codes: (rows, columns / 2) uint8 in `wide_layout`.
        scales: (SCALES,) f32, those of each thread's `block_of_thread`; left by columns of blocks.
        codes_ref: a slot of `codes_memory`.
        scales_ref: a slot of `scales_memory`.
        dtype: of the decoded weight.
        transpose: whether the sum runs along O.
        tables: whether products are left in place of scales; not along O.
        staged: whether array operations decode.
    """
    if staged:
        codes_ref[...] = codes
        scales_ref[...] = scales.reshape(ROWS, FRAGMENTS).T.reshape(SCALES) if transpose else scales
        return
    place = _place_along_o if transpose else _place_along_i

    @plgpu.inline_mgpu(arg_types=(wide_layout(transpose), EACH, plgpu.RefType(), plgpu.RefType()))
    def store(_, codes, scales, codes_ref, scales_ref):
        thread = arith.remui(utils.thread_idx(), i32(THREADS))
        place([_words(register) for register in codes.registers.flat], utils.memref_ptr(codes_ref), thread)
        pointer, scale = utils.memref_ptr(scales_ref), element(scales)
        if not tables:
            row, column = arith.divui(thread, i32(FRAGMENTS)), arith.remui(thread, i32(FRAGMENTS))
            _store(pointer, _sum(row, _times(column, ROWS)) if transpose else thread, scale)
            return
        for half, four in enumerate(table_of(scale, jnp.dtype(dtype))):
            _store(pointer, _table_at(half, thread), _vector(four))

    store(codes, scales, codes_ref, scales_ref)


def decode_operand(
    codes_ref,
    scales_ref,
    values,
    warpgroup,
    *,
    dtype: DTypeLike,
    transpose: bool,
    tables: bool,
    permuted: int = 0,
    staged: bool,
):
    """A warpgroup's operand (ROWS, DEPTH) of a tile: `values[code] * scale` rounded once.

    Args:
        codes_ref: a slot of `codes_memory`, as `store_tile` left it.
        scales_ref: likewise.
        values: (128,) f32, from `code_values`.
        warpgroup: its number, 0 or 1.
        dtype: bfloat16 or float16.
        transpose: whether the sum runs along O.
        tables: as for `store_tile`.
        permuted: of a thread's four words of codes, so many are looked up by permutations of bytes where there are no
            tables, the others by shuffles.
        staged: whether plain array operations do it.
    """
    dtype = jnp.dtype(dtype)
    if staged:
        return _decode_staged(codes_ref, scales_ref, values, warpgroup, dtype, transpose)
    layout = plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), EACH),
        return_type=plgpu.ShapeDtypeStruct((ROWS, DEPTH), dtype, layout),
    )
    def look_up(_, codes_ref, scales_ref, values):
        values, thread = element(values), utils.thread_idx()
        codes, scales = (utils.memref_ptr(ref) for ref in (codes_ref, scales_ref))
        registers = np.empty(layout.to_mgpu().registers_shape((ROWS, DEPTH)), dtype=object)
        if tables:
            registers.flat = fragment_by_tables(codes, scales, thread, dtype)
        else:
            fragment = fragment_along_o if transpose else fragment_along_i
            registers.flat = fragment(codes, scales, thread, _numbers(values, permuted), dtype)
        array = mgpu.FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=None)
        return fragmented_array.optimization_barrier(array)  # before whatever waits for the products in flight

    return look_up(codes_ref, scales_ref, values)


def fragment_along_i(codes, scales, thread, numbers, dtype) -> list:
    """A thread's registers of the operand, 8 neighbours of the sum after each other, of each row r and row r + 8."""
    warp, lane, row = _thread(thread)
    first = [_load(scales, arith.addi(row, i32(half * 8)), ir.F32Type.get()) for half in range(2)]
    found: dict = {}
    for half in range(2):
        for chunk in range(2):
            code = _load(codes, _along_i(warp, half, chunk, lane), word())
            number = numbers(2 * half + chunk, code)
            for byte in range(4):
                two = number[2 * byte + 1], number[2 * byte]
                found[4 * chunk + byte, half] = scaled_pair(two, (first[half],) * 2, dtype)
    return [found[eight, half] for eight in range(8) for half in range(2)]


def fragment_by_tables(codes, tables, thread, dtype) -> list:
    """Likewise, by tables in place of scales."""
    warp, lane, row = _thread(thread)
    four = ir.VectorType.get((4,), word())
    found: list = [None] * 16
    for half in range(2):
        at = arith.addi(row, i32(half * 8))
        negative, positive = (words_of(_load(tables, _table_at(sign, at), four)) for sign in range(2))
        for chunk in range(2):
            code = _load(codes, _along_i(warp, half, chunk, lane), word())
            found[8 * chunk + half : 8 * chunk + 8 : 2] = look_up_in_table(code, negative, positive, dtype)
    return found


def fragment_along_o(codes, scales, thread, numbers, dtype) -> list:
    """Likewise where the sum runs along the weight's rows: the nibbles of a byte are of rows r and r + 8."""
    warp, lane, _ = _thread(thread)
    of_fragment = arith.muli(arith.divui(thread, i32(THREADS)), i32(ROWS))
    mine = arith.addi(of_fragment, arith.muli(arith.remui(thread, i32(4)), i32(2)))
    two = ir.VectorType.get((2,), ir.F32Type.get())
    found = []
    for sixteen in range(4):
        number = numbers(sixteen, _load(codes, _along_o(warp, sixteen, lane), word()))
        for eight in range(2):
            both = _load(scales, arith.addi(mine, i32(16 * sixteen + 8 * eight)), two)
            scale = vector.extract(both, [], [0]), vector.extract(both, [], [1])
            found += [scaled_pair((number[at], number[at + 2]), scale, dtype) for at in (4 * eight + 1, 4 * eight)]
    return found


def _place_along_i(words, ref, thread) -> None:
    """16 bytes of a row become a word for each of the four threads that share the row."""
    row, chunk = arith.divui(thread, i32(2)), arith.remui(thread, i32(2))
    lane = arith.muli(arith.remui(row, i32(8)), i32(4))
    warp, half = arith.divui(row, i32(16)), arith.remui(arith.divui(row, i32(8)), i32(2))
    for fragment, four in enumerate(words):
        at = _along_i(arith.addi(warp, i32(4 * fragment)), half, chunk, lane)
        _store(ref, at, _vector(transposed(four)))


def _place_along_o(words, ref, thread) -> None:
    """8 bytes of four rows become words of four bytes for 8 threads, in nibbles of rows r and r + 8 of the operand."""
    sixteen = arith.divui(thread, i32(WARP))
    lane = arith.remui(thread, i32(WARP))
    quarter, warp = arith.divui(lane, i32(8)), arith.remui(lane, i32(8))
    high, low = i32(-0x0F0F0F10), i32(0x0F0F0F0F)  # 0xF0F0F0F0 as a signed number
    even, odd = [], []
    for first, second in words:
        even.append(arith.ori(arith.andi(first, high), arith.andi(arith.shrui(second, i32(4)), low)))
        odd.append(arith.ori(arith.andi(arith.shli(first, i32(4)), high), arith.andi(second, low)))
    for parity, four in enumerate((even, odd)):
        for pair_of_rows, one in enumerate(transposed(four)):
            row = 2 * pair_of_rows + parity
            _store(ref, _along_o(warp, sixteen, arith.addi(quarter, i32(4 * row))), one)


def _along_i(warp, half, chunk, lane):
    """Where a lane's word is; lanes of the two chunks that are stored together use other banks."""
    plane = _sum(_times(warp, 4), _times(half, 2), chunk)
    return _sum(_times(plane, WARP), arith.xori(_value(lane), _times(chunk, WARP // 2)))


def _along_o(warp, sixteen, lane):
    """Likewise; of the eight warps."""
    plane = _sum(_times(warp, 4), sixteen)
    return _sum(_times(plane, WARP), arith.xori(_value(lane), _times(warp, 4)))


def _numbers(values, permuted: int):
    """The function that looks up the f32 values of the eight nibbles of the i-th of a thread's four words of codes."""

    def look_up(i: int, code) -> list:
        if i < permuted:
            return look_up_values(code)
        return [shuffle(values, arith.shrui(code, i32(4 * n)) if n else code, lanes=16) for n in range(8)]

    return look_up


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


def _words(register) -> list:
    """The words of a register of bytes."""
    count = utils.bitwidth(register.type) // 32
    words = utils.bitcast(register, ir.VectorType.get((count,), word()))
    return [vector.extract(words, [], [i]) for i in range(count)]


def _load(pointer, index, kind):
    at = utils.getelementptr(pointer, [index], word())
    return llvm.load(kind, at, alignment=utils.bitwidth(kind) // 8)


def _store(pointer, index, value) -> None:
    llvm.store(value, utils.getelementptr(pointer, [index], word()), alignment=utils.bitwidth(value.type) // 8)


def _table_at(half: int, row):
    """Where a half of a row's table is: halves apart, so that neighbouring rows' stand side by side."""
    return _times(_sum(row, half * SCALES), TABLE // 2)


def _vector(words: list):
    return vector.from_elements(ir.VectorType.get((len(words),), word()), words)


def _value(number):
    return i32(number) if isinstance(number, int) else number


def _times(number, factor: int):
    return i32(number * factor) if isinstance(number, int) else arith.muli(number, i32(factor))


def _sum(first, *more):
    total = _value(first)
    for one in more:
        total = arith.addi(total, _value(one))
    return total
