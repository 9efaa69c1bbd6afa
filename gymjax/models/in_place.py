"""A scan over layers in which what they keep for the backward pass is written once, where it stays."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero
from jax.extend import core
from jaxtyping import Array

from gymjax.models.stacks import empty, read, write

Body = Callable[[Array, Any, Any], tuple[Array, Any]]


def scan_in_place(body: Body, x: Array, trained: Any, rest: Any, policy: Callable[..., Any]) -> tuple[Array, Any]:
    """`lax.scan` of `x, out = body(x, trained[i], rest[i])`, differentiable by x and `trained`.

    What `jax.grad` of a scan keeps is copied into stacks, which were filled with zeros: XLA cannot let a product or a
    kernel write into a stack what others read as well. Here the others read it out of the stack, so that a value has
    one writer and one place, and the stacks begin as memory that nobody has written.

    Args:
        body: one layer; reads what it closes over as constants.
        x: the first layer's input, an array of floating-point numbers.
        trained: pytree of arrays stacked over layers, floating-point.
        rest: pytree of arrays stacked over layers, without gradients.
        policy: of `jax.checkpoint`, what is kept beside the layers' inputs.

    Returns:
        (the last layer's output, every layer's `out` stacked).
    """
    layers = len(jax.tree.leaves((trained, rest))[0])
    kept_body = jax.checkpoint(body, prevent_cse=False, policy=policy)

    @jax.custom_vjp
    def run(x, trained, rest):
        return jax.lax.scan(lambda x, layer: body(x, *layer), x, (trained, rest))

    def forward(x, trained, rest):
        layer = _Layer(kept_body, x, *read((trained, rest), 0))
        inputs = write(empty(layers + 1, x), x, 0)  # and the last layer's output
        stacks = [empty(layers, var.aval) for var in layer.stored]
        outs = jax.tree.map(functools.partial(empty, layers), layer.out)

        def step(index, carry):
            inputs, stacks, outs = carry
            parts = read((inputs, trained, rest), index)
            x, out, stacks = layer.forward(*parts, index=index, stacks=stacks)
            outs = jax.tree.map(lambda stack, value: write(stack, value, index), outs, out)
            return write(inputs, x, index + 1), stacks, outs

        inputs, stacks, outs = jax.lax.fori_loop(0, layers, step, (inputs, stacks, outs))
        return (inputs[-1], outs), (layer, inputs, stacks, trained, rest)

    def backward(kept, cotangents):
        layer, inputs, stacks, trained, rest = kept
        dx, douts = cotangents

        def step(n, carry):
            dx, dtrained = carry
            index = layers - 1 - n
            pull_back = layer.pull_back(*read((inputs, trained, rest, stacks), index))
            dx, parts = pull_back((dx, read(douts, index)))
            return dx, jax.tree.map(lambda stack, part: write(stack, part, index), dtrained, parts)

        dtrained = jax.tree.map(lambda leaf: empty(layers, leaf[0]), trained)
        dx, dtrained = jax.lax.fori_loop(0, layers, step, (dx, dtrained))
        return dx, dtrained, None

    run.defvjp(forward, backward)
    return run(x, trained, rest)


def refuse_gradients(tree: Any, why: str) -> None:
    """Makes it a TypeError, which names the part and says `why`, to differentiate by a part of a pytree.

    What a custom gradient does not give is zero otherwise, without a word. The pytree's arrays themselves are what
    programs go on with, so that whoever looks for them finds them.
    """
    _guarded(why, tree)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _guarded(why: str, tree: Any) -> Any:
    del why
    return tree


def _refuse_tangents(why: str, primals: tuple, tangents: tuple) -> Any:
    found = jax.tree_util.tree_leaves_with_path(tangents[0])
    names = [jax.tree_util.keystr(path) for path, leaf in found if not isinstance(leaf, SymbolicZero)]
    if names:
        raise TypeError(f"no gradient by {', '.join(names)}: {why}")
    return primals[0], tangents[0]


_guarded.defjvp(_refuse_tangents, symbolic_zeros=True)


@jax.tree_util.register_pytree_node_class
class _Layer:
    """A layer as a program whose results are its output, `out`, and what its backward pass needs.

    Attributes:
        consts: arrays that the layer closes over.
        out: shapes of `out`.
        stored: variables of what is to be stored, each once: neither arguments nor constants.
    """

    def __init__(self, body: Body, x: Array, trained: Any, rest: Any) -> None:
        def forward(x, trained, rest):
            (x, out), pull_back = jax.vjp(lambda x, trained: body(x, trained, rest), x, trained)
            needed, self._pull_back = jax.tree.flatten(pull_back)
            return (x, out), needed

        closed, (results, needed) = jax.make_jaxpr(forward, return_shape=True)(x, trained, rest)
        self.consts, self._program = closed.consts, closed.jaxpr
        self._results, self.out = jax.tree.structure(results), results[1]
        split = len(closed.jaxpr.outvars) - len(needed)
        self._returned, self._needed = closed.jaxpr.outvars[:split], closed.jaxpr.outvars[split:]
        known = {*closed.jaxpr.constvars, *closed.jaxpr.invars}
        made = [var for var in self._needed if not isinstance(var, core.Literal) and var not in known]
        self.stored = list(dict.fromkeys(made))

    def tree_flatten(self):
        """As a pytree: its constants are arrays of the program that it is part of."""
        return (self.consts,), self

    @classmethod
    def tree_unflatten(cls, layer, children):
        """The same layer with other constants."""
        new = object.__new__(cls)
        vars(new).update(vars(layer), consts=children[0])
        return new

    def forward(self, x: Array, trained: Any, rest: Any, index: Array, stacks: list[Array]):
        """(output, `out`, stacks with this layer's values), where all others read what is stored out of its stack."""
        known, stacks = self._known(x, trained, rest), list(stacks)
        _run(self._program, known, {var: place for place, var in enumerate(self.stored)}, index, stacks)
        return *self._results.unflatten(_values(self._returned, known)), stacks

    def pull_back(self, x: Array, trained: Any, rest: Any, stored: list[Array]) -> Callable:
        """The layer's vector-Jacobian product."""
        known = self._known(x, trained, rest) | dict(zip(self.stored, stored, strict=True))
        return self._pull_back.unflatten(_values(self._needed, known))

    def _known(self, *arguments: Any) -> dict[Any, Any]:
        program = self._program
        leaves = [*self.consts, *jax.tree.leaves(arguments)]
        return dict(zip([*program.constvars, *program.invars], leaves, strict=True))


def _run(program: core.Jaxpr, known: dict[Any, Any], places: dict[Any, int], index: Array, stacks: list[Array]) -> None:
    """Runs a program; adds its variables' values to `known` and what has a place to `stacks`."""
    for eqn in program.eqns:
        if eqn.primitive.name == "optimization_barrier":  # for scans of jax.grad, see _hopper.run_once
            results = _values(eqn.invars, known)
        elif inner := _program_in(eqn, places):
            of_inner = dict(
                zip([*inner.jaxpr.constvars, *inner.jaxpr.invars], [*inner.consts, *_values(eqn.invars, known)])
            )
            made = [var for each in inner.jaxpr.eqns for var in each.outvars]
            pairs = dict(zip(map(id, inner.jaxpr.outvars), eqn.outvars, strict=True))  # literals have no hash
            inner_places = {var: places.pop(pairs[id(var)]) for var in made if pairs.get(id(var)) in places}
            _run(inner.jaxpr, of_inner, inner_places, index, stacks)
            results = _values(inner.jaxpr.outvars, of_inner)
        else:
            variables = [var for var in eqn.invars if not isinstance(var, core.Literal)]
            debug_info = program.debug_info.with_unknown_names()
            alone = core.Jaxpr((), variables, eqn.outvars, [eqn], debug_info=debug_info)
            results = core.jaxpr_as_fun(core.ClosedJaxpr(alone, ()))(*_values(variables, known))
        for var, result in zip(eqn.outvars, results, strict=True):
            known[var] = result
            if var in places:
                stacks[places[var]] = write(stacks[places[var]], result, index)
                known[var] = read(stacks[places[var]], index)


def _program_in(eqn: core.JaxprEqn, places: dict[Any, int]) -> core.ClosedJaxpr | None:
    """The program of a jitted or rematerialised function that makes something with a place."""
    if eqn.primitive.name not in ("jit", "remat2") or not places.keys() & {*eqn.outvars}:
        return None
    inner = eqn.params["jaxpr"]
    return inner if isinstance(inner, core.ClosedJaxpr) else core.ClosedJaxpr(inner, ())


def _values(variables: list[Any], known: dict[Any, Any]) -> list[Any]:
    return [var.val if isinstance(var, core.Literal) else known[var] for var in variables]
