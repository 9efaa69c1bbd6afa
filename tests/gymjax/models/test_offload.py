"""The scan whose layers' inputs wait in the host's memory, against a plain scan."""

import jax
import jax.numpy as jnp
import numpy as np

from gymjax.models.offload import scan_offloaded


def layer(x, trained, rest):
    w, counts = rest
    return jnp.tanh(x @ trained["a"] + w), {"sum": jnp.sum(x) * counts}


def test_values_and_gradients_are_those_of_a_scan() -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (4, 8))
    trained = {"a": 0.3 * jax.random.normal(keys[1], (3, 8, 8))}
    rest = (jax.random.normal(keys[2], (3, 8)), jnp.arange(3))

    def loss(run):
        def of(x, trained):
            y, outs = run(x, trained)
            return jnp.sum(y**2) + jnp.sum(outs["sum"] ** 2), outs

        return jax.jit(jax.value_and_grad(of, (0, 1), has_aux=True))(x, trained)

    got = loss(lambda x, trained: scan_offloaded(layer, x, trained, rest))
    want = loss(lambda x, trained: jax.lax.scan(lambda x, each: layer(x, *each), x, (trained, rest)))
    for ours, plain in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-6)  # the same sums, perhaps fused otherwise


def test_inputs_wait_in_the_hosts_memory() -> None:
    x, trained, rest = jnp.ones((4, 8)), {"a": jnp.ones((3, 8, 8))}, (jnp.ones((3, 8)), jnp.arange(3))
    jaxpr = jax.make_jaxpr(jax.grad(lambda x: scan_offloaded(layer, x, trained, rest)[0].sum()))(x)
    assert "f32<host>[4,4,8]" in str(jaxpr)  # and one that stays empty
    assert str(jaxpr).count("MemorySpace.Device") == 2  # before the loop, and for the layer ahead in it
