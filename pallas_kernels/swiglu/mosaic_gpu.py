"""Gated activation on Hopper, forward: the hardware's queue of blocks is the schedule, as for rms_norm.

A warpgroup of 128 threads takes a run of elements in pieces of 16 bytes a thread, and loads both arrays before it uses
either.
"""

import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels import _platform

MULTIPLE = 1024  # of elements: 16 bytes for each of 128 threads
_VECTOR = 8
_SHARE = 4096  # elements that a block takes at most


def refuses(gate: Array | jax.ShapeDtypeStruct, activation: str) -> str | None:
    """Return why the kernel cannot take a gate of this shape and this activation, or None."""
    size = math.prod(gate.shape)
    if activation != "silu":
        return f"it has silu, and not {activation}"
    if gate.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it needs bfloat16 or float16, and gate is {gate.dtype}"
    if size % MULTIPLE or not 0 < size < 2**31:
        return f"gate's size must be a multiple of {MULTIPLE} below 2**31, and is {size}"
    return _platform.why_not_hopper(one_device=True)


def forward(gate: Float[Array, "*B F"], up: Float[Array, "*B F"]) -> Float[Array, "*B F"]:
    """Return silu(gate) * up in gate's dtype, computed in f32."""
    share = math.gcd(gate.size, _SHARE)
    layout = plgpu.Layout.WG_STRIDED((share,), vec_size=_VECTOR)

    def kernel(gate_ref, up_ref, out_ref):
        mine = pl.ds(lax.axis_index("tiles") * share, share)
        gate, up = (plgpu.load(ref.at[mine], layout=layout).astype(jnp.float32) for ref in (gate_ref, up_ref))
        out_ref[mine] = (gate / (1 + jnp.exp(-gate)) * up).astype(out_ref.dtype)

    run = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((gate.size,), gate.dtype),
        grid=(gate.size // share,),
        grid_names=("tiles",),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    return run(gate.reshape(-1), up.reshape(-1)).reshape(gate.shape)
