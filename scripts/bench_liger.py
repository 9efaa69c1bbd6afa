"""Liger's Triton kernel for the norm of short rows, run by JAX: on the same arrays, from the same allocator as ours.

Where arrays lie in memory changes such a kernel's rate by more than kernels differ (NOTES.md, "rms_norm on Hopper"), so
that torch's and JAX's own processes compare allocators too.
"""

import jax
import jax.numpy as jnp
import jax_triton
import triton
import triton.language as tl
from jaxtyping import Array, Float
from liger_kernel.ops.rms_norm import _block_rms_norm_forward_kernel as liger_kernel

_ROWS = 16  # of a block, as Liger chooses for rows of at most 256 elements


@triton.jit
def _kernel(x, scale, eps, offset, y, rrms, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    rows = tl.num_programs(0) * ROWS
    liger_kernel(y, WIDTH, x, WIDTH, scale, 1, rrms, 1, rows, WIDTH, eps, offset, 0, True, WIDTH, ROWS)


def rms_norm(x: Float[Array, "M D"], scale: Float[Array, " D"], *, eps: float) -> Float[Array, "M D"]:
    """Liger's forward pass; M must be a multiple of 16, D a power of two of at most 256."""
    out = [jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(x.shape[:1], jnp.float32)]
    y, _ = jax_triton.triton_call(
        x,
        scale,
        eps,
        0.0,
        kernel=_kernel,
        out_shape=out,
        grid=(x.shape[0] // _ROWS,),
        num_warps=4,
        WIDTH=x.shape[1],
        ROWS=_ROWS,
    )
    return y
