"""Named shapes of SwiGLU and its naive peer."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels._case import Case, Peer

METRIC = "gbps"


def _case(name: str, rows: int, width: int) -> Case:
    def args(key: Array) -> tuple[tuple[Array, ...], dict[str, object]]:
        return tuple(jax.random.normal(k, (rows, width), jnp.bfloat16) for k in jax.random.split(key)), {}

    size = 2 * rows * width
    return Case(name, args, 5 * rows * width, 3 * size, 15 * rows * width, 8 * size, wrt=(0, 1))


TINY = (_case("tiny-M6-F32", 6, 32), _case("tiny-M5-F127", 5, 127))

CASES = (
    _case("M8192-F14336", 8192, 14336),
    _case("M16384-F14336", 16384, 14336),
    _case("M16384-F4864", 16384, 4864),
)


def _naive(gate: Array, up: Array) -> Array:
    gate_f32 = gate.astype(jnp.float32)
    return (gate_f32 / (1 + jnp.exp(-gate_f32)) * up).astype(gate.dtype)


PEERS = {"naive": Peer(_naive)}
