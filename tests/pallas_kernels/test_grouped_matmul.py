"""Grouped matrix product against a float64 loop over groups, over adversarial routings."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import bench
from pallas_kernels.grouped_matmul import cases, grouped_matmul

D, F = 9, 7
ROUTINGS = {
    "even": (24, [8, 8, 8]),
    "empty-first": (20, [0, 13, 7]),
    "empty-middle-and-last": (21, [4, 0, 17, 0]),
    "all-to-one": (37, [0, 0, 37, 0]),
    "one-row": (1, [0, 1, 0]),
    "one-group": (11, [11]),
    "ragged": (53, [1, 17, 3, 9, 23]),
    "trailing": (40, [5, 0, 19]),
    "trailing-in-last-block": (17, [8, 8]),
    "nothing-routed": (12, [0, 0]),
    "more-groups-than-rows": (3, [0, 1, 0, 0, 0, 1, 0, 0, 1, 0, 0, 0]),
    "blocks-of-512": (1100, [513, 0, 587]),
}


@functools.partial(jax.jit, static_argnums=4)
def out_and_grads(x, w, sizes, dy, function):
    y, pull_back = jax.vjp(lambda x, w: function(x, w, sizes), x, w)
    return y, *pull_back(dy)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_equals_the_loop_in_f64(routing, normal, grouped_oracle):
    rows, sizes = ROUTINGS[routing]
    x, w, dy = normal(0, (rows, D), (len(sizes), F, D), (rows, F))
    got = out_and_grads(x, w, jnp.asarray(sizes, jnp.int32), dy, grouped_matmul)
    for ours, exact in zip(got, grouped_oracle(x, w, sizes, dy), strict=True):
        # f32 sums of at most 587 products of unit size: some ulps of their root
        np.testing.assert_allclose(ours, exact, rtol=0, atol=2e-4 if rows > 1000 else 1e-5)
    used = sum(sizes)
    assert not np.asarray(got[0])[used:].any()
    assert not np.asarray(got[1])[used:].any()


@pytest.mark.parametrize("routing", ["ragged", "trailing"])
def test_weights_that_are_not_transposed(routing, normal, grouped_oracle):
    rows, sizes = ROUTINGS[routing]
    x, w, dy = normal(5, (rows, D), (len(sizes), D, F), (rows, F))
    plain = functools.partial(grouped_matmul, transposed=False)
    y, dx, dw = out_and_grads(x, w, jnp.asarray(sizes, jnp.int32), dy, plain)
    exact = grouped_oracle(x, w.swapaxes(1, 2), sizes, dy)
    for ours, truth in zip((y, dx, dw.swapaxes(1, 2)), exact, strict=True):
        np.testing.assert_allclose(ours, truth, rtol=0, atol=1e-5)  # some ulps of sums of at most 23 products
    with pytest.raises(ValueError, match=r"w \(E, D, F\); got"):
        grouped_matmul(x, w.swapaxes(1, 2), jnp.asarray(sizes, jnp.int32), transposed=False)


def test_what_no_group_owns_never_matters(normal):
    """Not even where it is not finite."""
    x, w, dy = normal(1, (12, D), (2, F, D), (12, F))
    sizes = jnp.asarray([3, 4], jnp.int32)
    poisoned = (array.at[7:].set(jnp.nan) for array in (x, dy))
    clean = out_and_grads(x.at[7:].set(0), w, sizes, dy.at[7:].set(0), grouped_matmul)
    x_nan, dy_nan = poisoned
    for ours, exact in zip(out_and_grads(x_nan, w, sizes, dy_nan, grouped_matmul), clean, strict=True):
        np.testing.assert_array_equal(ours, exact)


def test_bf16_is_no_worse_than_dense(normal, no_worse_than_dense, grouped_oracle):
    rows, sizes = ROUTINGS["ragged"]
    x, w, dy = normal(2, (rows, D), (len(sizes), F, D), (rows, F), dtype=jnp.bfloat16)
    sizes = jnp.asarray(sizes, jnp.int32)
    ours = out_and_grads(x, w, sizes, dy, grouped_matmul)
    assert [array.dtype for array in ours] == [jnp.bfloat16] * 3
    dense = out_and_grads(x, w, sizes, dy, cases.PEERS["naive"].call)
    no_worse_than_dense(ours, dense, grouped_oracle(x, w, np.asarray(sizes), dy))


def test_f32_weights_get_f32_gradients_from_bf16_rows(normal, grouped_oracle):
    x, dy = normal(3, (20, D), (20, F), dtype=jnp.bfloat16)
    (w,) = normal(4, (3, F, D))
    y, dx, dw = out_and_grads(x, w, jnp.asarray([5, 0, 15], jnp.int32), dy, grouped_matmul)
    assert (y.dtype, dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    exact = grouped_oracle(x, w.astype(jnp.bfloat16), [5, 0, 15], dy)
    np.testing.assert_allclose(dw, exact[2], atol=1e-5)  # summed in f32 from the bf16 values


def test_ragged_dot_agrees():
    args, _, _ = bench.build(cases.TINY[0])
    peer = cases.PEERS["ragged_dot"]
    ours, theirs = grouped_matmul(*args), peer.call(*peer.prepare(*args))
    # both sum in f32 and round once: at most the last of 8 bits differs
    np.testing.assert_allclose(np.asarray(ours, np.float32), np.asarray(theirs, np.float32), rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize(
    ("x", "w", "sizes", "message"),
    [
        ((4, 3), (2, 5, 4), (2,), r"x must be \(M, D\) and w \(E, F, D\); got \(4, 3\) and \(2, 5, 4\)"),
        ((4, 3), (5, 3), (5,), r"w \(E, F, D\); got \(4, 3\) and \(5, 3\)"),
        ((4, 3), (2, 5, 3), (3,), r"group_sizes must be integers of shape \(2,\); got int32\(3,\)"),
    ],
)
def test_bad_shapes_are_named(x, w, sizes, message):
    with pytest.raises(ValueError, match=message):
        grouped_matmul(jnp.zeros(x), jnp.zeros(w), jnp.zeros(sizes, jnp.int32))


def test_bad_dtypes_are_named():
    with pytest.raises(ValueError, match=r"group_sizes must be integers.*got float32\(2,\)"):
        grouped_matmul(jnp.zeros((4, 3)), jnp.zeros((2, 5, 3)), jnp.zeros(2))
    with pytest.raises(ValueError, match="x and w must be floating-point; got int32 and float32"):
        grouped_matmul(jnp.zeros((4, 3), jnp.int32), jnp.zeros((2, 5, 3)), jnp.zeros(2, jnp.int32))
