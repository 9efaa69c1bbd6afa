"""Named shapes of the low-rank adapted linear layer and its peers."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels._case import Case, Peer
from pallas_kernels.lora_linear.reference import ROOM
from pallas_kernels.nf4_linear import NF4Weight, dequantize
from pallas_kernels.nf4_linear.cases import random_weight

METRIC = "tflops"


def _case(name: str, rows: int, out: int, width: int, rank: int, *, nf4: bool = False, room: int = 0) -> Case:
    """With room, x has so many columns behind it, as a norm's kernel leaves them, and no gradient is taken."""

    def args(key: Array) -> tuple[tuple[object, ...], dict[str, object]]:
        x_key, w_key, a_key, b_key = jax.random.split(key, 4)
        dense = jax.random.normal(w_key, (out, width), jnp.bfloat16) * width**-0.5
        w = random_weight(w_key, (out, width)) if nf4 else dense
        a = jax.random.normal(a_key, (rank, width), jnp.float32) * width**-0.5
        b = jax.random.normal(b_key, (out, rank), jnp.float32)
        return (jax.random.normal(x_key, (rows, width + room), jnp.bfloat16), w, a, b, jnp.float32(0.5)), {}

    base, low = 2 * rows * width * out, 2 * rows * rank * (width + out)
    moved = 2 * rows * (width + out) + out * width * (0.516 if nf4 else 2) + 4 * rank * (width + out)
    return Case(name, args, base + low, moved, 2 * base + 3 * low, 3 * moved, wrt=() if room else (0, 2, 3))


TINY = (
    _case("tiny-M6-O16-I32-R4", 6, 16, 32, 4),
    _case("tiny-M5-O7-I9-R2-nf4", 5, 7, 9, 2, nf4=True),
)

CASES = (
    _case("M8192-O4096-I4096-R16", 8192, 4096, 4096, 16),
    _case("M8192-O14336-I4096-R16", 8192, 14336, 4096, 16),
    _case("M8192-O14336-I4096-R64", 8192, 14336, 4096, 64),
    _case("M8192-O4096-I14336-R16", 8192, 4096, 14336, 16),
    _case("M8192-O14336-I4096-R16-nf4", 8192, 14336, 4096, 16, nf4=True),
    _case("M8192-O14336-I4096-R16-nf4-room", 8192, 14336, 4096, 16, nf4=True, room=ROOM),
)


def _dense(w: Array | NF4Weight, x: Array) -> Array:
    return jax.lax.stop_gradient(dequantize(w, x.dtype) if isinstance(w, NF4Weight) else w)


def _naive(x: Array, w: Array | NF4Weight, a: Array, b: Array, scale: Array) -> Array:
    """Three products, a scaling and a sum under autodiff."""
    low = (x @ a.astype(x.dtype).T) @ b.astype(x.dtype).T
    return x @ _dense(w, x).T + scale.astype(x.dtype) * low


PEERS = {
    "naive": Peer(_naive, prepare=lambda x, w, a, b, scale: (x[:, : w.shape[1]], w, a, b, scale)),
    "bf16_matmul": Peer(
        lambda x, w, a, b, scale: x @ jax.lax.stop_gradient(w).T,
        prepare=lambda x, w, a, b, scale: (x[:, : w.shape[1]], _dense(w, x), a, b, scale),
    ),
}
