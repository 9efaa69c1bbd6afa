"""Gated feed-forward blocks of all experts over one sorted input, dense or packed, with or without adapters."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from pallas_kernels import Implementation
from pallas_kernels.grouped_matmul.api import choose, kernels, product
from pallas_kernels.grouped_matmul.layers import (
    RANKS,
    GroupedLayer,
    check,
    gradients_above,
    gradients_below,
    joined,
    low_gradient,
    low_product,
    no_gradient,
    over_and_down,
    with_adapter,
)


def grouped_mlp(
    x: Float[Array, "M I"],
    gate: GroupedLayer,
    up: GroupedLayer,
    down: GroupedLayer,
    weight: Float[Array, " M"],
    group_sizes: Int[Array, " E"],
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "M O"]:
    """Apply a SwiGLU block of each group: `down(weight * silu(gate(x)) * up(x))`, rows sorted by group.

    As `grouped_layers`, with the gating computed in f32 where the products of gate and up leave the tensor cores, and
    its gradient where that of its result does. The backward pass keeps x, weight, gate and up, which bear the names
    "gate" and "up", the adapters' low products (LOW_NAME) and the weights as they are stored, and makes
    `weight * silu(gate) * up` again. Source: arXiv 2002.05202, eq. 6; what is kept: 2512.14080.

    Args:
        x: f32, bf16 or f16, sorted by group.
        gate, up: (E, F, I).
        down: (E, O, F).
        weight: of each row, f32.
        group_sizes: rows of each group, see `grouped_matmul`.
        implementation: as in `grouped_matmul`.

    Returns:
        The results in x.dtype; zeros in rows of no group, whose gradients must be finite. Gradients have their
        arguments' dtypes.

    Raises:
        ValueError: shapes do not fit together.
        NotImplementedError: the named implementation refuses these arguments; the message says why.
    """
    width = _out_width(gate)
    for layer in (gate, up):
        check(x, layer, group_sizes)
    check(jax.ShapeDtypeStruct((len(x), width), x.dtype), down, group_sizes)
    if _out_width(up) != width or weight.shape != x.shape[:1]:
        raise ValueError(
            f"grouped_mlp: gate and up must be as wide as each other and weight ({len(x)},); "
            f"got {width}, {_out_width(up)} and {weight.shape}"
        )
    name = choose(x, gate.w, implementation)
    multiple = RANKS if name == "mosaic_gpu" else 1
    a, (b_gate, b_up) = joined((gate, up), multiple)
    a_down, (b_down,) = joined((down,), multiple)
    params = _Params((gate.w, up.w, down.w), a, b_gate, b_up, a_down, b_down)
    ranks = tuple(0 if layer.a is None else layer.a.shape[1] for layer in (gate, up, down))
    return _mlp(name, ranks, x, weight.astype(jnp.float32), params, group_sizes)


class _Params(NamedTuple):
    ws: tuple
    a: Array | None  # of gate and up
    b_gate: Array | None
    b_up: Array | None
    a_down: Array | None
    b_down: Array | None


def _out_width(layer: GroupedLayer) -> int:
    return layer.w.shape[-2]


_Ranks = tuple[int, ...]  # of gate, up and down, whose factors are filled up with zeros


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _mlp(name: Implementation, ranks: _Ranks, x: Array, weight: Array, params: _Params, sizes: Array) -> Array:
    return _mlp_fwd(name, ranks, x, weight, params, sizes)[0]


def _mlp_fwd(name: Implementation, ranks: _Ranks, x: Array, weight: Array, params: _Params, sizes: Array):
    del ranks
    (w_gate, w_up, w_down), a, b_gate, b_up, a_down, b_down = params
    low = low_product(name, x, a, sizes)
    if low is None:
        xs, gates, ups = [x], with_adapter(x, w_gate, None, None)[1], with_adapter(x, w_up, None, None)[1]
    else:  # both with all low products: where one has no adapter its part is zeros
        b_gate_, b_up_ = (_or_zeros(b, w, low) for b, w in ((b_gate, w_gate), (b_up, w_up)))
        xs, gates = with_adapter(x, w_gate, low, b_gate_)
        _, ups = with_adapter(x, w_up, low, b_up_)
    gate, up, hidden = kernels(name).gated(xs, gates, ups, weight, sizes)
    gate, up = checkpoint_name(gate, "gate"), checkpoint_name(up, "up")
    low_down = low_product(name, hidden, a_down, sizes)
    y = product(name, *with_adapter(hidden, w_down, low_down, b_down), sizes, transposed=True)
    return y, (x, weight, params, sizes, gate, up, low, low_down)


def _or_zeros(b: Array | None, w, low: Array) -> Array:
    shape = (w.codes if hasattr(w, "codes") else w).shape[0], w.shape[-2], low.shape[1]
    return jnp.zeros(shape, low.dtype) if b is None else b


def _mlp_bwd(name: Implementation, ranks: _Ranks, residuals, dy: Array):
    x, weight, params, sizes, gate, up, low, low_down = residuals
    (w_gate, w_up, w_down), a, b_gate, b_up, a_down, b_down = params
    dlow_down, (db_down,) = _through_ups(name, (dy,), (b_down,), low_down, ranks[2:], sizes)
    over, down = over_and_down(x.dtype, (dy,), (w_down,), a_down, dlow_down)
    dgate, dup, hidden, dweight = kernels(name).gated_backward(over, down, gate, up, weight, sizes)
    (dw_down,), da_down = gradients_below(name, hidden, (w_down,), a_down, (dy,), dlow_down, sizes)
    dys, ws = (dgate, dup), (w_gate, w_up)
    dlow, (db_gate, db_up) = _through_ups(name, dys, (b_gate, b_up), low, ranks[:2], sizes)
    dx = product(name, *over_and_down(x.dtype, dys, ws, a, dlow), sizes, transposed=False)
    dws, da = gradients_below(name, x, ws, a, dys, dlow, sizes)
    return dx, dweight, _Params((*dws, dw_down), da, db_gate, db_up, da_down, db_down), no_gradient(sizes)


def _through_ups(name: Implementation, dys, bs, low: Array | None, ranks: _Ranks, sizes: Array):
    """Gradients of the low products and of the up-projections: of each dy both in one pass, where there is a kernel."""
    narrow = kernels(name).narrow
    if (
        low is None
        or narrow is None
        or not all(narrow.fits(dy, rank) for dy, rank in zip(dys, ranks, strict=True) if rank)
    ):
        return low_gradient(name, dys, bs, sizes), gradients_above(name, bs, low, dys, sizes)
    dlows, dbs, before = [], [], 0
    for dy, b, rank in zip(dys, bs, ranks, strict=True):
        if b is None:
            dbs.append(None)
            continue
        mine = slice(before, before + rank)
        dlow, db = narrow(dy, b[..., mine], low[:, mine], sizes)
        dlows.append(dlow)
        dbs.append(jnp.pad(db.astype(b.dtype), ((0, 0), (0, 0), (before, low.shape[1] - before - rank))))
        before += rank
    dlow = jnp.concatenate(dlows, axis=1).astype(low.dtype)
    return jnp.pad(dlow, ((0, 0), (0, low.shape[1] - before))), tuple(dbs)


_mlp.defvjp(_mlp_fwd, _mlp_bwd)
