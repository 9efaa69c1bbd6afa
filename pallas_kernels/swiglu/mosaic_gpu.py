"""The gate's backward pass on Hopper: both gradients in one pass, where XLA makes a kernel of each.

A block of threads takes one tile, loads its 16-byte pieces of all three operands before it uses any, and is done: the
hardware's queue of blocks is the schedule. The forward pass is XLA's, which runs at the speed of memory.
"""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from pallas_kernels import _platform
from pallas_kernels.swiglu import reference
from pallas_kernels.swiglu.reference import Activation

TILE = 2048  # elements; two 16-byte pieces a thread and operand
_VECTOR = 8


def refuses(gate: Array | jax.ShapeDtypeStruct, activation: Activation) -> str | None:
    """Return why the kernel cannot take such a gate on the default device, or None."""
    if gate.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it needs bfloat16 or float16, and gate is {gate.dtype}"
    if gate.size % TILE or not 0 < gate.size < 2**31:
        return f"the number of elements must be a multiple of {TILE} below 2**31, and is {gate.size}"
    if activation == "gelu":
        return "the error function of the exact GELU has no instruction there"
    return _platform.why_not_hopper(one_device=True)


def backward(gate: Array, up: Array, dy: Array, activation: Activation) -> tuple[Array, Array]:
    """As reference.backward."""

    def kernel(gate_ref, up_ref, dy_ref, dgate_ref, dup_ref):
        at = pl.ds(lax.axis_index("tiles") * TILE, TILE)
        layout = plgpu.Layout.WG_STRIDED((TILE,), vec_size=_VECTOR)
        gate, up, dy = (plgpu.load(ref.at[at], layout=layout) for ref in (gate_ref, up_ref, dy_ref))
        dgate_ref[at], dup_ref[at] = reference.backward(gate, up, dy, activation)

    flat = jax.ShapeDtypeStruct((gate.size,), gate.dtype)
    run = plgpu.kernel(
        kernel,
        out_type=[flat, flat],
        grid=(gate.size // TILE,),
        grid_names=("tiles",),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    dgate, dup = run(*(x.reshape(-1) for x in (gate, up, dy)))
    return dgate.reshape(gate.shape), dup.reshape(gate.shape)
