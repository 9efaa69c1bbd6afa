"""Times an operation beside its strongest peers in one run: cuDNN, tokamax and torch for attention, Liger for layers.

Usage: python scripts/bench_peers.py OP [CASE ...] [--out FILE]    (cases: pallas_kernels/OP/cases.py)

Lines go to scripts/results/OP.jsonl. Peers that are not installed, or that do not do a case, are named on the error
stream. torch runs in a process of its own, so that the two do not share the GPU's memory. `copy` is the rate at which
this run reads and writes 1 GiB, the roof of operations that move more than they compute.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

Calls = dict[str, tuple[Any, Any]]
"""Name of a peer -> (its forward, its forward with backward), both without arguments."""


def tokamax_attention(q, k, v, *, causal, window, segment_ids, softcap=None, deterministic=True):
    """tokamax's Hopper kernels; they have neither documents nor, in this call, windows."""
    import tokamax

    del deterministic
    if window is not None or segment_ids is not None:
        raise NotImplementedError("not compared on windows and documents")
    return tokamax.dot_product_attention(q, k, v, is_causal=causal, logits_soft_cap=softcap, implementation="mosaic")


def tokamax_ragged_dot(x, w, group_sizes):
    """tokamax's Hopper kernels for grouped products; its weights are (E, D, F)."""
    import tokamax

    try:
        return tokamax.ragged_dot(x, w, group_sizes, implementation="mosaic")
    except Exception as error:  # whatever it refuses with, the others are still timed
        raise NotImplementedError(f"tokamax: {error}") from error


def torch_attention(shapes: list, static: dict[str, Any]) -> Calls:
    """FlashAttention-2 and cuDNN as torch calls them."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    if static.get("window") or static.get("softcap") or static.get("packed"):
        return {}
    q, k, v = (normal((batch, heads, tokens, width)) for batch, tokens, heads, width in shapes)

    def calls(backend):
        def attend():
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, is_causal=static["causal"], enable_gqa=True)

        return with_backward(attend, (q, k, v))

    return {"torch_fa2": calls(SDPBackend.FLASH_ATTENTION), "torch_cudnn": calls(SDPBackend.CUDNN_ATTENTION)}


def liger_rms_norm(shapes: list, static: dict[str, Any]) -> Calls:
    """Liger's normalisation. It writes its input's gradient over the output's, so that each call has a fresh one."""
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    x, scale = normal(shapes[0]), normal(shapes[1])
    return {"liger": with_backward(lambda: LigerRMSNormFunction.apply(x, scale, static["eps"]), (x, scale))}


def liger_add_rms_norm(shapes: list, static: dict[str, Any]) -> Calls:
    """Liger's sum and normalisation; in_place off, so that each call has a fresh gradient."""
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    x, added, scale = (normal(shape) for shape in shapes)

    def both():
        normed, total = LigerFusedAddRMSNormFunction.apply(x, added, scale, static["eps"], 0.0, "llama", False)
        return total, normed

    return {"liger": with_backward(both, (x, added))}


def liger_rope(shapes: list, static: dict[str, Any]) -> Calls:
    """Liger's rotation of q and k, which has heads before tokens."""
    from liger_kernel.ops.rope import LigerRopeFunction

    if static.get("interleaved") or 2 * shapes[2][2] != shapes[0][3]:
        return {}  # it turns whole heads in halves
    q, k = (normal((batch, heads, tokens, width)) for batch, tokens, heads, width in shapes[:2])
    cos, sin = (normal((shape[0], shape[1], 2 * shape[2])).detach() for shape in shapes[2:4])
    return {"liger": with_backward(lambda: LigerRopeFunction.apply(q, k, cos, sin), (q, k))}


def liger_swiglu(shapes: list, static: dict[str, Any]) -> Calls:
    """Liger's gate."""
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    if static.get("activation", "silu") != "silu":
        return {}
    gate, up = (normal(shape) for shape in shapes)
    return {"liger": with_backward(lambda: LigerSiLUMulFunction.apply(gate, up), (gate, up))}


def liger_loss(shapes: list, static: dict[str, Any]) -> Calls:
    """Liger's linear cross-entropy, whose forward computes the gradients."""
    import torch
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    (batch, tokens, width), head_shape = shapes[:2]
    x, head = normal((batch * tokens, width)), normal(head_shape)
    head.data.mul_(width**-0.5).requires_grad_(not static["frozen_head"])
    labels = torch.randint(0, head_shape[0], (batch * tokens,), device="cuda")

    def loss():
        result = LigerFusedLinearCrossEntropyFunction.apply(x, head, labels)
        return result[0] if isinstance(result, tuple) else result

    return {"liger": with_backward(loss, (x,) if static["frozen_head"] else (x, head))}


TORCH_PEERS = {
    "flash_attention": torch_attention,
    "rms_norm": liger_rms_norm,
    "add_rms_norm": liger_add_rms_norm,
    "rope": liger_rope,
    "swiglu": liger_swiglu,
    "linear_cross_entropy": liger_loss,
}


def normal(shape):
    """A normal bf16 tensor on the GPU that wants a gradient."""
    import torch

    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def with_backward(forward, inputs):
    """(forward, forward with the gradients of inputs)."""
    import torch

    out = forward()
    outs = out if isinstance(out, tuple) else (out,)
    cotangents = [torch.randn_like(one) for one in outs]

    def both():
        out = forward()
        return torch.autograd.grad(out, inputs, [cotangent.clone() for cotangent in cotangents])

    return forward, both


def time_torch(op: str, shapes: list, static: dict[str, Any]) -> None:
    """Prints {peer: [ms forward, ms with backward]} as one JSON object."""
    import torch
    from triton.testing import do_bench

    timing: dict[str, Any] = {"warmup": 100, "rep": 300, "return_mode": "median"}
    found = {}
    for name, (forward, both) in TORCH_PEERS[op](shapes, static).items():
        try:
            with torch.no_grad():
                alone = do_bench(forward, **timing)
            found[name] = [alone, do_bench(both, **timing)]
        except RuntimeError as error:
            print(f"{name}: {str(error)[:200]}", file=sys.stderr)
    print(json.dumps(found))


def torch_metrics(
    name: str, op: str, case, args: tuple, arrays: dict[str, Any], static: dict[str, Any]
) -> dict[str, dict]:
    """Rates of torch's peers on a case, empty where there are none."""
    if name not in TORCH_PEERS or importlib.util.find_spec("torch") is None:
        return {}
    shapes = [list(arg.shape) for arg in args if hasattr(arg, "shape")]
    described = json.dumps([name, shapes, static | {"packed": bool(arrays)}])
    done = subprocess.run([sys.executable, __file__, op, "--torch", described], capture_output=True, text=True)
    print(done.stderr[-500:], file=sys.stderr, end="")
    if done.returncode:
        return {}
    tera = op in ("flash_attention", "linear_cross_entropy")
    work = (case.flops, case.flops_fwd_bwd) if tera else (case.bytes, case.bytes_fwd_bwd)
    names, unit = (("tflops_fwd", "tflops_fwd_bwd"), 1e9) if tera else (("gbps", "gbps_fwd_bwd"), 1e6)
    rates = json.loads(done.stdout.splitlines()[-1])
    return {peer: {n: w / ms / unit for n, w, ms in zip(names, work, times)} for peer, times in rates.items()}


def copy_rate() -> dict[str, float]:
    """GB/s of adding 1 to 1 GiB, as a peer of operations that are measured in GB/s."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.bench import median_seconds

    x = jnp.zeros(2**29, jnp.bfloat16)
    rate = 2 * x.nbytes / median_seconds(jax.jit(lambda x: x + 1).lower(x).compile(), x) / 1e9
    return {"gbps": rate, "gbps_fwd_bwd": rate}


def main() -> None:
    """Measures the named cases of an operation, or all, and appends their lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("op")
    parser.add_argument("case", nargs="*")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--torch", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.torch:
        time_torch(*json.loads(options.torch))
        return
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch's process needs memory too

    from pallas_kernels import OPS, bench
    from pallas_kernels._case import Peer

    if options.op not in OPS:
        parser.error(f"unknown operation {options.op!r}; known: {', '.join(OPS)}")
    cases = importlib.import_module(f"pallas_kernels.{options.op}.cases")
    known = {case.name: case for case in cases.CASES}
    if unknown := set(options.case) - set(known):
        parser.error(f"unknown cases {sorted(unknown)}; known: {', '.join(known)}")
    of_tokamax = {"flash_attention": Peer(tokamax_attention)}
    if options.op == "grouped_matmul":
        of_tokamax["grouped_matmul"] = Peer(tokamax_ragged_dot, cases.swapped)
    ours = {"flash_attention": ("mosaic_gpu", "cudnn"), "grouped_matmul": ("mosaic_gpu", "xla")}
    peers = {} if options.op in of_tokamax else dict(cases.PEERS)
    if options.op == "grouped_matmul":
        peers["ragged_dot"] = cases.PEERS["ragged_dot"]  # without the one that takes E times the work and memory
    if options.op in of_tokamax and importlib.util.find_spec("tokamax") is not None:
        peers["tokamax"] = of_tokamax[options.op]
    elif options.op in of_tokamax:
        print("tokamax is not installed and not timed", file=sys.stderr)
    rate = functools.cache(copy_rate)
    out = options.out or Path("scripts/results") / f"{options.op}.jsonl"
    for name in options.case or known:
        case = known[name]
        measured = {"copy": rate()} if (case.metric or cases.METRIC) == "gbps" else {}
        measured |= torch_metrics(case.function or options.op, options.op, case, *bench.build(case))
        timed: dict[str, Any] = {"implementations": ours[options.op]} if options.op in ours else {}
        for line in bench.measure(options.op, case, cases, peers=peers, measured=measured, **timed):
            text = json.dumps(line)
            print(text, flush=True)
            with out.open("a") as file:
                file.write(text + "\n")


if __name__ == "__main__":
    main()
