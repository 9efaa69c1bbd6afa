"""Named shapes of the grouped matrix product and its peers."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels._case import Case, Peer

METRIC = "tflops"


def _case(name: str, rows: int, groups: int, out: int, width: int, *, spare: int = 0) -> Case:
    """Rows are spread over the groups at random; `spare` of them belong to none."""

    def args(key: Array) -> tuple[tuple[Array, ...], dict[str, object]]:
        x_key, w_key, size_key = jax.random.split(key, 3)
        x = jax.random.normal(x_key, (rows, width), jnp.bfloat16)
        w = jax.random.normal(w_key, (groups, out, width), jnp.bfloat16) * width**-0.5
        owner = jax.random.randint(size_key, (rows - spare,), 0, groups)
        return (x, w, jnp.bincount(owner, length=groups).astype(jnp.int32)), {}

    flops = 2 * (rows - spare) * width * out
    moved = 2 * (rows * (width + out) + groups * out * width)
    parts = {"tflops_dx": (0, flops), "tflops_dw": (1, flops)}
    return Case(name, args, flops, moved, 3 * flops, 3 * moved, wrt=(0, 1), parts=parts)


TINY = (
    _case("tiny-M24-E3-F16-D8", 24, 3, 16, 8),
    _case("tiny-M19-E5-F7-D9-spare4", 19, 5, 7, 9, spare=4),
)

CASES = (
    _case("M65536-E64-F1024-D2048", 65536, 64, 1024, 2048),  # OLMoE-1B-7B, 8192 tokens, gate or up
    _case("M65536-E64-F2048-D1024", 65536, 64, 2048, 1024),  # down
    _case("M16384-E8-F14336-D4096", 16384, 8, 14336, 4096),  # Mixtral-8x7B, 8192 tokens, gate or up
    _case("M16384-E8-F4096-D14336", 16384, 8, 4096, 14336),  # down
    _case("M65536-E128-F768-D2048", 65536, 128, 768, 2048),  # Qwen3-30B-A3B, 8192 tokens, gate or up
    _case("M32768-E32-F2880-D2880", 32768, 32, 2880, 2880),  # gpt-oss-20b, 8192 tokens
    _case("M8-E64-F1024-D2048", 8, 64, 1024, 2048),  # OLMoE-1B-7B, one token
)


def _naive(x: Array, w: Array, group_sizes: Array) -> Array:
    """Every row with every weight, then the own one picked: E times the work."""
    end = jnp.cumsum(group_sizes)
    owner = jnp.searchsorted(end, jnp.arange(x.shape[0]), side="right")
    every = jnp.einsum("md,efd->emf", x, w)
    picked = jnp.take_along_axis(every, jnp.minimum(owner, len(end) - 1)[None, :, None], axis=0)[0]
    return jnp.where((owner < len(end))[:, None], picked, 0)


def _ragged_dot(x: Array, w: Array, group_sizes: Array) -> Array:
    return jax.lax.ragged_dot(x, w, group_sizes)


def swapped(x: Array, w: Array, group_sizes: Array) -> tuple[Array, Array, Array]:
    """The arguments of a case for those who have weights as (E, D, F)."""
    return x, w.swapaxes(1, 2), group_sizes


PEERS = {"naive": Peer(_naive), "ragged_dot": Peer(_ragged_dot, swapped)}
