"""NF4 codes looked up by permutations of bytes, in a table of a row's sixteen products.

Where a row of a tile has one scale, its elements take sixteen values only. The loading warpgroup makes them, rounded,
and leaves them in shared memory as planes: the low bytes of all sixteen and the high ones. A permutation of bytes picks
four of eight bytes by four numbers of three bits, so that two of them and a mask of the codes' fourth bits look up four
codes in a plane: 21 instructions for eight elements, none of which moves anything between threads.
"""

import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from pallas_kernels.nf4_linear.mosaic_gpu_decode import i32, scaled_pair, word
from pallas_kernels.nf4_linear.reference import NF4_CODE

WORDS = 8  # of a row's table
LOW_BYTES, HIGH_BYTES = 0x6420, 0x7531  # of the four numbers in two words


def table_of(scale, dtype: jnp.dtype) -> tuple[list, list]:
    """A row's table: 4 words of the eight negative codes, and 4 of the others; of each, two words of either plane."""
    numbers = [utils.c(float(value), ir.F32Type.get()) for value in NF4_CODE]
    pairs = [utils.bitcast(scaled_pair(two, (scale, scale), dtype), word()) for two in zip(numbers[::2], numbers[1::2])]
    fours = list(zip(pairs[::2], pairs[1::2], strict=True))
    low, high = ([utils.prmt(*four, i32(which)) for four in fours] for which in (LOW_BYTES, HIGH_BYTES))
    return low[:2] + high[:2], low[2:] + high[2:]


def look_up(code, negative: list, positive: list, dtype: jnp.dtype) -> list:
    """Registers of two elements for each of a word's four bytes, the high nibble's first."""
    shifted = arith.shli(code, i32(4))
    indices = arith.andi(code, i32(0x77777777))
    found = []
    for of_half, signs in ((indices, 0x9D8C), (arith.shrui(indices, i32(16)), 0xBFAE)):
        fourth_bits = utils.prmt(code, shifted, i32(signs))  # a byte of ones where a nibble has its fourth bit

        def plane(first: int, of_half=of_half, fourth_bits=fourth_bits):
            below, above = (utils.prmt(table[first], table[first + 1], of_half) for table in (negative, positive))
            differing = arith.andi(arith.xori(below, above), fourth_bits)
            return arith.xori(below, differing)

        low, high = plane(0), plane(2)
        found += [utils.prmt(low, high, i32(byte)) for byte in (0x4051, 0x6273)]
    kind = ir.VectorType.get((2,), utils.dtype_to_ir_type(dtype))
    return [utils.bitcast(pair, kind) for pair in found]


def words_of(register) -> list:
    """The words of a vector of them."""
    return [vector.extract(register, [], [i]) for i in range(ir.VectorType(register.type).shape[0])]
