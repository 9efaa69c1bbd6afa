"""What the Hopper kernels share: warpgroups, whole tiles and their layouts in shared memory, and launching."""

import dataclasses
import struct
from collections.abc import Mapping
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector

WARPGROUPS = 2  # that compute; one more feeds them


def swizzled(width: int, dtype=jnp.bfloat16) -> tuple[plgpu.TilingTransform, plgpu.SwizzleTransform]:
    """Shared-memory layout of a tile whose rows have `width` elements: the widest swizzle that divides them."""
    size = jnp.dtype(dtype).itemsize
    swizzle = next(span for span in (128, 64, 32) if width * size % span == 0)
    return plgpu.TilingTransform((8, swizzle // size)), plgpu.SwizzleTransform(swizzle)


def padded(x: jax.Array, *multiples: int) -> jax.Array:
    """Zeros behind the last element of each axis, up to a multiple."""
    more = [(0, -size % multiple) for size, multiple in zip(x.shape, multiples, strict=True)]
    return jnp.pad(x, more) if any(after for _, after in more) else x


def filled(shape: tuple[int, ...], value):
    """A tile of one number in the layout of the tensor cores' results; of one axis: a value for each of its rows."""
    layout = plgpu.Layout.WGMMA if len(shape) == 2 else plgpu.Layout.WGMMA.reduce(1)
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def by_assembly(ptx: str, x):
    """Each element of x, f32 in the layout of the tensor cores' results, by a block of PTX that makes $0 of $1."""
    return _by_register(lambda register: elementwise(ptx, register), x, jnp.float32)


def rounded(x, dtype):
    """x, f32 in the layout of the tensor cores' results, in 16 bits, two numbers an instruction.

    Where a rounded number is read in f32 again, LLVM rounds one by one, which takes four times as long.
    """
    return _by_register(lambda register: packed(register, dtype), x, dtype)


def _by_register(make, x, dtype):
    layout = plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct(x.shape, dtype, layout))
    def each(_, array):
        registers = np.empty_like(array.registers)
        registers.flat = [make(register) for register in array.registers.flat]
        return mgpu.FragmentedArray(_registers=registers, _layout=array.layout, _is_signed=None)

    return each(x)


def packed(register, dtype):
    """Inside inline_mgpu, a vector of two f32 rounded to bfloat16 or float16."""
    low, high = (vector.extract(register, [], [i]) for i in range(2))
    name, short = ("bf16", ir.BF16Type.get()) if dtype == jnp.bfloat16 else ("f16", ir.F16Type.get())
    word = ir.IntegerType.get_signless(32)
    two: Any = utils.inline_ptx(f"cvt.rn.{name}x2.f32 $0, $1, $2;", high, low, result_types=word)
    return utils.bitcast(two, ir.VectorType.get((2,), short))


def elementwise(ptx: str, register):
    """Inside inline_mgpu, likewise of a vector of f32."""
    f32 = ir.F32Type.get()
    (length,) = register.type.shape
    elements = (vector.extract(register, [], [i]) for i in range(length))
    return vector.from_elements(register.type, [utils.inline_ptx(ptx, x, result_types=f32) for x in elements])


def number(value: float) -> str:
    """A constant of PTX, by its bits."""
    return f"0f{struct.unpack('>I', struct.pack('>f', value))[0]:08X}"


def store_through(buffer, value, target) -> None:
    """Stores a value through a buffer in shared memory by the copy engine, which must have read the one before."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    buffer[...] = value
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(buffer, target)


def add_product(total, a, b, staged: bool) -> Any:
    """total + a @ b, in place where the interpreter need not follow."""
    if staged:

        def alone(acc):
            plgpu.wgmma(acc, a, b)
            return acc[...]

        return total + pl.run_scoped(alone, plgpu.ACC(total.shape, jnp.float32))
    return pl.run_state(lambda acc: plgpu.wgmma(acc, a, b))(plgpu.ACC.init(total))


def drain(visits, stages: int, *free) -> None:
    """Waits until the last slots are free, so that no barrier is left with an arrival that nobody saw."""

    def wait(visit, _):
        for barrier in free:
            plgpu.barrier_wait(barrier.at[lax.rem(visit, jnp.int32(stages))])

    lax.fori_loop(jnp.maximum(visits - stages, 0), visits, wait, None)


def run_once(results):
    """A kernel's results behind a barrier, for those that are kept for a backward pass and read at once.

    In a scan XLA lets a kernel write its result straight into the stack of what is kept (dynamic-slice fusion), and
    runs it a second time where another operation reads the result too.
    """
    return lax.optimization_barrier(results)


def launch(
    kernel,
    scratch_types,
    *args,
    out_type,
    grid: Mapping[str, int],
    warpgroups: int = WARPGROUPS + 1,
    cluster: Mapping[str, int] | None = None,
    reduction_bytes: int = 2048,
):
    """Runs `kernel(refs, scratch)` with so many warpgroups on a grid of named axes, in clusters of named axes.

    `reduction_bytes` of shared memory are set aside for reductions across warps.
    """
    shape = _shape(grid, warpgroups, cluster or {})
    params = dataclasses.replace(_FAST, reduction_scratch_bytes=reduction_bytes)
    return plgpu.kernel(_entry(kernel, scratch_types), out_type=out_type, compiler_params=params, **shape)(*args)


def launch_alone(kernel, blocks: int, *args, out_type, params: plgpu.CompilerParams | None = None):
    """Runs `kernel(*refs)` in so many blocks of one warpgroup each; the axis of the grid is "tiles"."""
    params = params or _FAST
    run = plgpu.kernel(kernel, out_type=out_type, grid=(blocks,), grid_names=("tiles",), compiler_params=params)
    return run(*args)


def launch_in_place(
    kernel,
    scratch_types,
    *args,
    out: tuple,
    grid: Mapping[str, int],
    warpgroups: int = WARPGROUPS + 1,
    auto_barriers: bool = True,
):
    """As `launch`, for outputs that the kernel adds to: `out` holds their first values.

    Without `auto_barriers` no barrier is put around stores to shared memory: the kernel must not read with ordinary
    loads what it writes.
    """
    params = dataclasses.replace(_FAST, unsafe_no_auto_barriers=not auto_barriers)

    def run(refs):
        mesh = plgpu.Mesh(**_shape(grid, warpgroups, {}))
        pl.kernel(_entry(kernel, scratch_types), mesh=mesh, compiler_params=params)(*refs)

    return pl.run_state(run)((*args, *out))[len(args) :]


_FAST = plgpu.CompilerParams(approx_math=True)


def _entry(kernel, scratch_types):
    def entry(*refs):
        pl.run_scoped(lambda *scratch: kernel(refs, scratch), *scratch_types, collective_axes="warpgroup")

    return entry


def _shape(grid: Mapping[str, int], warpgroups: int, cluster: Mapping[str, int]) -> dict[str, Any]:
    shape: dict[str, Any] = {"grid": tuple(grid.values()), "grid_names": tuple(grid)}
    if cluster:
        shape |= {"cluster": tuple(cluster.values()), "cluster_names": tuple(cluster)}
    return shape | {"num_threads": warpgroups, "thread_name": "warpgroup"}
