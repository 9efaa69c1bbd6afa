"""Codes of exponentials, 16 bits each, become gradients by the products on Hopper, in place.

A block has a piece of all rows laid end to end, in which at most one row ends and the next begins; each element finds
by its place which row's numbers are its own.
"""

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap
from jaxtyping import Array, BFloat16, Float, Int, Int16

from pallas_kernels._hopper import launch_in_place

STEPS = 720  # of a code, an octave
LEAST = -(2**15)  # the code of an exponential of 2**-40 and less
ONE = LEAST + 40 * STEPS
PIECE = 4096


def code(steps):
    """The nearest integer of at least LEAST, as int16.

    A multiple of 2**16 is added that leaves f32 only integers, whose last bits are the result.
    """
    shifted = jnp.maximum(steps, float(LEAST)) + (2.0**23 + 2.0**16)
    return lax.bitcast_convert_type(shifted, jnp.int32).astype(jnp.int16)


def gradients(
    codes: Int16[Array, "tiled V"],
    labels: Int[Array, " M"],
    of_all: Float[Array, " M"],
    of_label: Float[Array, " M"],
    *,
    piece: int = PIECE,
) -> BFloat16[Array, "tiled V"]:
    """Return of_all[m] times the exponentials that codes stand for, and of_label[m] where the label is.

    Args:
        codes: their number below 2**31 and a multiple of `piece`, V at least as large; the result takes their place.
        labels: int32; one outside the vocabulary is nowhere.
        of_all: f32.
        of_label: f32.
        piece: a block's codes; a multiple of 1024.

    Raises:
        ValueError: the codes are not as they must be.
    """
    rows, vocabulary = codes.shape
    if vocabulary < piece or codes.size % piece or codes.size >= 2**31:
        raise ValueError(f"linear_cross_entropy: codes {codes.shape} must be a multiple of {piece}, of wide rows")
    layout = plgpu.Layout.WG_STRIDED((piece,), vec_size=8)
    more = rows - len(labels)
    labels = jnp.pad(jnp.where(labels < vocabulary, labels, -1).astype(jnp.int32), (0, more), constant_values=-1)
    of_all, of_label = (jnp.pad(one.astype(jnp.float32), (0, more)) for one in (of_all, of_label))

    def kernel(refs, _):
        labels_ref, of_all_ref, of_label_ref, room_ref = refs
        start = lax.axis_index("pieces") * piece
        row = lax.div(start, jnp.int32(vocabulary))
        second, end = jnp.minimum(row + 1, rows - 1), (row + 1) * vocabulary - start

        def label_of(of_row, begin):
            return jnp.where(labels_ref[of_row] < 0, -1, begin + labels_ref[of_row])

        mine = room_ref.at[pl.ds(start, piece)]
        steps = plgpu.load(mine, layout=layout, optimized=False).astype(jnp.float32)
        place = plgpu.broadcasted_iota(jnp.int32, (piece,), 0, layout=layout)
        power = jnp.where(steps == float(LEAST), 0.0, jnp.exp2(steps * (1 / STEPS) - ONE / STEPS))
        y = power * jnp.where(place < end, of_all_ref[row], of_all_ref[second])
        for of_row, begin in ((row, end - vocabulary), (second, end)):
            y = jnp.where(place == label_of(of_row, begin), of_label_ref[of_row], y)
        mine[...] = lax.bitcast_convert_type(y.astype(jnp.bfloat16), jnp.int16)

    @sequential_vmap
    def run(codes, *each):
        grid = {"pieces": codes.size // piece}
        (filled,) = launch_in_place(kernel, (), *each, out=(codes.reshape(-1),), grid=grid, warpgroups=1)
        return lax.bitcast_convert_type(filled, jnp.bfloat16).reshape(codes.shape)

    return run(codes, labels, of_all, of_label)
