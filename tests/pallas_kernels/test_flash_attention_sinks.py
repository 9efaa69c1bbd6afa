"""Attention with sinks against a float64 oracle, query by query."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.flash_attention import explain, flash_attention

B, T, N, K, H = 2, 13, 4, 2, 8
IDS = np.array([[1] * 5 + [2] * 6 + [0] * 2, [1] * 13], np.int32)
SINKS = np.array([-2.0, 0.0, 1.5, 6.0], np.float32)


def oracle(q, k, v, sinks, dout, window, ids):
    """Output and gradients of q, k, v and the sinks, one head and one query at a time."""
    q, k, v, sinks, dout = (np.asarray(array, np.float64) for array in (q, k, v, sinks, dout))
    out, dq, dk, dv, dsinks = np.zeros_like(q), np.zeros_like(q), np.zeros_like(k), np.zeros_like(v), np.zeros(N)
    for b, i, n in np.ndindex(B, T, N):
        head = n // (N // K)
        seen = [j for j in range(i + 1) if i - j < (window or T) and (ids is None or ids[b, j] == ids[b, i] != 0)]
        if not seen:
            continue
        scores = np.append(k[b, seen, head] @ q[b, i, n] / np.sqrt(H), sinks[n])
        probs = np.exp(scores - scores.max())
        probs /= probs.sum()
        out[b, i, n] = probs[:-1] @ v[b, seen, head]
        dprobs = np.append(v[b, seen, head] @ dout[b, i, n], 0.0)
        dscores = probs * (dprobs - probs @ dprobs)
        dsinks[n] += dscores[-1]
        dq[b, i, n] = dscores[:-1] @ k[b, seen, head] / np.sqrt(H)
        dk[b, seen, head] += np.outer(dscores[:-1], q[b, i, n]) / np.sqrt(H)
        dv[b, seen, head] += np.outer(probs[:-1], dout[b, i, n])
    return out, (dq, dk, dv, dsinks)


@pytest.mark.parametrize(("window", "ids"), [(None, None), (4, None), (None, IDS), (3, IDS)])
def test_equals_the_oracle(window, ids, normal, out_and_grads):
    q, k, v, dout = normal(0, (B, T, N, H), (B, T, K, H), (B, T, K, H), (B, T, N, H))

    def attend(q, k, v, sinks):
        segment_ids = None if ids is None else jnp.asarray(ids)
        return flash_attention(q, k, v, window=window, segment_ids=segment_ids, sinks=sinks)

    out, grads = out_and_grads(attend, (q, k, v, jnp.asarray(SINKS)), dout)
    exact, exact_grads = oracle(q, k, v, SINKS, dout, window, ids)
    np.testing.assert_allclose(out, exact, atol=1e-6)  # f32 sums of at most 13 terms
    for ours, theirs in zip(grads, exact_grads, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)  # likewise, over all queries of a head


def test_a_low_sink_takes_nothing_and_a_high_one_all(normal):
    q, k, v = normal(1, (1, 5, 2, H), (1, 5, 2, H), (1, 5, 2, H))
    np.testing.assert_allclose(
        flash_attention(q, k, v, sinks=jnp.full(2, -80.0)), flash_attention(q, k, v), rtol=1e-6, atol=1e-6
    )  # exp(-80) is 0 beside scores of size 1
    assert float(jnp.abs(flash_attention(q, k, v, sinks=jnp.full(2, 80.0))).max()) < 1e-30


def test_cudnn_refuses_and_shapes_are_named():
    q = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)
    said = explain(q, q, sinks=True)
    assert said.startswith("flash_attention: xla (cudnn refuses: it has no sinks")
    x = jnp.zeros((1, 4, 2, 8))
    with pytest.raises(ValueError, match=r"sinks must be floating-point of shape \(2,\); got float32\(4,\)"):
        flash_attention(x, x, x, sinks=jnp.zeros(4))
    with pytest.raises(ValueError, match=r"got int32\(2,\)"):
        flash_attention(x, x, x, sinks=jnp.zeros(2, jnp.int32))
