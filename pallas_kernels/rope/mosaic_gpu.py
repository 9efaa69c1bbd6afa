"""Rotary embedding on Hopper: queries and keys in one pass, at the speed of memory.

A warpgroup of 128 threads takes a few tokens with all their heads. A thread holds 8 channels of the first half of a
head and the 8 of the second half that they turn with, 16 bytes each, so that nothing is exchanged; cosines and sines
are loaded once a token for all heads. All loads are asked for before the first is used, and the hardware's queue of
blocks is the schedule.
"""

import functools
import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import fragmented_array
from jaxtyping import Array, Float

from pallas_kernels import _platform
from pallas_kernels._hopper import run_once

WIDTHS = (64, 128, 256)  # of heads: 4, 8 or 16 threads for a half
FEWEST = 1 << 25  # numbers in q and k; at half of it XLA's pass takes as long
_VECTOR, _THREADS, _WARPS = 8, 128, 4
_MOST = 24576  # numbers of a block, beyond which a thread's share has no registers
_SHARE = 10240  # numbers that a block takes, if whole tokens and layouts allow: 80 a thread, in 40 registers


def refuses(
    q: Array | jax.ShapeDtypeStruct,
    k: Array | jax.ShapeDtypeStruct,
    cos: Array | jax.ShapeDtypeStruct,
    interleaved: bool,
) -> str | None:
    """Return why the kernel cannot rotate q (B, T, N, H) and k (B, T, K, H), or None."""
    (_, tokens, heads, width), kv_heads = q.shape, k.shape[2]
    for x in (q, k):
        if x.dtype not in (jnp.bfloat16, jnp.float16):
            return f"it needs bfloat16 or float16, and q and k are {q.dtype} and {k.dtype}"
    if interleaved:
        return "it turns halves of heads, not neighbours"
    if width not in WIDTHS or 2 * cos.shape[-1] != width:
        return f"it turns whole heads of {WIDTHS} channels, and these have {width}, of which {2 * cos.shape[-1]} turn"
    whole = _fewest_tokens(heads, kv_heads, width)
    if whole * (heads + kv_heads) * width > _MOST:
        return f"{heads} and {kv_heads} heads do not share out to its threads: {whole} tokens at a time would be needed"
    if tokens % whole:
        return f"a row must have a multiple of {whole} tokens, and has {tokens}"
    if not q.size + k.size >= FEWEST or q.size >= 2**31:
        return (
            f"it is for {FEWEST} numbers or more in q and k and fewer than 2**31 in q, and there are {q.size + k.size}"
        )
    return _platform.why_not_hopper(one_device=True)


@functools.partial(jax.jit, static_argnames="back", inline=True)  # of equal calls one is compiled
def rotate(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    cos: Float[Array, "B T H/2"],
    sin: Float[Array, "B T H/2"],
    *,
    back: bool,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"]]:
    """As reference.rotate of both, or the other way round if `back`; T must be what `refuses` says."""
    (batch, tokens, heads, width), kv_heads, half = q.shape, k.shape[2], q.shape[-1] // 2
    taken = _tokens(tokens, heads, kv_heads, width)
    first, second = pl.ds(0, half), pl.ds(half, half)

    def kernel(q_ref, k_ref, cos_ref, sin_ref, *out_refs):
        row, at = lax.axis_index("rows"), pl.ds(lax.axis_index("tiles") * taken, taken)
        table_row = row if cos.shape[0] > 1 else 0
        loaded = []
        for ref, count in ((q_ref, heads), (k_ref, kv_heads)):
            layout = _layout(count, width)
            halves = [_load(ref.at[row, at, :, part], layout) for part in (first, second)]
            tables = [_load(table.at[table_row, at], layout.reduce(1)) for table in (cos_ref, sin_ref)]
            loaded.append((halves, tables, layout))
        for (halves, tables, layout), out_ref in zip(loaded, out_refs, strict=True):
            a, b = (x.astype(jnp.float32) for x in halves)
            c, s = (plgpu.layout_cast(lax.broadcast_in_dim(table, a.shape, (0, 2)), layout) for table in tables)
            s = -s if back else s
            out_ref[row, at, :, first] = (a * c - b * s).astype(out_ref.dtype)
            out_ref[row, at, :, second] = (b * c + a * s).astype(out_ref.dtype)

    run = plgpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k)],
        grid=(batch, tokens // taken),
        grid_names=("rows", "tiles"),
        compiler_params=_PARAMS,
    )
    q, k = run_once(run(q, k, cos, sin))
    return q, k


# Layouts are given, as the compiler's search for them gives up over two kinds; nothing is read that is written here.
_PARAMS = plgpu.CompilerParams(
    approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
)


def _load(ref, layout) -> Array:
    return plgpu.load(ref, layout=layout, optimized=False)


def _together(heads: int, width: int) -> tuple[int, int]:
    """(tokens, heads) whose halves the threads hold at a time: as many heads as divide theirs, the rest by tokens."""
    pairs = _THREADS * _VECTOR // (width // 2)
    of_heads = math.gcd(heads, pairs)
    return pairs // of_heads, of_heads


def _layout(heads: int, width: int):
    """Of (tokens, heads, half a width): 8 neighbouring channels a thread."""
    tokens, heads = _together(heads, width)
    half, by_head = width // 2, math.gcd(heads, _WARPS)
    of_warp = tokens * by_head // _WARPS, heads // by_head
    tiling = fragmented_array.Tiling(((tokens, heads, half), (*of_warp, half), (_VECTOR,)))
    # tokens and heads by warps, 1; tokens, heads and channels by lanes; a vector
    plain = fragmented_array.TiledLayout(
        tiling, warp_dims=(-7, -6), lane_dims=(-4, -3, -2), vector_dim=-1, _check_canonical=False
    ).canonicalize()
    return plgpu.Layout.TILED(plain.tiling, plain.warp_dims, plain.lane_dims, plain.vector_dim)


def _fewest_tokens(heads: int, kv_heads: int, width: int) -> int:
    """Tokens that fill the threads with both queries' and keys' heads."""
    return math.lcm(_together(heads, width)[0], _together(kv_heads, width)[0])


def _tokens(tokens: int, heads: int, kv_heads: int, width: int) -> int:
    """Of a block."""
    fewest = _fewest_tokens(heads, kv_heads, width)
    most = max(1, _SHARE // (fewest * (heads + kv_heads) * width))
    return fewest * math.gcd(tokens // fewest, 1 << (most.bit_length() - 1))
