"""NF4 codes looked up in the table of a block's sixteen products, rounded, which the loading warpgroup leaves.

A block's elements take sixteen values only, so that a table costs sixteen products and saves one for each element.

Along I, a thread has many elements of a block. It holds the table in registers as planes: the low bytes of all sixteen
and the high ones. A permutation of bytes picks four of eight bytes by four numbers of three bits, so that two of them
and a mask of the codes' fourth bits look up four codes in a plane: 21 instructions for eight elements, none of which
moves anything between threads.

Along O, a thread has two elements of each block. It reads them from the table in shared memory: 32 bytes in a row, so
that the tables of a warp's four blocks fill all banks once, and whatever lanes look up, no two want other words of a
bank. What is read for one element is 16 bits of the result: no scales, products or conversions remain.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.nf4_linear.mosaic_gpu_decode import i32, scaled_pair, word
from pallas_kernels.nf4_linear.reference import NF4_CODE

WORDS = 8  # of a block's table
ROW = 4 * 4 * WORDS  # bytes of four tables, which fill all banks of shared memory
LOW_BYTES, HIGH_BYTES = 0x6420, 0x7531  # of the four numbers in two words
PLACES = 0x1E1E1E1E  # where a table of two bytes a number has what the low nibbles of four bytes stand for, times two


def table_of(scale, dtype: jnp.dtype) -> list:
    """A block's table: the words of two numbers each."""
    numbers = [utils.c(float(value), ir.F32Type.get()) for value in NF4_CODE]
    return [utils.bitcast(scaled_pair(two, (scale, scale), dtype), word()) for two in zip(numbers[::2], numbers[1::2])]


def planes_of(table: list) -> tuple[list, list]:
    """As planes: 4 words of the eight negative codes, and 4 of the others; of each, two words of either plane."""
    fours = list(zip(table[::2], table[1::2], strict=True))
    low, high = ([utils.prmt(*four, i32(which)) for four in fours] for which in (LOW_BYTES, HIGH_BYTES))
    return low[:2] + high[:2], low[2:] + high[2:]


def look_up_in_planes(code, negative: list, positive: list, dtype: jnp.dtype) -> list:
    """Registers of two elements for each of a word's four bytes, the high nibble's first."""
    planes = [negative[:2] + positive[:2], negative[2:] + positive[2:]]
    shifted = arith.shli(code, i32(4))
    indices = arith.andi(code, i32(0x77777777))
    found = []
    for of_half, signs in ((indices, 0x9D8C), (arith.shrui(indices, i32(16)), 0xBFAE)):
        fourth_bits = utils.prmt(code, shifted, i32(signs))  # a byte of ones where a nibble has its fourth bit
        of_planes = []
        for table in planes:
            below, above = (utils.prmt(table[at], table[at + 1], of_half) for at in (0, 2))
            of_planes.append(arith.xori(below, arith.andi(arith.xori(below, above), fourth_bits)))
        low, high = of_planes
        found += [utils.prmt(low, high, i32(two)) for two in (0x4051, 0x6273)]
    return [_pair(pair, dtype) for pair in found]


def look_up_in_memory(code, tables, mine, rows: Sequence[int], dtype: jnp.dtype) -> list:
    """Registers of two elements: of bytes 0 and 1 their high nibbles and their low ones, and so of bytes 2 and 3.

    Args:
        code: a word of four bytes, whose nibbles are both looked up in the byte's table.
        tables: address of a block of tables in shared memory, a multiple of 256.
        mine: where a lane's table begins in a row of four, in bytes; four times in a word.
        rows: where the row of each byte's table begins.
        dtype: of the numbers.
    """
    low, high = arith.shli(code, i32(1)), arith.shrui(code, i32(3))
    low, high = (arith.ori(arith.andi(places, i32(PLACES)), mine) for places in (low, high))
    found = []
    for two in ((0, 1), (2, 3)):
        for places in (high, low):
            first, second = (_number(utils.prmt(places, tables, i32(0x7650 + at)), rows[at]) for at in two)
            found.append(_pair(utils.prmt(first, second, i32(0x5410)), dtype))
    return found


def _number(address, more: int):
    """A number of two bytes in shared memory, in a word."""
    byte, half = ir.IntegerType.get_signless(8), ir.IntegerType.get_signless(16)
    at = utils.getelementptr(llvm.inttoptr(llvm.PointerType.get(3), address), [more], byte)
    return arith.extui(word(), llvm.load(half, at, alignment=2))


def _pair(bits, dtype: jnp.dtype):
    return utils.bitcast(bits, ir.VectorType.get((2,), utils.dtype_to_ir_type(dtype)))
