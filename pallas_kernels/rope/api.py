"""Public rotary position embedding: argument checks."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import Implementation, _dispatch
from pallas_kernels.rope import mosaic_gpu, reference


def rope(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    cos: Float[Array, "B T R/2"],
    sin: Float[Array, "B T R/2"],
    *,
    interleaved: bool = False,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"]]:
    """Rotate queries and keys by their positions.

    `(a, b) -> (a*cos - b*sin, b*cos + a*sin)` in f32, returned in the inputs' dtypes, with a the first and b the second
    half of the first R channels of each head (the "rotate_half" of Hugging Face) or, interleaved, their even and odd
    ones (the paper's order); the other channels pass. R is H, or less where a model rotates a part of its heads. The
    angles are constants: cos and sin get no gradient, and the backward pass turns the other way. Source: arXiv
    2104.09864, eq. 34.

    Args:
        q: queries, f32, bf16 or f16.
        k: keys, same B, T and H.
        cos: f32 cosines of the angles; B may be 1, for positions that all rows share.
        sin: f32 sines, same shape.
        interleaved: which channels of a head are a pair, see above.
        implementation: "mosaic_gpu", "xla", or None for the fastest that accepts the arguments on this device.

    Returns:
        The rotated q and k.

    Raises:
        ValueError: shapes do not fit together, H is odd, or the tables are not f32.
        NotImplementedError: the named implementation refuses these arguments or does not exist for this operation.
    """
    _check(q, k, cos, sin)
    if _dispatch.choose("rope", implementation, _refusals(q, k, cos, interleaved)) == "mosaic_gpu":
        return _rotate_both(interleaved, q, k, cos, sin)
    return _rotate(interleaved, q, cos, sin), _rotate(interleaved, k, cos, sin)


def explain(tokens: int = 8192, heads: int = 32, kv_heads: int = 8, width: int = 128) -> str:
    """Say which implementation turns the halves of so many bf16 heads, and why."""
    q, k = (jax.ShapeDtypeStruct((1, tokens, count, width), jnp.bfloat16) for count in (heads, kv_heads))
    cos = jax.ShapeDtypeStruct((1, tokens, width // 2), jnp.float32)
    return _dispatch.explain("rope", _refusals(q, k, cos, interleaved=False))


def _refusals(
    q: Array | jax.ShapeDtypeStruct,
    k: Array | jax.ShapeDtypeStruct,
    cos: Array | jax.ShapeDtypeStruct,
    interleaved: bool,
) -> _dispatch.Refusals:
    kernel = mosaic_gpu.refuses(q, k, cos, interleaved)
    if interleaved and 2 * cos.shape[-1] < q.shape[-1]:  # XLA's 3.4 TB/s against 3.1 to 3.3 on an H200
        return {"xla": None, "mosaic_gpu": kernel}
    return {"mosaic_gpu": kernel, "xla": None}


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rotate_both(interleaved: bool, q: Array, k: Array, cos: Array, sin: Array) -> tuple[Array, Array]:
    return mosaic_gpu.rotate(q, k, cos, sin, back=False, interleaved=interleaved)


def _rotate_both_fwd(
    interleaved: bool, q: Array, k: Array, cos: Array, sin: Array
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    return mosaic_gpu.rotate(q, k, cos, sin, back=False, interleaved=interleaved), (cos, sin)


def _rotate_both_bwd(
    interleaved: bool, tables: tuple[Array, Array], cotangents: tuple[Array, Array]
) -> tuple[Array, Array, None, None]:
    dq, dk = mosaic_gpu.rotate(*cotangents, *tables, back=True, interleaved=interleaved)
    return dq, dk, None, None


_rotate_both.defvjp(_rotate_both_fwd, _rotate_both_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rotate(interleaved: bool, x: Array, cos: Array, sin: Array) -> Array:
    return reference.rotate(x, cos, sin, interleaved)


def _rotate_fwd(interleaved: bool, x: Array, cos: Array, sin: Array) -> tuple[Array, tuple[Array, Array]]:
    return reference.rotate(x, cos, sin, interleaved), (cos, sin)


def _rotate_bwd(interleaved: bool, tables: tuple[Array, Array], dy: Array) -> tuple[Array, None, None]:
    cos, sin = tables
    return reference.rotate(dy, cos, -sin, interleaved), None, None


_rotate.defvjp(_rotate_fwd, _rotate_bwd)


def _check(q: Array, k: Array, cos: Array, sin: Array) -> None:
    if q.ndim != 4 or k.ndim != 4 or (*q.shape[:2], q.shape[3]) != (*k.shape[:2], k.shape[3]):
        raise ValueError(f"rope: q (B, T, N, H) and k (B, T, K, H) must agree in B, T, H; got {q.shape} and {k.shape}")
    if not (jnp.issubdtype(q.dtype, jnp.floating) and jnp.issubdtype(k.dtype, jnp.floating)):
        raise ValueError(f"rope: q and k must be floating-point; got {q.dtype} and {k.dtype}")
    batch, tokens, _, head = q.shape
    if head % 2:
        raise ValueError(f"rope: the head width must be even to be split into halves; got {head}")
    whole = (batch, tokens, head // 2)
    fits = cos.ndim == 3 and cos.shape[0] in (1, batch) and cos.shape[1] == tokens and 1 <= cos.shape[2] <= head // 2
    if cos.shape != sin.shape or not fits:
        raise ValueError(
            f"rope: cos and sin must be {whole} (B may be 1, the last axis less for heads rotated in part); "
            f"got {cos.shape} and {sin.shape}"
        )
    if cos.dtype != jnp.float32 or sin.dtype != jnp.float32:
        raise ValueError(
            f"rope: cos and sin must be float32, as bf16 angles are wrong past 256 positions; "
            f"got {cos.dtype} and {sin.dtype}"
        )
