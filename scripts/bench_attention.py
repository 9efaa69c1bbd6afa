"""Times attention beside its strongest peers in one run: cuDNN, tokamax's Mosaic kernels, and torch's FA2 and cuDNN.

Usage: python scripts/bench_attention.py [CASE ...] [--out FILE]    (cases: pallas_kernels/flash_attention/cases.py)

Peers that are not installed, or that do not do a case, are named on the error stream. torch runs in a process of its
own, so that the two do not share the GPU's memory. Plain XLA is left out: `python -m pallas_kernels.bench` has it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def tokamax_attention(q, k, v, *, causal, window, segment_ids, softcap=None, deterministic=True):
    """tokamax's Hopper kernels; they have neither documents nor, in this call, windows."""
    import tokamax

    del deterministic
    if window is not None or segment_ids is not None:
        raise NotImplementedError("not compared on windows and documents")
    return tokamax.dot_product_attention(q, k, v, is_causal=causal, logits_soft_cap=softcap, implementation="mosaic")


def time_torch(batch: int, tokens: int, heads: int, kv_heads: int, width: int, causal: bool) -> None:
    """Prints milliseconds of forward and of forward with backward of torch's kernels as one JSON object."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention
    from triton.testing import do_bench

    def normal(heads: int):
        return torch.randn(batch, heads, tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    q, k, v, dout = normal(heads), normal(kv_heads), normal(kv_heads), normal(heads).detach()
    found = {}
    for name, backend in (("torch_fa2", SDPBackend.FLASH_ATTENTION), ("torch_cudnn", SDPBackend.CUDNN_ATTENTION)):
        try:
            with sdpa_kernel(backend):

                def attend():
                    return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

                def both():
                    return torch.autograd.grad(attend(), (q, k, v), dout)

                timing: dict[str, Any] = {"warmup": 100, "rep": 300, "return_mode": "median"}
                with torch.no_grad():
                    forward = do_bench(attend, **timing)
                found[name] = {"fwd": forward, "fwd_bwd": do_bench(both, **timing)}
        except RuntimeError as error:
            print(f"{name}: {str(error)[:200]}", file=sys.stderr)
    print(json.dumps(found))


def torch_metrics(case, static: dict[str, Any], shapes: tuple) -> dict[str, dict[str, float]]:
    """Rates of torch's kernels on a case, empty where there is no torch or it has no such attention."""
    plain = not any(static.get(name) for name in ("window", "softcap"))
    if importlib.util.find_spec("torch") is None or not plain or "docs" in case.name:
        return {}
    (batch, tokens, heads, width), (_, _, kv_heads, _) = shapes
    command = [
        sys.executable,
        __file__,
        "--torch",
        json.dumps([batch, tokens, heads, kv_heads, width, static["causal"]]),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(f"{case.name} torch: {done.stderr[-500:]}", file=sys.stderr)
        return {}
    return {
        name: {
            "tflops_fwd": case.flops / ms["fwd"] / 1e9,
            "tflops_fwd_bwd": case.flops_fwd_bwd / ms["fwd_bwd"] / 1e9,
        }
        for name, ms in json.loads(done.stdout.splitlines()[-1]).items()
    }


def main() -> None:
    """Measures the named cases, or all, and appends their lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case", nargs="*")
    parser.add_argument("--out", type=Path, default=Path("scripts/results/flash_attention.jsonl"))
    parser.add_argument("--torch", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.torch:
        time_torch(*json.loads(options.torch))
        return
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch's process needs memory too

    from pallas_kernels import bench
    from pallas_kernels._case import Peer
    from pallas_kernels.flash_attention import cases

    known = {case.name: case for case in cases.CASES}
    if unknown := set(options.case) - set(known):
        parser.error(f"unknown cases {sorted(unknown)}; known: {', '.join(known)}")
    peers = {}
    if importlib.util.find_spec("tokamax") is None:
        print("tokamax is not installed and not timed", file=sys.stderr)
    else:
        peers["tokamax"] = Peer(tokamax_attention)
    for name in options.case or known:
        args, _, static = bench.build(known[name])
        measured = torch_metrics(known[name], static, (args[0].shape, args[1].shape))
        del args
        timed: dict[str, Any] = {"implementations": ("mosaic_gpu", "cudnn"), "peers": peers, "measured": measured}
        for line in bench.measure("flash_attention", known[name], cases, **timed):
            if line["implementation"] == "mosaic_gpu":
                text = json.dumps(line)
                print(text, flush=True)
                with options.out.open("a") as file:
                    file.write(text + "\n")


if __name__ == "__main__":
    main()
