"""How vmap and several devices share a kernel's work: rows of the batch, and key heads with their queries.

A kernel is one opaque call with a grid of its own: without this, XLA would gather all operands on every device.
"""

import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array


def split_work(function: Callable, spec: str, *operands: Array) -> Any:
    """`function(*operands)`, split over devices by rows and by key heads, and batched by vmap as more rows.

    Args:
        function: a kernel; it must accept fewer rows or fewer heads of all its operands alike.
        spec: the axes of operands and results, "BTNH,BSKH,BT->BTNH": B rows of the batch (1: shared by all), N query
            heads, K key heads; other axes stay whole.
        operands: arrays.

    Returns:
        The results, one or a tuple as the spec has them.
    """
    ins, outs = (tuple(part.split(",")) for part in spec.split("->"))
    batched = custom_vmap(function if jax.device_count() == 1 else _partitioned(function, ins, outs, operands))

    @batched.def_vmap
    def _more_rows(size: int, mapped: list[bool], *operands):
        if any(is_mapped and "B" not in axes for is_mapped, axes in zip(mapped, ins)):  # sinks of their own
            whole = [
                x if is_mapped else jnp.broadcast_to(x, (size, *x.shape)) for x, is_mapped in zip(operands, mapped)
            ]
            results = jax.lax.map(lambda one: split_work(function, spec, *one), whole)
        else:
            rows = next(x.shape[is_mapped] for x, is_mapped, axes in zip(operands, mapped, ins) if axes == ins[0])
            folded = [_fold(x, size, m, axes, rows) for x, m, axes in zip(operands, mapped, ins)]
            results = split_work(function, spec, *folded)
            results = jax.tree.map(lambda x: x.reshape(size, rows, *x.shape[1:]), results)
        return results, jax.tree.map(lambda _: True, results)

    return batched(*operands)


def _partitioned(function: Callable, ins, outs, operands) -> Callable:
    """The function as a call that XLA may split over devices."""
    sizes = {letter: size for axes, x in zip(ins, operands, strict=True) for letter, size in zip(axes, x.shape)}
    rule, whole = _rule(ins, outs, [x.shape for x in operands])
    partitioned = custom_partitioning(lambda *args: function(*args))
    partitioned.def_partition(
        lambda mesh, args, results: _partition(function, mesh, args, results, ins, outs, sizes["K"]),
        sharding_rule=rule,
        need_replication_factors=whole,
        g=sizes["N"] // sizes["K"],
    )
    return partitioned


def _fold(x: Array, size: int, mapped: bool, axes: str, rows: int) -> Array:
    """One operand of `size` calls with `rows` rows each as an operand of one call."""
    if "B" not in axes or (not mapped and x.shape[0] == 1):
        return x
    if not mapped:
        x = jnp.broadcast_to(x, (size, *x.shape))
    x = jnp.broadcast_to(x, (size, rows, *x.shape[2:]))
    return x.reshape(size * rows, *x.shape[2:])


def _rule(ins, outs, shapes) -> tuple[str, tuple[str, ...]]:
    """Shardy's rule, in which B may be split, and K with the major part of N; and the axes that stay whole."""

    def factors(axes: str, shape=None) -> str:
        shared = shape is not None and axes[0] == "B" and shape[0] == 1
        named = ["(k g)" if letter == "N" else letter.lower() for letter in axes]
        return " ".join(["one", *named[1:]] if shared else named)

    operands = [factors(axes, shape) for axes, shape in zip(ins, shapes)]
    rule = ", ".join(operands) + " -> " + ", ".join(factors(axes) for axes in outs)
    in_order = dict.fromkeys(re.findall(r"\w+", rule))
    return rule, tuple(factor for factor in in_order if factor not in ("b", "k"))


def _partition(function: Callable, mesh: Mesh, args, results, ins, outs, kv_heads: int):
    """Shardings of one device's call: rows as the first operand's, heads as long as they divide the key heads."""
    first = args[0].sharding.spec
    first = (*first, *[None] * (len(args[0].shape) - len(first)))
    rows, heads = first[ins[0].index("B")], first[ins[0].index("N")]
    names = heads if isinstance(heads, tuple) else (heads,) if heads else ()
    if names and kv_heads % math.prod(mesh.shape[name] for name in names):
        heads = None
    of = {"N": heads, "K": heads}

    def sharding(axes: str, shape) -> NamedSharding:
        axis = {**of, "B": rows if shape[0] != 1 else None}
        return NamedSharding(mesh, P(*(axis.get(letter) for letter in axes)))

    arg_shardings = tuple(sharding(axes, x.shape) for axes, x in zip(ins, args))
    shapes = results if isinstance(results, tuple | list) else (results,)
    out = tuple(sharding(axes, x.shape) for axes, x in zip(outs, shapes))
    return mesh, function, out if len(outs) > 1 else out[0], arg_shardings
