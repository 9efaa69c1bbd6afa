"""Named shapes of the linear cross-entropy and its naive peer."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels._case import Case, Peer

METRIC = "tflops"


def _case(name: str, batch: int, tokens: int, width: int, vocabulary: int, frozen: bool, **options) -> Case:
    def args(key: Array) -> tuple[tuple[Array, ...], dict[str, object]]:
        x_key, head_key, label_key = jax.random.split(key, 3)
        x = jax.random.normal(x_key, (batch, tokens, width), jnp.bfloat16)
        head = jax.random.normal(head_key, (vocabulary, width), jnp.bfloat16) * width**-0.5
        labels = jax.random.randint(label_key, (batch, tokens), 0, vocabulary)
        return (x, head, labels), {"frozen_head": frozen, **options}

    product = 2 * batch * tokens * width * vocabulary
    moved = 2 * (batch * tokens * width + vocabulary * width)
    products = 2 if frozen else 3  # what the mathematics needs: recomputed logits do not count
    return Case(name, args, product, moved, products * product, 2 * moved, wrt=(0,) if frozen else (0, 1))


TINY = (
    _case("tiny-B2-T12-D8-V33-frozen", 2, 12, 8, 33, frozen=True, chunk_tokens=10),
    _case("tiny-B2-T13-D8-V33-trained", 2, 13, 8, 33, frozen=False, chunk_tokens=10, group_tokens=20),
    _case("tiny-B2-T13-D8-V33-trained-sum", 2, 13, 8, 33, frozen=False, chunk_tokens=10, reduction="sum"),
)

CASES = (
    _case("B4-T2048-D4096-V128256-frozen", 4, 2048, 4096, 128256, frozen=True, reduction="sum"),
    _case("B4-T2048-D4096-V128256-trained", 4, 2048, 4096, 128256, frozen=False, reduction="sum"),
    _case("B4-T2048-D4096-V128256-frozen-tokens", 4, 2048, 4096, 128256, frozen=True),
    _case("B4-T2048-D4096-V128256-trained-tokens", 4, 2048, 4096, 128256, frozen=False),
    _case("B32-T2048-D4096-V128256-frozen", 32, 2048, 4096, 128256, frozen=True, reduction="sum"),
    _case("B4-T4096-D4096-V128256-frozen", 4, 4096, 4096, 128256, frozen=True, reduction="sum"),
    _case("B8-T2048-D896-V151936-frozen", 8, 2048, 896, 151936, frozen=True, reduction="sum"),
    _case("B8-T2048-D896-V151936-trained", 8, 2048, 896, 151936, frozen=False, reduction="sum"),
    _case("B4-T2048-D2560-V262144-frozen", 4, 2048, 2560, 262144, frozen=True, reduction="sum"),
)


def _naive(x: Array, head: Array, labels: Array, *, frozen_head: bool, reduction: str = "none", **sizes) -> Array:
    """Hold the logits of all tokens."""
    del sizes
    head = jax.lax.stop_gradient(head) if frozen_head else head
    logits = jnp.einsum("...d,vd->...v", x, head).astype(jnp.float32)
    loss = -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1)[..., 0]
    return loss.sum() if reduction == "sum" else loss


PEERS = {"naive": Peer(_naive)}
