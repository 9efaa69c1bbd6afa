"""Run by test_flash_attention_splitting.py with four simulated devices: how a split kernel call is shared out.

A plain attention stands for the kernel, which no simulated device runs; it notes the shapes it is called with.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.flash_attention.mosaic_gpu_splitting import split_work

SPEC = "BTNH,BSKH,BSKH,BT,BT,N->BTNH,BNT"
calls = []


def kernel(q, k, v, lo, hi, sinks):
    calls.append((q.shape, k.shape))
    group = q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, group, 2), jnp.repeat(v, group, 2)
    scores, key = jnp.einsum("BTNH,BSNH->BNTS", q, k), jnp.arange(k.shape[1])
    seen = (key >= lo[:, None, :, None]) & (key <= hi[:, None, :, None])
    scores = jnp.where(seen, scores, -jnp.inf)
    column = jnp.broadcast_to(sinks[None, :, None, None], (*scores.shape[:3], 1))
    scores = jnp.concatenate([scores, column], -1)
    out = jnp.einsum("BNTS,BSNH->BTNH", jax.nn.softmax(scores, -1)[..., :-1], v)
    return out, jax.nn.logsumexp(scores, -1)


def split(*args):
    return split_work(kernel, SPEC, *args)


def difference(got, want) -> float:
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in zip(got, want, strict=True))


def main() -> None:
    rng = np.random.default_rng(0)
    q, *kv = (rng.normal(size=(4, 6, heads, 5)).astype(np.float32) for heads in (8, 4, 4))
    lo, hi = np.zeros((1, 6), np.int32), np.arange(6, dtype=np.int32)[None]
    sinks = rng.normal(size=8).astype(np.float32)
    args = (q, *kv, lo, hi, sinks)
    want = kernel(*args)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "heads"))
    found = {}

    for axes in (("data",), (("data", "heads"),), ("data", None, "heads"), (None, None, ("data", "heads"))):
        calls.clear()
        placed = [jax.device_put(x, NamedSharding(mesh, P(*axes))) for x in (q, *kv)]
        program = jax.jit(lambda *args: split(*args)).lower(*placed, lo, hi, sinks).compile()
        got = program(*map(jax.device_put, (*placed, lo, hi, sinks), program.input_shardings[0]))
        found[str(axes)] = {
            "difference": difference(got, want),
            "one_device": calls[-1],
            "gathers": program.as_text().count("all-gather"),
        }
    inside = (P("data", None, "heads"),) * 3 + (P(), P(), P("heads"))
    outside = (P("data", None, "heads"), P("data", "heads"))
    mapped = jax.jit(jax.shard_map(split, mesh=mesh, in_specs=inside, out_specs=outside))
    found["shard_map"] = {"difference": difference(mapped(*args), want)}

    for name, i in (("q", 0), ("k", 1), ("hi", 4), ("sinks", 5)):
        two = [np.stack([x, x // 2]) if i == j else x for j, x in enumerate(args)]
        in_axes = [0 if i == j else None for j in range(len(args))]
        got = jax.vmap(split, in_axes=in_axes)(*two)
        each = [kernel(*(x[n] if i == j else x for j, x in enumerate(two))) for n in range(2)]
        found[f"vmap over {name}"] = {"difference": difference(got, [np.stack(x) for x in zip(*each, strict=True)])}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
