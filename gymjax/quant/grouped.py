"""Products of groups of rows with a weight each, whatever the weights are stored as."""

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.nf4_linear import NF4Weight, dequantize


def grouped(
    x: Float[Array, "M I"], w: Float[Array, "E O I"] | NF4Weight, group_sizes: Int[Array, " E"]
) -> Float[Array, "M O"]:
    """Multiply the rows of each group by its weight, `y[m] = x[m] @ w[e].T`, summed in f32, returned in x.dtype.

    Packed weights are dequantized at every use, in the backward pass again, and get no gradient.

    Args:
        x: rows sorted by group, see `grouped_matmul`.
        w: (E, O, I) array, or a packed weight whose arrays have one leading axis, E.
        group_sizes: rows of each group.

    Raises:
        ValueError: x's width is not what w takes, or group_sizes does not count w's groups.
    """
    return _grouped_nf4(x, w, group_sizes) if isinstance(w, NF4Weight) else grouped_matmul(x, w, group_sizes)


@jax.custom_vjp
def _grouped_nf4(x: Array, w: NF4Weight, group_sizes: Array) -> Array:
    return grouped_matmul(x, dequantize(w, x.dtype), group_sizes)


def _grouped_nf4_fwd(x: Array, w: NF4Weight, group_sizes: Array) -> tuple[Array, tuple[NF4Weight, Array]]:
    return _grouped_nf4(x, w, group_sizes), (w, group_sizes)


def _grouped_nf4_bwd(residuals: tuple[NF4Weight, Array], dy: Array) -> tuple[Array, None, np.ndarray]:
    w, group_sizes = residuals
    dx = grouped_matmul(dy, dequantize(w, dy.dtype), group_sizes, transposed=False)
    return dx, None, np.zeros(group_sizes.shape, jax.dtypes.float0)


_grouped_nf4.defvjp(_grouped_nf4_fwd, _grouped_nf4_bwd)
