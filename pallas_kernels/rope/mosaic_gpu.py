"""Rotary embedding on Hopper: queries and keys in one pass, at the speed of memory.

A warpgroup of 128 threads takes a few tokens with all their heads, each head in pieces: halves of what turns or,
interleaved, all of it, and as wide ones of the channels that pass. A thread holds 8 channels of each piece, 16 bytes:
with the 8 of the second half that they turn with, or 4 whole pairs, so that nothing is exchanged; cosines and sines are
loaded once a token for all heads. All loads are asked for before the first is used, and the hardware's queue of blocks
is the schedule.

Even and odd channels are told apart by naming registers, in code that the interpreter does not run: with `staged`,
array operations do the same.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxlib.mlir.dialects import vector
from jaxtyping import Array, Float

from pallas_kernels import _lanes, _platform
from pallas_kernels._hopper import run_once

WIDTHS = (64, 128, 256)  # of what turns of a head: 4 to 32 threads for a piece
FEWEST = 1 << 22  # numbers in q and k; below, a launch costs more than a faster pass gains
_VECTOR, _THREADS, _WARPS = 8, 128, 4
_MOST = 24576  # numbers of a block, beyond which a thread's share has no registers
_SHARE = 10240  # numbers that a block takes, if whole tokens and layouts allow: 80 a thread, in 40 registers


def refuses(
    q: Array | jax.ShapeDtypeStruct,
    k: Array | jax.ShapeDtypeStruct,
    cos: Array | jax.ShapeDtypeStruct,
    interleaved: bool,
) -> str | None:
    """Return why the kernel cannot rotate q (B, T, N, H) and k (B, T, K, H) by cos (B or 1, T, R/2), or None."""
    (_, tokens, heads, width), kv_heads = q.shape, k.shape[2]
    for x in (q, k):
        if x.dtype not in (jnp.bfloat16, jnp.float16):
            return f"it needs bfloat16 or float16, and q and k are {q.dtype} and {k.dtype}"
    turned, piece = 2 * cos.shape[-1], _piece(cos, interleaved)
    if turned not in WIDTHS or width % piece:
        return f"it turns {WIDTHS} channels of heads of a multiple of {piece}, and of these {width} turn {turned}"
    if any(_at_a_time(count, piece)[0] * count * width > _MOST for count in (heads, kv_heads)):
        return f"{heads} and {kv_heads} heads do not share out to its threads: they have too few registers"
    whole = _fewest_tokens(piece, heads, kv_heads)
    if tokens % whole:
        return f"a row must have a multiple of {whole} tokens, and has {tokens}"
    if not q.size + k.size >= FEWEST or q.size >= 2**31:
        return (
            f"it is for {FEWEST} numbers or more in q and k and fewer than 2**31 in q, and there are {q.size + k.size}"
        )
    return _platform.why_not_hopper(one_device=True)


# of equal calls one is compiled
@functools.partial(jax.jit, static_argnames=("back", "interleaved", "staged"), inline=True)
def rotate(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    cos: Float[Array, "B T R/2"],
    sin: Float[Array, "B T R/2"],
    *,
    back: bool,
    interleaved: bool = False,
    staged: bool = False,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"]]:
    """As reference.rotate of both, or the other way round if `back`.

    Args:
        q: queries, bf16 or f16; T must be what `refuses` says, as must the heads and R.
        k: keys, likewise.
        cos: f32 cosines; B may be 1.
        sin: f32 sines, same shape.
        back: whether the angles are taken off.
        interleaved: whether neighbours are a pair, not the halves of the first R channels.
        staged: whether array operations tell even and odd channels apart, as the interpreter wants it.

    Returns:
        The rotated q and k.
    """
    (batch, tokens, heads, width), kv_heads = q.shape, k.shape[2]
    form = _Form(_piece(cos, interleaved), interleaved, back, staged)
    taken = _tokens(tokens, width, form.piece, heads, kv_heads)
    parts = _parts(taken, width, form.piece, heads, kv_heads)

    def kernel(q_ref, k_ref, *refs):
        row, first = lax.axis_index("rows"), lax.axis_index("tiles") * taken
        at, (out_q_ref, out_k_ref) = pl.ds(first, taken), refs[2:]
        tables = [(ref, row if cos.shape[0] > 1 else 0) for ref in refs[:2]]
        *before, last = [(q_ref, out_q_ref, *part) for part in parts]
        keys = (k_ref, out_k_ref, 0, kv_heads)
        if before or taken * (heads + kv_heads) * width <= _MOST:
            for share, tensors in enumerate((*([one] for one in before), [last, keys])):
                turn_share = functools.partial(_turn, tensors, tables, row, at, form)
                pl.when(lax.axis_index("shares") == share)(turn_share)
            return
        for tensor in (last, keys):  # few heads of one need tokens of which the other's are too many at a time
            step = _tokens(taken, width, form.piece, tensor[-1])

            def turn(i, _, tensor=tensor, step=step):
                _turn((tensor,), tables, row, pl.ds(first + i * step, step), form)

            lax.fori_loop(0, taken // step, turn, None)

    run = plgpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k)],
        grid=(batch, tokens // taken, len(parts)),
        grid_names=("rows", "tiles", "shares"),
        compiler_params=_lanes.PARAMS,
    )
    q, k = run_once(run(q, k, cos, sin))
    return q, k


class _Form(NamedTuple):
    """Channels of a piece, and what `rotate` is told."""

    piece: int
    interleaved: bool
    back: bool
    staged: bool


def _turn(tensors, tables, row, at, form: _Form) -> None:
    """Turns the tokens `at` of each (input, output, first head, heads), by tables and their rows."""
    loaded = []
    for ref, _, start, heads in tensors:
        width = ref.shape[-1]
        parts = [(pl.ds(start, heads), pl.ds(first, form.piece)) for first in range(0, width, form.piece)]
        whole = turning = _layout(heads, form.piece)
        if form.interleaved:
            turning = _layout(heads, form.piece // 2, _VECTOR // 2)
        pieces = [_lanes.load(ref.at[row, at, *part], whole) for part in parts]
        angles = [_lanes.load(table.at[its_row, at], turning.reduce(1)) for table, its_row in tables]
        loaded.append((parts, pieces, angles, whole, turning))
    for (parts, pieces, angles, whole, turning), (_, out_ref, *_) in zip(loaded, tensors, strict=True):
        if form.interleaved:
            (a, b), passed = _apart(pieces[0].astype(jnp.float32), whole, turning, form.staged), pieces[1:]
        else:
            (a, b), passed = (x.astype(jnp.float32) for x in pieces[:2]), pieces[2:]
        c, s = (_lanes.spread(table, (0, 2), a.shape, turning) for table in angles)
        s = -s if form.back else s
        turned = a * c - b * s, b * c + a * s
        if form.interleaved:
            turned = (_joined(*turned, whole, turning, form.staged),)
        for part, x in zip(parts, (*turned, *passed), strict=True):
            out_ref[row, at, *part] = x.astype(out_ref.dtype)


def _apart(x: Array, whole, turning, staged: bool) -> tuple[Array, Array]:
    """Even and odd channels of x (tokens, heads, C) f32, of layout `whole`, in layout `turning`."""
    shape = (*x.shape[:-1], x.shape[-1] // 2)
    if staged:
        pairs = x.reshape(*shape, 2)
        return pairs[..., 0], pairs[..., 1]
    half = plgpu.ShapeDtypeStruct(shape, x.dtype, turning)

    @plgpu.inline_mgpu(arg_types=(whole,), return_type=(half, half))
    def take(_, x):
        return tuple(
            _array([vector.shuffle(eight, eight, range(first, _VECTOR, 2)) for eight in x.registers.flat], half)
            for first in (0, 1)
        )

    return take(x)


def _joined(even: Array, odd: Array, whole, turning, staged: bool) -> Array:
    """What `_apart` took apart."""
    shape = (*even.shape[:-1], even.shape[-1] * 2)
    if staged:
        return jnp.stack([even, odd], axis=-1).reshape(shape)
    joined = plgpu.ShapeDtypeStruct(shape, even.dtype, whole)
    order = [place + of * _VECTOR // 2 for place in range(_VECTOR // 2) for of in (0, 1)]

    @plgpu.inline_mgpu(arg_types=(turning, turning), return_type=joined)
    def join(_, even, odd):
        both = zip(even.registers.flat, odd.registers.flat, strict=True)
        return _array([vector.shuffle(first, second, order) for first, second in both], joined)

    return join(even, odd)


def _array(registers: list, of):
    """An array of f32 registers in row-major order, of shape and layout as `of`."""
    layout = of.layout.to_mgpu()
    shaped = np.array(registers, object).reshape(layout.registers_shape(of.shape))
    return mgpu.FragmentedArray(_registers=shaped, _layout=layout, _is_signed=None)


def _piece(cos: Array | jax.ShapeDtypeStruct, interleaved: bool) -> int:
    """Channels of a head that lie together for the threads: those of a table, or of its pairs."""
    return cos.shape[-1] * (2 if interleaved else 1)


def _at_a_time(heads: int, piece: int) -> tuple[int, int]:
    """(tokens, heads) whose pieces the threads hold at a time: as many heads as divide theirs, the rest by tokens."""
    pieces = _THREADS * _VECTOR // piece
    of_heads = math.gcd(heads, pieces)
    return pieces // of_heads, of_heads


def _layout(heads: int, channels: int, together: int = _VECTOR):
    """Of (tokens, heads, channels of a piece or of half its pairs): so many neighbouring channels a thread."""
    tokens, heads = _at_a_time(heads, channels * _VECTOR // together)
    by_head = math.gcd(heads, _WARPS)
    of_warp = tokens * by_head // _WARPS, heads // by_head
    # tokens and heads by warps, 1; tokens, heads and channels by lanes; a vector
    tiles = (tokens, heads, channels), (*of_warp, channels), (together,)
    return _lanes.tiled(*tiles, warps=(-7, -6), lanes=(-4, -3, -2))


def _fewest_tokens(piece: int, *heads: int) -> int:
    """Tokens that fill the threads with each tensor's heads."""
    return math.lcm(*(_at_a_time(count, piece)[0] for count in heads))


def _tokens(tokens: int, width: int, piece: int, *heads: int) -> int:
    """Taken at a time of so many, where a token has all these heads."""
    fewest = _fewest_tokens(piece, *heads)
    most = max(1, _SHARE // (fewest * sum(heads) * width))
    return fewest * math.gcd(tokens // fewest, 1 << (most.bit_length() - 1))


def _parts(taken: int, width: int, piece: int, heads: int, kv_heads: int) -> tuple[tuple[int, int], ...]:
    """(first head, heads) of the queries that a block turns, the last block with the keys beside them.

    One block has all, but where these are more than its share and the fewest tokens are taken: then two halve them.
    """
    half = (heads + kv_heads) // 2
    smaller = taken * half * width <= _SHARE < taken * (heads + kv_heads) * width
    if smaller and half < heads and taken % _fewest_tokens(piece, half, heads - half, kv_heads) == 0:
        return (0, half), (half, heads - half)
    return ((0, heads),)
