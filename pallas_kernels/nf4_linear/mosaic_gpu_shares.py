"""Steps of a product shared out among blocks, and parts of a tile's sum that one block leaves or sends to another.

All tiles' steps stand in a row, tile by tile, and each block gets a piece of it, all as long as each other but for one
unit. So a block begins within a tile and ends within another. The block with a tile's first steps writes the tile;
those that have steps further on leave what they summed up in memory, in f32, and raise a flag. Sums are added in the
order of the steps, so that results are the same in every run.

Only a piece's first tile can be one that it does not begin: a piece leaves one part at most, and leaves it before it
works on what it owns. Pieces go to blocks from the last to the first: a block waits for blocks of lower numbers only,
which the GPU starts earlier.

Blocks of one cluster need no flags: where the pieces of a cluster are equal parts of one tile, each block owns as many
columns of its sum as the others, sends them theirs straight into their shared memory, and adds to its own what they
have sent, in an order that is the same in every run. So all of them add and store alike. Two barriers of the cluster
tell that the memory is free everywhere and that everything has been sent.
"""

import dataclasses
import functools
import itertools

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.nf4_linear.mosaic_gpu_decode import THREADS, i32, word

VECTOR = 4  # numbers that a thread stores at once


@dataclasses.dataclass(frozen=True)
class Shares:
    """Pieces of a row of steps.

    Attributes:
        items: tiles.
        steps: of a tile; a multiple of unit.
        unit: steps that stay together.
        blocks: at most so many pieces.
    """

    items: int
    steps: int
    unit: int
    blocks: int

    @property
    def units(self) -> int:
        """Of all tiles."""
        return self.items * self.steps // self.unit

    @property
    def pieces(self) -> int:
        """How many blocks get one."""
        return min(self.blocks, self.units)

    @property
    def longest(self) -> int:
        """Steps of the longest piece."""
        return -(-self.units // self.pieces) * self.unit

    @property
    def cut(self) -> bool:
        """Whether any piece ends within a tile."""
        return self.steps > self.unit and any(self.start(piece) % self.steps for piece in range(self.pieces))

    @property
    def tiles(self) -> int:
        """Of how many tiles a piece has steps, at most."""
        starts = [self.start(piece) for piece in range(self.pieces + 1)]
        return max(-(-behind // self.steps) - first // self.steps for first, behind in itertools.pairwise(starts))

    def start(self, piece):
        """First step of a piece, which may be a traced number; the piece behind the last begins at the end."""
        least, longer = divmod(self.units, self.pieces)
        smaller = min if isinstance(piece, int) else jnp.minimum
        return (piece * least + smaller(piece, longer)) * self.unit

    def piece_of(self, step):
        """The piece that has a step."""
        least, longer = divmod(self.units, self.pieces)
        unit = lax.div(step, jnp.int32(self.unit))
        of_longer = longer * (least + 1)
        behind = longer + lax.div(unit - of_longer, jnp.int32(least))
        return jnp.where(unit < of_longer, lax.div(unit, jnp.int32(least + 1)), behind)


def sum_in_cluster(acc, part, parts: int, memory, all_done, all_sent, *, staged: bool):
    """The sum of all parts of a tile, of the columns of which this block is the owner.

    Args:
        acc: a warpgroup's sum (rows, columns) f32 in the layout of the tensor cores' results.
        part: which part it is, a traced number, and the block's place along the last axis of the cluster.
        parts: how many there are.
        memory: for what is sent to this warpgroup, (parts, rows, columns / parts) f32 by sender, in shared memory that
            is free once all are done; with `staged` in memory of all, (parts, parts, rows, columns / parts) by owner
            and sender.
        all_done: barrier of these blocks at which all their warpgroups arrive.
        all_sent: likewise at which this warpgroup of each of them does.
        staged: whether plain array operations do it.

    Returns:
        (rows, columns / parts), in the same layout.
    """
    width = acc.shape[1] // parts
    columns = [acc[:, i * width : (i + 1) * width] for i in range(parts)]
    _fence(staged=staged)  # all four warps have multiplied
    plgpu.barrier_arrive(all_done)
    plgpu.barrier_wait(all_done)

    def send(owner: int):
        if staged:
            leave_part(columns[owner], memory.at[owner, part], staged=True)
        else:
            leave_part(columns[owner], memory.at[part], staged=False, block=(owner, parts))

    for owner in range(parts):
        pl.when(part != owner)(functools.partial(send, owner))
    _fence(staged=staged)
    plgpu.barrier_arrive(all_sent)
    plgpu.barrier_wait(all_sent)
    _fence(staged=staged)

    def with_mine(found, i: int):
        return lax.cond(part == i, lambda: columns[i], lambda: found)

    total = functools.reduce(with_mine, range(1, parts), columns[0])
    for i in range(1, parts):
        sender = lax.rem(part + i, jnp.int32(parts))
        total = add_part(total, memory.at[part, sender] if staged else memory.at[sender], staged=staged)
    return total


def _fence(*, staged: bool) -> None:
    """Puts in order, for the whole cluster, a warpgroup's reads and writes before and behind."""
    if staged:
        return

    @plgpu.inline_mgpu()
    def fence(_):
        utils.warpgroup_barrier()
        nothing = ir.Type.parse("!llvm.void")
        llvm.inline_asm(nothing, [], "fence.acq_rel.cluster;", "~{memory}", has_side_effects=True)

    fence()


def leave_part(acc, ref, *, staged: bool, block: tuple[int, int] | None = None) -> None:
    """Leaves a warpgroup's sum for another block.

    Args:
        acc: (rows, columns) f32 in the layout of the tensor cores' results.
        ref: of its shape, in memory, or in shared memory; what is where is `add_part`'s business only.
        staged: whether plain array operations do it.
        block: None, or whose shared memory it is: a place along the last axis of the cluster, and that axis' length.
    """
    if staged:
        ref[...] = acc
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()))
    def store(_, array, ref):
        registers = list(array.registers.flat)
        for i, (pointer, _) in enumerate(_places(ref, len(registers) // 2, block)):
            four = utils.vector_concat([registers[2 * i], registers[2 * i + 1]])
            llvm.store(four, pointer, alignment=4 * VECTOR)

    store(acc, ref)


def add_part(acc, ref, *, staged: bool):
    """The sum of acc and of what another block has left; likewise."""
    if staged:
        return acc + plgpu.load(ref, layout=plgpu.Layout.WGMMA, optimized=False)
    layout = plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(
        arg_types=(layout, plgpu.RefType()), return_type=plgpu.ShapeDtypeStruct(acc.shape, jnp.float32, layout)
    )
    def add(_, array, ref):
        added = np.empty_like(array.registers)
        for i, (pointer, kind) in enumerate(_places(ref, array.registers.size // 2)):
            four = llvm.load(kind, pointer, alignment=4 * VECTOR)
            for at in (2 * i, 2 * i + 1):
                own = array.registers.flat[at]
                two = [vector.extract(four, [], [at % 2 * 2 + n]) for n in range(2)]
                added.flat[at] = arith.addf(own, vector.from_elements(own.type, two))
        return mgpu.FragmentedArray(_registers=added, _layout=array.layout, _is_signed=None)

    return add(acc, ref)


def _places(ref, count: int, block: tuple[int, int] | None = None):
    """Where a thread keeps its numbers, four by four: neighbouring threads have neighbouring places."""
    thread = arith.remui(utils.thread_idx(), i32(THREADS))
    pointer = utils.memref_ptr(ref)
    if block is not None:
        place, length = block
        own = arith.index_castui(word(), utils.cluster_idx())  # the last axis' blocks are neighbours
        pointer = utils.get_cluster_ptr(
            pointer, arith.addi(arith.subi(own, arith.remui(own, i32(length))), i32(place)), generic=False
        )
    elif llvm.PointerType(pointer.type).address_space == 0:
        pointer = llvm.addrspacecast(llvm.PointerType.get(1), pointer)  # of global memory, not of any
    kind = ir.VectorType.get((VECTOR,), ir.F32Type.get())
    mine = utils.getelementptr(pointer, [arith.muli(thread, i32(VECTOR))], word())
    for i in range(count):
        yield utils.getelementptr(mine, [i * THREADS * VECTOR], word()), kind
