"""Named shapes of RMSNorm and its naive peer."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels._case import Case, Peer

METRIC = "gbps"


def _case(name: str, rows: int, width: int, *, frozen: bool = False, gradient: bool = True) -> Case:
    def args(key: Array) -> tuple[tuple[Array, ...], dict[str, object]]:
        x_key, scale_key = jax.random.split(key)
        x = jax.random.normal(x_key, (rows, width), jnp.bfloat16)
        return (x, 1 + 0.1 * jax.random.normal(scale_key, (width,), jnp.float32)), {"eps": 1e-5}

    size = 2 * rows * width
    wrt = ((0,) if frozen else (0, 1)) if gradient else ()
    return Case(name, args, 4 * rows * width, 2 * size, 12 * rows * width, 5 * size, wrt=wrt)


def _added(name: str, rows: int, width: int) -> Case:
    """Forward reads two arrays and writes two; backward reads the sum and both gradients and writes one."""

    def args(key: Array) -> tuple[tuple[Array, ...], dict[str, object]]:
        x_key, added_key, scale_key = jax.random.split(key, 3)
        x, added = (jax.random.normal(k, (rows, width), jnp.bfloat16) for k in (x_key, added_key))
        return (x, added, 1 + 0.1 * jax.random.normal(scale_key, (width,), jnp.float32)), {"eps": 1e-5}

    size = 2 * rows * width
    work = rows * width
    return Case(name, args, 5 * work, 4 * size, 14 * work, 8 * size, wrt=(0, 1), function="add_rms_norm")


TINY = (_case("tiny-M6-D32", 6, 32), _case("tiny-M5-D127", 5, 127))

CASES = (
    _case("M8192-D4096", 8192, 4096),
    _case("M8192-D4096-frozen", 8192, 4096, frozen=True),
    _case("M16384-D4096", 16384, 4096),
    _case("M65536-D4096", 65536, 4096),
    _case("M65536-D4096-frozen", 65536, 4096, frozen=True),
    _added("M65536-D4096-added", 65536, 4096),
    _case("M16384-D896", 16384, 896),
    _case("M16384-D3584", 16384, 3584),
    _case("M131072-D128", 131072, 128),
    _case("M524288-D128", 524288, 128),
    _case("M131072-D128-forward", 131072, 128, gradient=False),
    _case("M524288-D128-forward", 524288, 128, gradient=False),
    _added("M8192-D4096-added", 8192, 4096),
)


def _naive(x: Array, scale: Array, *, eps: float) -> Array:
    x_f32 = x.astype(jnp.float32)
    variance = jnp.mean(jnp.square(x_f32), axis=-1, keepdims=True)
    return (x_f32 / jnp.sqrt(variance + eps) * scale).astype(x.dtype)


PEERS = {"naive": Peer(_naive)}
