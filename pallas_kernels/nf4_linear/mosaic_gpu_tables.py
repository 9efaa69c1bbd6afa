"""NF4 codes looked up by permutations of bytes, in the table of their values or of a row's sixteen products.

Where a row of a tile has one scale, its elements take sixteen values only. The loading warpgroup makes them, rounded,
and leaves them in shared memory as planes: the low bytes of all sixteen and the high ones. A permutation of bytes picks
four of eight bytes by four numbers of three bits, so that two of them and a mask of the codes' fourth bits look up four
codes in a plane: 21 instructions for eight elements, none of which moves anything between threads.

Where each element of a thread has a scale of its own, what is looked up are the codes' values in f32, four planes: 45
instructions for eight, 15 by shuffles, which go through shared memory's data path.
"""

import jax.numpy as jnp
import numpy as np
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
    planes = [negative[:2] + positive[:2], negative[2:] + positive[2:]]
    found = [utils.prmt(low, high, i32(two)) for low, high in _bytes_of(code, planes) for two in (0x4051, 0x6273)]
    kind = ir.VectorType.get((2,), utils.dtype_to_ir_type(dtype))
    return [utils.bitcast(pair, kind) for pair in found]


def look_up_values(code) -> list:
    """The f32 values of a word's eight nibbles, the lowest first."""
    numbers = np.asarray(NF4_CODE, "<f4").view(np.uint8).reshape(16, 4)
    planes = [[i32(int(four)) for four in np.ascontiguousarray(plane).view("<i4")] for plane in numbers.T]
    words = [one for four in _bytes_of(code, planes) for one in transposed(four)]
    return [utils.bitcast(one, ir.F32Type.get()) for one in words]


def transposed(words: list) -> list:
    """Word i of the result has byte i of each of four words."""
    a, b, c, d = words
    low, high = i32(0x5140), i32(0x7362)
    halves = [(utils.prmt(a, b, which), utils.prmt(c, d, which)) for which in (low, high)]
    return [utils.prmt(*half, i32(which)) for half in halves for which in (0x5410, 0x7632)]


def _bytes_of(code, planes: list):
    """Of either half of a word of codes, what its four nibbles stand for: a word for each plane of sixteen bytes."""
    shifted = arith.shli(code, i32(4))
    indices = arith.andi(code, i32(0x77777777))
    for of_half, signs in ((indices, 0x9D8C), (arith.shrui(indices, i32(16)), 0xBFAE)):
        fourth_bits = utils.prmt(code, shifted, i32(signs))  # a byte of ones where a nibble has its fourth bit
        found = []
        for table in planes:
            below, above = (utils.prmt(table[at], table[at + 1], of_half) for at in (0, 2))
            found.append(arith.xori(below, arith.andi(arith.xori(below, above), fourth_bits)))
        yield found


def words_of(register) -> list:
    """The words of a vector of them."""
    return [vector.extract(register, [], [i]) for i in range(ir.VectorType(register.type).shape[0])]
