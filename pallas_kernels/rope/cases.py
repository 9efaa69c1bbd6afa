"""Named shapes of the rotary embedding and its naive peer."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels._case import Case, Peer

METRIC = "gbps"


def _case(
    name: str, batch: int, tokens: int, heads: int, kv_heads: int, width: int, *, rotated: int | None = None, **options
) -> Case:
    def args(key: Array) -> tuple[tuple[Array, ...], dict[str, object]]:
        shapes = ((batch, tokens, heads, width), (batch, tokens, kv_heads, width))
        q, k = (jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(jax.random.split(key), shapes))
        turned = rotated or width
        angle = jnp.arange(tokens)[:, None] * 10000.0 ** (-jnp.arange(0, turned, 2) / turned)
        angle = jnp.broadcast_to(angle, (batch, tokens, turned // 2))
        return (q, k, jnp.cos(angle), jnp.sin(angle)), options

    size = batch * tokens * (heads + kv_heads) * width
    moved = 4 * size + 4 * batch * tokens * (rotated or width)
    return Case(name, args, 3 * size, moved, 6 * size, 2 * moved, wrt=(0, 1))


TINY = (
    _case("tiny-B2-S7-N4-K2-D8", 2, 7, 4, 2, 8),
    _case("tiny-B1-S5-N3-K1-D6", 1, 5, 3, 1, 6),
    _case("tiny-B1-S5-N3-K1-D6-interleaved", 1, 5, 3, 1, 6, interleaved=True),
    _case("tiny-B1-S5-N3-K1-D8-R4-interleaved", 1, 5, 3, 1, 8, rotated=4, interleaved=True),
)

CASES = (
    _case("B4-S2048-N32-K8-D128", 4, 2048, 32, 8, 128),
    _case("B4-S4096-N32-K8-D128", 4, 4096, 32, 8, 128),
    _case("B32-S2048-N32-K8-D128", 32, 2048, 32, 8, 128),
    _case("B8-S2048-N14-K2-D64", 8, 2048, 14, 2, 64),
    _case("B32-S2048-N14-K2-D64", 32, 2048, 14, 2, 64),
    _case("B4-S2048-N32-K32-D128-R64", 4, 2048, 32, 32, 128, rotated=64),
    _case("B4-S2048-N32-K8-D128-interleaved", 4, 2048, 32, 8, 128, interleaved=True),
    _case("B4-S4096-N32-K8-D128-interleaved", 4, 4096, 32, 8, 128, interleaved=True),
    _case("B4-S4096-N32-K2-D128-R64", 4, 4096, 32, 2, 128, rotated=64),
    _case("B4-S4096-N32-K2-D128-R64-interleaved", 4, 4096, 32, 2, 128, rotated=64, interleaved=True),
)


def _naive(q: Array, k: Array, cos: Array, sin: Array, *, interleaved: bool = False) -> tuple[Array, Array]:
    """Multiply by doubled tables, as Hugging Face does."""
    tables = (jnp.repeat(t, 2, axis=-1) if interleaved else jnp.concatenate([t, t], axis=-1) for t in (cos, sin))
    cos, sin = (table[:, :, None] for table in tables)

    def swap(x: Array) -> Array:
        if interleaved:
            return jnp.stack([-x[..., 1::2], x[..., ::2]], axis=-1).reshape(x.shape)
        first, second = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([-second, first], axis=-1)

    def rotate(x: Array) -> Array:
        turned, passed = jnp.split(x, [cos.shape[-1]], axis=-1)
        return jnp.concatenate([(turned * cos + swap(turned) * sin).astype(x.dtype), passed], axis=-1)

    return rotate(q), rotate(k)


PEERS = {"naive": Peer(_naive)}
