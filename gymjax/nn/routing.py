"""Which experts a token goes to, with which weight, and where its copies lie once they are sorted by expert."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int


def route(
    logits_ME: Float[Array, "M E"], top_k: int, *, renormalize: bool
) -> tuple[Int[Array, "M k"], Float[Array, "M k"]]:
    """The top_k experts of each token, best first, and their weights, f32.

    `weight = softmax(logits)[expert]`, divided by its sum over the chosen experts with renormalize. That is the softmax
    of the chosen experts' logits: choosing before or after the softmax makes no difference then. Equal logits go to the
    lower expert. Source: arXiv 1701.06538, eq. 3 to 5 (renormalised); 2409.02060, eq. 2 (not).
    """
    top_Mk, expert_Mk = jax.lax.top_k(logits_ME.astype(jnp.float32), top_k)
    if renormalize:
        return expert_Mk, jax.nn.softmax(top_Mk, axis=-1)
    total_M1 = jax.nn.logsumexp(logits_ME.astype(jnp.float32), axis=-1, keepdims=True)
    return expert_Mk, jnp.exp(top_Mk - total_M1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RouterStats:
    """Sums over the tokens that count, of one layer or stacked over layers; padding is left out.

    Attributes:
        counts: (E,) f32, tokens sent to each expert; they sum to top_k times the tokens.
        probs: (E,) f32, softmax over all experts, summed over tokens.
        z: () f32, square of the logits' logsumexp, summed over tokens.
    """

    counts: Float[Array, "*L E"]
    probs: Float[Array, "*L E"]
    z: Float[Array, "*L"]


def router_stats(
    logits_ME: Float[Array, "M E"], expert_Mk: Int[Array, "M k"], counted_M: Bool[Array, " M"]
) -> RouterStats:
    """Statistics of one router over the tokens that are counted."""
    logits_ME = logits_ME.astype(jnp.float32)
    counted_M1 = counted_M[:, None].astype(jnp.float32)
    total_M1 = jax.nn.logsumexp(logits_ME, axis=-1, keepdims=True)
    chosen_ME = jnp.sum(jax.nn.one_hot(expert_Mk, logits_ME.shape[1], dtype=jnp.float32), axis=1)
    return RouterStats(
        counts=jnp.sum(chosen_ME * counted_M1, axis=0),
        probs=jnp.sum(jnp.exp(logits_ME - total_M1) * counted_M1, axis=0),
        z=jnp.sum(jnp.square(total_M1) * counted_M1),
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dispatch:
    """Where the k copies of every token lie once they are sorted by expert, tokens of one expert in their own order.

    Attributes:
        sizes: (E,) int32, rows of each expert.
        expert: (M * k,) int32, expert of each row.
        token: (M * k,) int32, token of each row.
        copy: (M * k,) int32, which of its token's k copies each row is.
        row: (M, k) int32, row of each copy.
    """

    sizes: Int[Array, " E"]
    expert: Int[Array, " rows"]
    token: Int[Array, " rows"]
    copy: Int[Array, " rows"]
    row: Int[Array, "M k"]


def dispatch(expert_Mk: Int[Array, "M k"], experts: int) -> Dispatch:
    """Sorts every copy by its expert; no copy is dropped. The sort is stable, so that equal inputs give equal sums."""
    flat = expert_Mk.reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    row = jnp.argsort(order).astype(jnp.int32).reshape(expert_Mk.shape)
    token, copy = jnp.divmod(order, expert_Mk.shape[1])
    return Dispatch(jnp.bincount(flat, length=experts).astype(jnp.int32), flat[order], token, copy, row)


@jax.custom_vjp
def scatter(x_MD: Float[Array, "M D"], to: Dispatch) -> Float[Array, "rows D"]:
    """Copies every token to its rows. The gradient gathers a token's rows and sums them in f32, without atomics."""
    return x_MD[to.token]


@jax.custom_vjp
def combine(y_rows: Float[Array, "rows D"], to: Dispatch) -> Float[Array, "M D"]:
    """Sums every token's rows in f32; the adjoint of `scatter`."""
    return jnp.sum(y_rows[to.row], axis=1, dtype=jnp.float32).astype(y_rows.dtype)


def _no_gradient(to: Dispatch) -> Dispatch:
    return jax.tree.map(lambda index: np.zeros(index.shape, jax.dtypes.float0), to)


scatter.defvjp(lambda x, to: (scatter(x, to), to), lambda to, dy: (combine(dy, to), _no_gradient(to)))
combine.defvjp(lambda y, to: (combine(y, to), to), lambda to, dx: (scatter(dx, to), _no_gradient(to)))
