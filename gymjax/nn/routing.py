"""Which experts a token goes to, with which weight, and where its copies lie once they are sorted by expert."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

ROUTING_NAME = "routing"  # of all that the backward pass wants of a router's choice, so that it does not choose again


@jax.custom_vjp
def router_logits(x_MD: Float[Array, "M D"], w_ED: Float[Array, "E D"]) -> Float[Array, "M E"]:
    """`x @ w.T` in f32 of bf16 tokens on the tensor cores: near ties must not change experts.

    Products of bf16 are exact in f32, and an f32 weight is the sum of three in bf16, to its last bit: one product with
    three times the columns, where one in f32 would run beside the tensor cores on a copy of x in f32. The gradient of w
    cuts that of the logits likewise; that of x, which is rounded to bf16, takes the leading parts alone.
    """
    parts = _thirds(w_ED) if w_ED.dtype == jnp.float32 else [w_ED.astype(x_MD.dtype)]
    return sum(jnp.split(_f32_product("md,ed->me", x_MD, jnp.concatenate(parts)), len(parts), axis=1), jnp.float32(0))


def _router_logits_fwd(x_MD: Array, w_ED: Array) -> tuple[Array, tuple[Array, Array]]:
    return router_logits(x_MD, w_ED), (x_MD, w_ED)


def _router_logits_bwd(residuals: tuple[Array, Array], dy_ME: Array) -> tuple[Array, Array]:
    x_MD, w_ED = residuals
    # summed in f32 and rounded by the product: asked for f32, it would store 4 bytes an element
    dx_MD = jnp.einsum("me,ed->md", dy_ME.astype(x_MD.dtype), w_ED.astype(x_MD.dtype))
    parts = _f32_product("me,md->ed", jnp.concatenate(_thirds(dy_ME), axis=1), x_MD)
    return dx_MD, sum(jnp.split(parts, 3), jnp.float32(0)).astype(w_ED.dtype)


router_logits.defvjp(_router_logits_fwd, _router_logits_bwd)


def _thirds(x: Float[Array, "..."]) -> list[Array]:
    """Three arrays of bf16 whose sum is x; by reduce_precision, as compilers drop a conversion there and back."""
    found = []
    for _ in range(3):
        leading = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        found.append(leading.astype(jnp.bfloat16))
        x = x - leading
    return found


def _f32_product(dims: str, x: Array, y: Array) -> Float[Array, "..."]:
    return jnp.einsum(dims, x, y, preferred_element_type=jnp.float32)


def route(
    logits_ME: Float[Array, "M E"], top_k: int, *, renormalize: bool
) -> tuple[Int[Array, "M k"], Float[Array, "M k"]]:
    """The top_k experts of each token, best first, and their weights, f32.

    `weight = softmax(logits)[expert]`, divided by its sum over the chosen experts with renormalize. That is the softmax
    of the chosen experts' logits: choosing before or after the softmax makes no difference then. Equal logits go to the
    lower expert. Source: arXiv 1701.06538, eq. 3 to 5 (renormalised); 2409.02060, eq. 2 (not).
    """
    return _route(logits_ME.astype(jnp.float32), top_k, renormalize)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _route(logits_ME: Array, top_k: int, renormalize: bool) -> tuple[Array, Array]:
    top_Mk, expert_Mk = jax.lax.top_k(logits_ME, top_k)
    if renormalize:
        return expert_Mk, jax.nn.softmax(top_Mk, axis=-1)
    total_M1 = jax.nn.logsumexp(logits_ME, axis=-1, keepdims=True)
    return expert_Mk, jnp.exp(top_Mk - total_M1)


def _route_fwd(logits_ME: Array, top_k: int, renormalize: bool):
    expert_Mk, weight_Mk = (checkpoint_name(x, ROUTING_NAME) for x in _route(logits_ME, top_k, renormalize))
    return (expert_Mk, weight_Mk), (logits_ME, expert_Mk, weight_Mk)


def _route_bwd(top_k: int, renormalize: bool, residuals: tuple[Array, Array, Array], dys: tuple[Array, Array]):
    """`w * (dw - sum(w * dw))` over the experts that the softmax is over: the chosen, or all, dw 0 for the others."""
    del top_k
    logits_ME, expert_Mk, weight_Mk = residuals
    grad_Mk = weight_Mk * dys[1]
    total_M1 = jnp.sum(grad_Mk, axis=1, keepdims=True)
    if renormalize:
        grad_Mk -= weight_Mk * total_M1
    experts = jnp.arange(logits_ME.shape[1], dtype=expert_Mk.dtype)
    # by comparison: a scatter adds with atomics
    dlogits_ME = jnp.sum(jnp.where(expert_Mk[..., None] == experts, grad_Mk[..., None], 0), axis=1)
    return (dlogits_ME if renormalize else dlogits_ME - jax.nn.softmax(logits_ME, axis=-1) * total_M1,)


_route.defvjp(_route_fwd, _route_bwd)


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
        source: (M * k,) int32, `token * k + i` of a row that is its token's copy i.
        row: (M, k) int32, row of each copy.
    """

    sizes: Int[Array, " E"]
    expert: Int[Array, " rows"]
    token: Int[Array, " rows"]
    source: Int[Array, " rows"]
    row: Int[Array, "M k"]


def dispatch(expert_Mk: Int[Array, "M k"], experts: int) -> Dispatch:
    """Sorts every copy by its expert; no copy is dropped. The sort is stable, so that equal inputs give equal sums."""
    flat = expert_Mk.reshape(-1)
    index = jnp.arange(flat.size, dtype=jnp.int32)
    expert, source = sort_by_expert(flat, experts)
    row = jnp.zeros_like(index).at[source].set(index, unique_indices=True).reshape(expert_Mk.shape)
    token, _ = _divmod(source, expert_Mk.shape[1])
    ends = jnp.searchsorted(expert, jnp.arange(experts, dtype=jnp.int32), side="right", method="compare_all")
    return Dispatch(jnp.diff(ends, prepend=0).astype(jnp.int32), expert, token, source, row)


def sort_by_expert(expert: Int[Array, " n"], experts: int) -> tuple[Int[Array, " n"], Int[Array, " n"]]:
    """The experts in order, and where each came from, equal ones in their own order."""
    if experts * expert.size >= 2**31:
        order = jnp.argsort(expert, stable=True).astype(jnp.int32)
        return expert[order], order
    # numbers that hold the place too: one array to sort, and no two are equal
    both = expert * expert.size + jnp.arange(expert.size, dtype=jnp.int32)
    return _divmod(jnp.sort(both), expert.size)


def _divmod(x: Int[Array, " n"], by: int) -> tuple[Int[Array, " n"], Int[Array, " n"]]:
    """Quotient and remainder of numbers that are not negative.

    Without the signs' cases, which compilers put into every reader, once for each element that it gathers.
    """
    unsigned, by_ = x.astype(jnp.uint32), jnp.full_like(x, by, jnp.uint32)
    return jax.lax.div(unsigned, by_).astype(x.dtype), jax.lax.rem(unsigned, by_).astype(x.dtype)


def _take(x: Array, index: Int[Array, "..."]) -> Array:
    """Rows of x, at places that are in it; nothing is added to each element's address for those that are not."""
    return x.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)


@jax.custom_vjp
def scatter(x_MD: Float[Array, "M D"], to: Dispatch) -> Float[Array, "rows D"]:
    """Copies every token to its rows. The gradient gathers a token's rows and sums them in f32, without atomics."""
    return _take(x_MD, to.token)


@jax.custom_vjp
def combine(y_rows: Float[Array, "rows D"], to: Dispatch) -> Float[Array, "M D"]:
    """Sums every token's rows in f32; the adjoint of `scatter`."""
    return jnp.sum(_take(y_rows, to.row), axis=1, dtype=jnp.float32).astype(y_rows.dtype)


@jax.custom_vjp
def weights_of_rows(weight_Mk: Float[Array, "M k"], to: Dispatch) -> Float[Array, " rows"]:
    """Each row's weight. The gradient, a permutation too, is gathered."""
    return _take(weight_Mk.reshape(-1), to.source)


def _no_gradient(to: Dispatch) -> Dispatch:
    return jax.tree.map(lambda index: np.zeros(index.shape, jax.dtypes.float0), to)


scatter.defvjp(lambda x, to: (scatter(x, to), to), lambda to, dy: (combine(dy, to), _no_gradient(to)))
combine.defvjp(lambda y, to: (combine(y, to), to), lambda to, dx: (scatter(dx, to), _no_gradient(to)))
weights_of_rows.defvjp(
    lambda weight, to: (weights_of_rows(weight, to), to), lambda to, dy: (_take(dy, to.row), _no_gradient(to))
)
