"""What Hopper kernels share whose arrays have layouts of their own: how warps, their threads and vectors cover them.

Nothing is exchanged through shared memory: a kernel reads nothing that it writes.
"""

import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax
from jax.experimental.mosaic.gpu import fragmented_array
from jaxtyping import Array

# Layouts are given, as the compiler's search for them gives up over two kinds.
PARAMS = plgpu.CompilerParams(
    approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
)


def tiled(*tiles: tuple[int, ...], warps: tuple[int, ...], lanes: tuple[int, ...]):
    """The layout of tiles within tiles, whose axes, counted from the last, are dealt out to warps and threads.

    The last tile is what a thread holds together.
    """
    plain = fragmented_array.TiledLayout(
        fragmented_array.Tiling(tiles), warp_dims=warps, lane_dims=lanes, vector_dim=-1, _check_canonical=False
    ).canonicalize()
    return plgpu.Layout.TILED(plain.tiling, plain.warp_dims, plain.lane_dims, plain.vector_dim)


def load(ref, layout) -> Array:
    """What is in global memory, in that layout."""
    return plgpu.load(ref, layout=layout, optimized=False)


def spread(x: Array, axes: tuple[int, ...], shape: tuple[int, ...], layout) -> Array:
    """x, whose axes are these of `shape`, the same along the others."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, axes), layout)
