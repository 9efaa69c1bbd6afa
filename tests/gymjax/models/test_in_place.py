"""What `scan_in_place` computes and keeps, beside `lax.scan` of the same layers."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from gymjax.models.in_place import refuse_gradients, scan_in_place

LAYERS, TOKENS, WIDTH = 3, 4, 8
NAMED = jax.checkpoint_policies.save_only_these_names("product", "inner")


@jax.jit
def jitted(x, w):
    """A named value that is made, and read, in a function of its own; and one that is only handed through."""
    product = checkpoint_name(x @ w, "product")
    return jnp.sin(product) + x, product, x


@partial(jax.checkpoint, policy=NAMED, prevent_cse=False)
def rematerialised(x, w):
    """The same, two levels down."""
    total, product, same = jitted(x, w)
    return checkpoint_name(jnp.cos(total) @ w, "inner") * product + same


def layer(angles, x, trained, rest):
    """Every kind of thing a layer has: constants, a random key, integers, packed and trained weights."""
    w, key = rest
    dropped = jnp.where(jax.random.bernoulli(key, 0.8, x.shape), x, 0.0)
    hidden = rematerialised(dropped * angles, w)
    middle = jax.lax.optimization_barrier(checkpoint_name(jnp.tanh(hidden) + x * trained["a"], "inner"))
    out = {"sum": jnp.sum(middle), "largest": jnp.argmax(middle)}
    return x + middle * jnp.sin(hidden) @ trained["b"], out


def scanned(body, x, trained, rest, policy):
    """The same by `lax.scan`."""
    body = jax.checkpoint(body, policy=policy, prevent_cse=False)
    return jax.lax.scan(lambda x, each: body(x, *each), x, (trained, rest))


def loss(run, policy, angles, x, trained, rest):
    """A number that depends on the last layer and on every `out`."""
    x, out = run(partial(layer, angles), x, trained, rest, policy)
    return jnp.sum(x**2) + jnp.sum(out["sum"] ** 2), out["largest"]


def arguments():
    """angles, x, trained, rest."""
    rng = np.random.default_rng(0)
    x, w, b = (rng.normal(size=size) for size in ((TOKENS, WIDTH), (LAYERS, WIDTH, WIDTH), (LAYERS, WIDTH, WIDTH)))
    trained = {"a": jnp.asarray(rng.normal(size=(LAYERS, WIDTH)), jnp.float32), "b": jnp.asarray(b / 9, jnp.float32)}
    rest = jnp.asarray(w / 9, jnp.float32), jax.random.split(jax.random.key(1), LAYERS)
    return jnp.linspace(0.5, 1.5, WIDTH), jnp.asarray(x, jnp.float32), trained, rest


@pytest.mark.parametrize(
    "policy",
    [NAMED, jax.checkpoint_policies.nothing_saveable, jax.checkpoint_policies.everything_saveable],
    ids=["named", "none", "all"],
)
def test_it_computes_what_a_scan_does(policy) -> None:
    ours, plain = (
        jax.jit(jax.value_and_grad(partial(loss, run, policy), (1, 2), has_aux=True))(*arguments())
        for run in (scan_in_place, scanned)
    )
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), ours, plain)
    jax.tree.map(np.testing.assert_array_equal, loss(scan_in_place, policy, *arguments())[1], plain[0][1])


def test_what_is_kept_is_written_once_and_read_where_it_is() -> None:
    """Of a layer "product", two of "inner" and its input; no stack is filled before."""
    program = jax.make_jaxpr(jax.grad(lambda *all: loss(scan_in_place, NAMED, *all)[0], (1, 2)))(*arguments())
    forward, backward = (eqn for eqn in program.eqns if eqn.primitive.name in ("scan", "while"))
    kept = [var.aval.shape for var in forward.outvars if var.aval.shape[1:] == (TOKENS, WIDTH)]
    assert kept == [(LAYERS + 1, TOKENS, WIDTH), *[(LAYERS, TOKENS, WIDTH)] * 3]
    body = forward.params.get("jaxpr", forward.params.get("body_jaxpr"))
    text = str(body)
    assert "remat2" not in text  # what is made within is stored from within
    assert "optimization_barrier" not in text
    assert not any(
        eqn.primitive.name == "broadcast_in_dim" and eqn.outvars[0].aval.shape in kept for eqn in program.eqns
    )
    assert str(backward).count("dynamic_update_slice") == 2  # gradients of a and b


@pytest.mark.parametrize("outside", [jax.jit, jax.checkpoint])
def test_a_gradient_that_there_is_not_is_refused(outside) -> None:
    """By name, also through functions around; the other parts' gradients are untouched."""

    def total(x, w):
        refuse_gradients({"w": w, "count": jnp.arange(3), "key": jax.random.key(0)}, "only x has one")
        return jnp.sum(x * w)

    x, w = jnp.ones(3), jnp.arange(3.0)
    np.testing.assert_array_equal(jax.grad(outside(total))(x, w), w)
    with pytest.raises(TypeError, match=r"no gradient by \['w'\]: only x has one"):
        jax.grad(outside(total), 1)(x, w)
