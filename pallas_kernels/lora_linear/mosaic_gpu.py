"""Adapted layers whose packed weights this project's Hopper kernels unpack; the products are XLA's."""

from collections.abc import Sequence

import jax
from jaxtyping import Array

from pallas_kernels import nf4_linear
from pallas_kernels.nf4_linear import NF4Weight


def refuses(ws: Sequence[Array | NF4Weight], dtype: jax.typing.DTypeLike) -> str | None:
    """Return why the kernels have nothing to do for layers of these weights, or cannot do it, or None."""
    packed = [w for w in ws if isinstance(w, NF4Weight)]
    if not packed:
        return "it unpacks weights, and none is packed"
    return next((reason for w in packed if (reason := nf4_linear.refuses(w, dtype)) is not None), None)
