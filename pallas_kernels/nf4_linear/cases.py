"""Named shapes of the NF4 linear layer and its peers."""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels._case import Case, Peer
from pallas_kernels.nf4_linear import mosaic_gpu
from pallas_kernels.nf4_linear.api import NF4Weight, dequantize, refuses
from pallas_kernels.nf4_linear.reference import NESTED_BLOCK, NF4_CODE, block_scales

METRIC = "tflops"
SHORT = 512  # rows, up to which a product takes the host longer
Way = Literal["turned", "unfused"]


def random_weight(key: Array, shape: tuple[int, int], dtype: str = "bfloat16") -> NF4Weight:
    """Return a double-quantized weight of random codes, each element about 1/sqrt(I) in size."""
    size = shape[0] * shape[1]
    blocks = -(-size // 64)
    code_key, absmax_key, nested_key = jax.random.split(key, 3)
    unit = shape[1] ** -0.5
    return NF4Weight(
        codes=jax.random.bits(code_key, (-(-size // 2),), jnp.uint8),
        absmax=jax.random.bits(absmax_key, (blocks,), jnp.uint8),
        nested_absmax=unit * jax.random.uniform(nested_key, (-(-blocks // NESTED_BLOCK),), minval=0.5, maxval=1.0),
        offset=jnp.float32(2 * unit),
        shape=shape,
        dtype=dtype,
    )


def _case(name: str, rows: int, out: int, width: int) -> Case:
    def args(key: Array) -> tuple[tuple[object, ...], dict[str, object]]:
        x_key, w_key = jax.random.split(key)
        return (jax.random.normal(x_key, (rows, width), jnp.bfloat16), random_weight(w_key, (out, width))), {}

    product, moved = 2 * rows * width * out, 2 * rows * (width + out) + out * width * 0.516
    of_dx, short = {"tflops_dx": (0, product)}, rows <= SHORT
    return Case(name, args, product, moved, 2 * product, 2 * moved, wrt=(0,), parts=of_dx, short=short)


def _unpack(out: int, width: int) -> Case:
    def args(key: Array) -> tuple[tuple[object, ...], dict[str, object]]:
        return (random_weight(key, (out, width)),), {}

    moved = out * width * (2 + 0.5 + 1 / 64 + 4 / 64 / NESTED_BLOCK)
    return Case(f"dequantize-O{out}-I{width}", args, 0, moved, 0, moved, (), function="dequantize", metric="gbps")


TINY = (_case("tiny-M6-O16-I32", 6, 16, 32), _case("tiny-M5-O7-I9", 5, 7, 9))

CASES = (
    *(_unpack(*shape) for shape in ((14336, 4096), (4096, 14336), (4096, 4096), (28672, 8192))),
    *(
        _case(f"M{rows}-O{out}-I{width}", rows, out, width)
        for rows in (8192, 2048, 512)
        for out, width in ((14336, 4096), (4096, 14336), (4096, 4096))
    ),
    *(_case(f"M{rows}-O14336-I4096", rows, 14336, 4096) for rows in (256, 128, 64)),
)


def _naive(x: Array, w: NF4Weight) -> Array:
    """Dequantize by a chain of comparisons and let autodiff keep what it likes."""
    nibbles = jnp.stack([w.codes >> 4, w.codes & 15], axis=-1).reshape(-1)[: w.shape[0] * w.shape[1]]
    values = sum(jnp.where(nibbles == i, NF4_CODE[i], 0) for i in range(16))
    scales = jnp.repeat(block_scales(w.absmax, w.nested_absmax, w.offset), w.block_size)[: nibbles.size]
    return x @ (values * scales).astype(x.dtype).reshape(w.shape).T


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _decoding(way: Way, x: Array, w: NF4Weight) -> Array:
    """This operation's Hopper kernels, the choice between their ways made: in the turned product, or before it."""
    return _product(way, x, w, transpose=False)


def _product(way: Way, x: Array, w: NF4Weight, *, transpose: bool) -> Array:
    if (reason := refuses(w, x.dtype)) is not None:
        raise NotImplementedError(reason)
    packed = w.codes, w.absmax, w.nested_absmax, w.offset
    if way == "unfused":
        dense = mosaic_gpu.dequantize(*packed, w.shape, x.dtype)
        return x @ (dense if transpose else dense.T)
    return mosaic_gpu.fused(x, packed, w.shape, transpose=transpose)


_decoding.defvjp(
    lambda way, x, w: (_decoding(way, x, w), w),
    lambda way, w, dy: (_product(way, dy, w, transpose=True), None),
)

PEERS = {
    "naive": Peer(_naive),
    "bf16_matmul": Peer(lambda x, w: x @ w.T, prepare=lambda x, w: (x, dequantize(w, x.dtype))),
    "mosaic_gpu_turned": Peer(partial(_decoding, "turned")),
    "mosaic_gpu_unfused": Peer(partial(_decoding, "unfused")),
}
