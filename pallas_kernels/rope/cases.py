"""Named shapes of the rotary embedding and its naive peer."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels._case import Case, Peer

METRIC = "gbps"


def _case(name: str, batch: int, tokens: int, heads: int, kv_heads: int, width: int) -> Case:
    def args(key: Array) -> tuple[tuple[Array, ...], dict[str, object]]:
        shapes = ((batch, tokens, heads, width), (batch, tokens, kv_heads, width))
        q, k = (jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(jax.random.split(key), shapes))
        angle = jnp.arange(tokens)[:, None] * 10000.0 ** (-jnp.arange(0, width, 2) / width)
        angle = jnp.broadcast_to(angle, (batch, tokens, width // 2))
        return (q, k, jnp.cos(angle), jnp.sin(angle)), {}

    size = batch * tokens * (heads + kv_heads) * width
    moved = 4 * size + 4 * batch * tokens * width
    return Case(name, args, 3 * size, moved, 6 * size, 2 * moved, wrt=(0, 1))


TINY = (_case("tiny-B2-S7-N4-K2-D8", 2, 7, 4, 2, 8), _case("tiny-B1-S5-N3-K1-D6", 1, 5, 3, 1, 6))

CASES = (
    _case("B4-S2048-N32-K8-D128", 4, 2048, 32, 8, 128),
    _case("B4-S4096-N32-K8-D128", 4, 4096, 32, 8, 128),
    _case("B8-S2048-N14-K2-D64", 8, 2048, 14, 2, 64),
)


def _naive(q: Array, k: Array, cos: Array, sin: Array) -> tuple[Array, Array]:
    """Multiply by doubled tables, as Hugging Face does."""
    cos, sin = (jnp.concatenate([t, t], axis=-1)[:, :, None] for t in (cos, sin))

    def rotate(x: Array) -> Array:
        first, second = jnp.split(x, 2, axis=-1)
        return (x * cos + jnp.concatenate([-second, first], axis=-1) * sin).astype(x.dtype)

    return rotate(q), rotate(k)


PEERS = {"naive": Peer(_naive)}
