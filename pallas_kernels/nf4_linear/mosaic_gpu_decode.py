"""Decodes a tile of NF4 weights in the registers of a warpgroup, with bitsandbytes' rounding.

A tile has 128 blocks of 64 elements in rows of one or more blocks: as many blocks as a warpgroup has threads, so that
each thread finds one block's scale and hands it to the 8 threads that decode the block. Both that and the look-up of a
code's value are shuffles within a warp: lanes i and 16 + i hold the value of code i, and a shuffle among 16 lanes takes
four bits of its index only, so that a nibble costs one shift, one shuffle and one multiplication. Products and sums are
rounded one by one: a fused multiply-add would differ from bitsandbytes' bits.

The interpreter runs no inline assembly: with `staged`, plain array operations do the same.
"""

from typing import Any, NamedTuple

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jax.typing import DTypeLike
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, memref, vector

from pallas_kernels.nf4_linear.reference import DYNAMIC_CODE, NESTED_BLOCK, NF4_CODE

BLOCK = 64  # elements that share a scale
THREADS, WARP = 128, 32  # of a warpgroup, of a warp
SHARING = 8  # threads that decode one block
TILE = THREADS * BLOCK
VECTOR = 4  # bytes of a register: 8 elements, which are stored together

_PAIR = {"bfloat16": "bf16x2", "float16": "f16x2"}  # PTX's names of two numbers in a word
EACH = plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1)  # one number for each thread
_ONE = plgpu.Layout.WG_SPLAT(())


class Scales(NamedTuple):
    """What blocks' scales are made of: arrays outside a kernel, references inside.

    Attributes:
        values: (128,) f32, those of the 16 codes over and over: one for each thread.
        dynamic: (256,) f32, the values of double quantization's codes.
        absmax: (blocks,) uint8, or f32 without double quantization.
        nested: (ceil(blocks / 256),) f32; one unused number without double quantization.
        offset: (layers,) f32; likewise.
    """

    values: Any
    dynamic: Any
    absmax: Any
    nested: Any
    offset: Any


def kernel_scales(absmax, nested_absmax, offset) -> Scales:
    """A kernel's operands from a weight's arrays; leading axes are joined with the first of each array's own."""
    unused = jnp.zeros((1,), jnp.float32)
    nested, offset = (unused if x is None else x.reshape(-1) for x in (nested_absmax, offset))
    values = jnp.asarray(np.tile(NF4_CODE, THREADS // len(NF4_CODE)))
    return Scales(values, jnp.asarray(DYNAMIC_CODE), absmax.reshape(-1), nested, offset)


def codes_layout(rows: int):
    """Layout of a tile's codes, (rows, TILE / rows / 2) uint8: neighbouring threads have neighbouring words."""
    return plgpu.Layout.WG_STRIDED((rows, TILE // rows // 2), vec_size=VECTOR)


def code_values(refs: Scales):
    """(128,) f32: each thread's entry of the code table, for `decode`."""
    return plgpu.load(refs.values, layout=EACH)


def load_scales(refs: Scales, first, stride: int, columns: int, *, staged: bool):
    """Asks for what each thread's block needs: its absmax as stored, and its nested block's factor, both (128,).

    Args:
        refs: of the whole weight.
        first: block in the tile's corner.
        stride: blocks of a row of the weight.
        columns: blocks of a row of the tile; a power of two.
        staged: whether plain array operations do it.
    """
    block = _block_of_thread()
    shift = columns.bit_length() - 1
    return load_scales_at(refs, first + (block >> shift) * stride + (block & (columns - 1)), staged=staged)


def load_scales_at(refs: Scales, index, *, staged: bool):
    """Likewise of the blocks that (128,) int32 `index` names."""
    absmax = load_absmax_at(refs, index, staged=staged)
    return absmax, load_factor_at(refs, index, staged=staged)


def load_absmax_at(refs: Scales, index, *, staged: bool):
    """Asks for the absmax of those blocks, (128,)."""
    return _gather(refs.absmax, index, staged=staged)


def load_factor_at(refs: Scales, index, *, staged: bool):
    """Asks for the factor of their nested blocks, (128,) f32; without double quantization any number."""
    if refs.absmax.dtype != jnp.uint8:
        return jnp.zeros_like(index, jnp.float32)
    return _gather(refs.nested, index >> (NESTED_BLOCK.bit_length() - 1), staged=staged)


def finish_scales(refs: Scales, absmax, factor, offset, *, staged: bool):
    """(128,) f32: each thread's scale, undoing double quantization of what `load_scales` returned."""
    value = load_absmax_value(refs, absmax, staged=staged)
    return multiply_scales(refs, value, factor, offset, staged=staged)


def load_absmax_value(refs: Scales, absmax, *, staged: bool):
    """(128,) f32: what each thread's absmax stands for, with double quantization before its factor and the offset."""
    if absmax.dtype != jnp.uint8:
        return absmax
    return _gather(refs.dynamic, absmax.astype(jnp.int32), staged=staged)


def multiply_scales(refs: Scales, value, factor, offset, *, staged: bool):
    """(128,) f32: each thread's scale, from `load_absmax_value`."""
    if refs.absmax.dtype != jnp.uint8:
        return value
    if staged:
        return lax.optimization_barrier(value * factor) + offset

    @plgpu.inline_mgpu(arg_types=(EACH, EACH, _ONE), return_type=_each(jnp.float32))
    def multiply_add(_, value, factor, offset):
        ptx = "{ .reg .f32 p; mul.rn.f32 p, $1, $2; add.rn.f32 $0, p, $3; }"
        return _array(utils.inline_ptx(ptx, *map(element, (value, factor, offset)), result_types=ir.F32Type.get()))

    return multiply_add(value, factor, offset)


def decode(codes, values, scales, *, dtype: DTypeLike, staged: bool):
    """The elements of a tile, `values[code] * scale` rounded once.

    Args:
        codes: (rows, TILE / rows / 2) uint8 in `codes_layout`.
        values: (128,) f32, from `code_values`.
        scales: (128,) f32, from `finish_scales`.
        dtype: bfloat16 or float16.
        staged: whether plain array operations do it.

    Returns:
        (rows, TILE / rows), 8 neighbours in each of a thread's registers.
    """
    shape, dtype = (codes.shape[0], codes.shape[1] * 2), jnp.dtype(dtype)
    if staged:
        nibbles = jnp.stack([codes >> 4, codes & 15], -1).reshape(THREADS, BLOCK).astype(jnp.int32)
        by_block = jnp.zeros_like(scales).at[_block_of_thread()].set(scales)
        return (values[nibbles] * by_block[:, None]).astype(dtype).reshape(shape)
    layout = plgpu.Layout.WG_STRIDED(shape, vec_size=2 * VECTOR)

    @plgpu.inline_mgpu(
        arg_types=(codes_layout(codes.shape[0]), EACH, EACH),
        return_type=plgpu.ShapeDtypeStruct(shape, dtype, layout),
    )
    def look_up(_, codes, values, scales):
        values, scales = element(values), element(scales)
        lane = arith.remui(arith.index_cast(word(), gpu.thread_id(gpu.Dimension.x)), i32(WARP))
        neighbour = arith.divui(lane, i32(SHARING))
        registers = np.empty_like(codes.registers)
        for i, register in enumerate(codes.registers):
            code = utils.bitcast(register, word())
            scale = shuffle(scales, arith.addi(neighbour, i32(i * WARP // SHARING)), lanes=WARP)
            pairs = []
            for byte in range(VECTOR):
                nibbles = (arith.shrui(code, i32(8 * byte + shift)) for shift in (4, 0))
                high, low = (shuffle(values, nibble, lanes=16) for nibble in nibbles)
                pairs.append(scaled_pair((high, low), (scale, scale), dtype))
            registers[i] = utils.vector_concat(pairs)
        registers = registers.reshape(layout.to_mgpu().registers_shape(shape))
        return mgpu.FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=None)

    return look_up(codes, values, scales)


def loads_first() -> None:
    """Keeps the assembler from waiting for a load before it has issued those that precede this in the program."""

    @plgpu.inline_mgpu()
    def barrier(_):
        utils.warpgroup_barrier()

    barrier()


def use(words: list) -> None:
    """Inside inline_mgpu, an instruction that reads words: the compiler must have them by then, and keep them."""
    llvm.inline_asm(ir.Type.parse("!llvm.void"), words, "", ",".join("r" * len(words)), has_side_effects=True)


def threads():
    """(128,) int32: each thread's number."""
    return plgpu.broadcasted_iota(jnp.int32, (THREADS,), 0, layout=EACH)


def _block_of_thread():
    """(128,) int32: the block of the tile whose scale a thread finds. Each register of its warp has four."""
    thread = threads()
    lane, warp = thread & (WARP - 1), thread >> 5
    return 16 * (lane >> 2) + 4 * warp + (lane & 3)


def _gather(ref, index, *, staged: bool):
    """Each thread's element of a vector in memory."""
    if staged:
        return ref[...][index]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), EACH), return_type=_each(ref.dtype))
    def load(_, ref, index):
        loaded = memref.load(ref, [arith.index_cast(ir.IndexType.get(), element(index))])
        return _array(loaded)

    return load(ref, index)


def scaled_pair(numbers: tuple, scales: tuple, dtype: jnp.dtype):
    """The products of two f32 numbers with two scales, each rounded, in one register of `dtype`."""
    ptx = "{ .reg .f32 a, b; mul.rn.f32 a, $1, $3; mul.rn.f32 b, $2, $4; "
    ptx += f"cvt.rn.{_PAIR[dtype.name]}.f32 $0, b, a; }}"
    pair = utils.inline_ptx(ptx, *numbers, *scales, result_types=word())
    return utils.bitcast(pair, ir.VectorType.get((2,), utils.dtype_to_ir_type(dtype)))


def shuffle(value, lane, *, lanes: int):
    """The value of another lane among `lanes` neighbours; of its number only the low bits count."""
    clamp = (WARP - lanes) << 8 | (lanes - 1)
    return utils.inline_ptx(
        f"shfl.sync.idx.b32 $0, $1, $2, {clamp:#x}, 0xffffffff;",
        value,
        lane,
        result_types=value.type,
        convergent=True,
    )


def _each(dtype):
    return plgpu.ShapeDtypeStruct((THREADS,), dtype, EACH)


def element(array):
    """A thread's own number, or the one that all share."""
    (register,) = array.registers.flat
    return vector.extract(register, [], [0]) if isinstance(register.type, ir.VectorType) else register


def _array(element):
    """One number for each thread."""
    register = vector.broadcast(ir.VectorType.get((1,), element.type), element)
    unsigned = isinstance(element.type, ir.IntegerType)
    is_signed = False if unsigned else None
    return mgpu.FragmentedArray(_registers=np.array([register], object), _layout=EACH.to_mgpu(), _is_signed=is_signed)


def i32(value: int) -> ir.Value:
    """A constant of 32 bits."""
    return utils.c(value, word())


def word() -> ir.Type:
    """The type of a register: 32 bits."""
    return ir.IntegerType.get_signless(32)
