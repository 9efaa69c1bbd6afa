"""Words in a thread's registers, for inline_mgpu: arithmetic on known and unknown numbers, loads and stores."""

from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.nf4_linear.mosaic_gpu_decode import i32, word


def times(number, factor: int):
    """The product of a word, or a number known now, and one known now."""
    return i32(number * factor) if isinstance(number, int) else arith.muli(number, i32(factor))


def total(first, *more):
    """The sum of words and numbers known now."""
    found = _word(first)
    for one in more:
        found = arith.addi(found, _word(one))
    return found


def vector_of(words: list):
    """Words as one value, which is stored at once."""
    return vector.from_elements(ir.VectorType.get((len(words),), word()), words)


def words_of(value) -> list:
    """The words of a value of so many bits."""
    count = utils.bitwidth(value.type) // 32
    words = utils.bitcast(value, ir.VectorType.get((count,), word()))
    return [vector.extract(words, [], [i]) for i in range(count)]


def transposed(words: list) -> list:
    """Word i of the result has byte i of each of four words."""
    a, b, c, d = words
    low, high = i32(0x5140), i32(0x7362)
    halves = [(utils.prmt(a, b, which), utils.prmt(c, d, which)) for which in (low, high)]
    return [utils.prmt(*half, i32(which)) for half in halves for which in (0x5410, 0x7632)]


def load(pointer, index, kind):
    """A value of a type, from the index-th word on."""
    at = utils.getelementptr(pointer, [index], word())
    return llvm.load(kind, at, alignment=utils.bitwidth(kind) // 8)


def store(pointer, index, value) -> None:
    """Likewise."""
    llvm.store(value, utils.getelementptr(pointer, [index], word()), alignment=utils.bitwidth(value.type) // 8)


def _word(number):
    return i32(number) if isinstance(number, int) else number
