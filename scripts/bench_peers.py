"""Times an operation beside its strongest peers in one run: cuDNN, tokamax and torch for attention, Liger for layers.

Usage: python scripts/bench_peers.py OP [CASE ...] [--out FILE]    (cases: pallas_kernels/OP/cases.py)

Lines go to scripts/results/OP.jsonl. Peers that are not installed, or that do not do a case, are named on the error
stream. Each case is a process of its own, and torch with all cases is one more: they start and compile side by side,
and a lock lets one at a time use the GPU. `copy` is the rate at which this run reads and writes 1 GiB, the roof of
operations that move more than they compute.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

Calls = dict[str, tuple[Any, Any]]
"""Name of a peer -> (its forward, its forward with backward), both without arguments."""


def tokamax_attention(q, k, v, *, causal, window, segment_ids, softcap=None, deterministic=None):
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


def time_torch(op: str, described: list, lock: Path) -> None:
    """Prints {case: {peer: [ms forward, ms with backward]}} of the cases, each with its shapes and options."""
    import torch
    from triton.testing import do_bench

    timing: dict[str, Any] = {"warmup": 50, "rep": 200, "return_mode": "median"}
    found: dict[str, dict[str, list[float]]] = {}
    for name, function, shapes, static in described:
        with holding(lock):
            try:
                for peer, (forward, both) in TORCH_PEERS[function](shapes, static).items():
                    with torch.no_grad():
                        alone = do_bench(forward, **timing)
                    found.setdefault(name, {})[peer] = [alone, do_bench(both, **timing)]
            except RuntimeError as error:
                print(f"{name}: {str(error)[:200]}", file=sys.stderr)
            forward = both = None
            torch.cuda.empty_cache()
    print(json.dumps(found))


def torch_rates(op: str, cases: list, lock: Path, patience: float) -> dict[str, dict[str, dict[str, float]]]:
    """Rates of torch's peers by case, from a process that times them all; empty where there are none."""
    from pallas_kernels import bench

    known = {case.name: case for case in cases if (case.function or op) in TORCH_PEERS}
    if not known or importlib.util.find_spec("torch") is None:
        return {}
    described = []
    for case in known.values():
        args, arrays, static = bench.shapes_of(case)
        shapes = [list(arg.shape) for arg in args if hasattr(arg, "shape")]
        described.append([case.name, case.function or op, shapes, static | {"packed": bool(arrays)}])
    command = [sys.executable, __file__, op, "--lock", str(lock), "--torch", json.dumps(described)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=patience)
    except subprocess.TimeoutExpired:
        print(f"torch: not ended after {patience} s", file=sys.stderr)
        return {}
    print(done.stderr[-500:], file=sys.stderr, end="")
    if done.returncode:
        return {}
    tera = op in ("flash_attention", "linear_cross_entropy")
    rates: dict[str, dict[str, dict[str, float]]] = {}
    for name, peers in json.loads(done.stdout.splitlines()[-1]).items():
        rates[name] = {peer: torch_metrics(known[name], *times, tera) for peer, times in peers.items()}
    return rates


def torch_metrics(case, forward: float, both: float, tera: bool) -> dict[str, float]:
    """Metrics of milliseconds; the backward pass alone is what is left of both."""
    if tera:
        return {"tflops_fwd": case.flops / forward / 1e9, "tflops_fwd_bwd": case.flops_fwd_bwd / both / 1e9}
    backward = (case.bytes_fwd_bwd - case.bytes) / max(both - forward, 1e-6)
    return {"gbps": case.bytes / forward / 1e6, "gbps_bwd": backward / 1e6}


@contextlib.contextmanager
def holding(lock: Path):
    """While the GPU is this process's alone."""
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def copy_rate() -> dict[str, float]:
    """GB/s of adding 1 to 1 GiB, as a peer of operations that are measured in GB/s."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.bench import median_seconds

    x = jnp.zeros(2**29, jnp.bfloat16)
    rate = 2 * x.nbytes / median_seconds(jax.jit(lambda x: x + 1).lower(x).compile(), x) / 1e9
    return {"gbps": rate, "gbps_bwd": rate}


OURS = {"flash_attention": ("mosaic_gpu", "cudnn"), "grouped_matmul": ("mosaic_gpu", "xla")}
"""What is timed of ours where not all is worth its time."""

LARGE = 32 * 2**30  # bytes: ragged_dot's gradient needs two f32 copies of the wider side for each expert


def peers_of(op: str, case, module) -> dict[str, Any]:
    """The peers that run in JAX."""
    from pallas_kernels import bench
    from pallas_kernels._case import Peer

    peers = dict(module.PEERS)
    if op == "flash_attention":
        peers = {"tokamax": Peer(tokamax_attention)}
    if op == "grouped_matmul":  # without the one that takes E times the work and memory
        x, w, *_ = bench.shapes_of(case)[0]
        peers = {"tokamax": Peer(tokamax_ragged_dot, module.swapped)}
        if 8 * x.shape[0] * w.shape[0] * max(w.shape[1:]) <= LARGE:
            peers["ragged_dot"] = module.PEERS["ragged_dot"]
    if "tokamax" in peers and importlib.util.find_spec("tokamax") is None:
        print("tokamax is not installed and not timed", file=sys.stderr)
        del peers["tokamax"]
    return peers


def time_case(op: str, case, module, lock: Path) -> None:
    """Prints {"device": its name, "results": {implementation or peer: metrics}} as one JSON object."""
    import jax

    from pallas_kernels import bench

    started = time.perf_counter()

    @contextlib.contextmanager
    def alone():
        compiled = time.perf_counter()
        with holding(lock):
            held = time.perf_counter()
            yield
        times = (compiled - started, held - compiled, time.perf_counter() - held)
        print(f"{case.name}: compiled {times[0]:.0f} s, waited {times[1]:.0f}, timed {times[2]:.0f}", file=sys.stderr)

    peers = {} if case.function else peers_of(op, case, module)
    results = bench.rates(op, case, module, implementations=OURS.get(op), peers=peers, alone=alone())
    if (case.metric or module.METRIC) == "gbps":
        with holding(lock):
            results["copy"] = copy_rate()
    print(json.dumps({"device": jax.devices()[0].device_kind, "results": results}))


def run_case(op: str, name: str, lock: Path, patience: float, tiny: list[str]) -> dict[str, Any]:
    """What `time_case` printed in a process of its own; empty where it ended without."""
    command = [sys.executable, __file__, op, name, "--lock", str(lock), *tiny]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=patience)
    except subprocess.TimeoutExpired:
        print(f"{name}: not ended after {patience} s", file=sys.stderr)
        return {}
    said = [line for line in done.stderr.splitlines() if line.startswith(name) or done.returncode]
    print(*said[-20:], sep="\n", file=sys.stderr)
    return {} if done.returncode else json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Measures the named cases of an operation, or all, and appends their lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("op")
    parser.add_argument("case", nargs="*")
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--tiny", action="store_true", help="the tests' cases, to try this program itself on any device"
    )
    parser.add_argument("--processes", type=int, default=8, help="cases that compile side by side")
    parser.add_argument("--seconds", type=float, default=600, help="that a case may take, its turns' waits included")
    parser.add_argument("--lock", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--torch", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.torch:
        time_torch(options.op, json.loads(options.torch), options.lock)
        return
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several processes share the GPU's memory

    from pallas_kernels import OPS, bench

    if options.op not in OPS:
        parser.error(f"unknown operation {options.op!r}; known: {', '.join(OPS)}")
    module = importlib.import_module(f"pallas_kernels.{options.op}.cases")
    known = {case.name: case for case in (module.TINY if options.tiny else module.CASES)}
    if unknown := set(options.case) - set(known):
        parser.error(f"unknown cases {sorted(unknown)}; known: {', '.join(known)}")
    if options.lock:
        time_case(options.op, known[options.case[0]], module, options.lock)
        return
    names, tiny = options.case or list(known), ["--tiny"] * options.tiny
    out = options.out or Path("scripts/results") / f"{options.op}.jsonl"
    with tempfile.NamedTemporaryFile() as lock, ThreadPoolExecutor(options.processes + 1) as pool:
        file = Path(lock.name)
        torch = pool.submit(torch_rates, options.op, [known[name] for name in names], file, options.seconds)
        timed = {pool.submit(run_case, options.op, name, file, options.seconds, tiny): name for name in names}
        for future in as_completed(timed):
            name, told = timed[future], future.result()
            if not told:
                continue
            results = (torch.result().get(name, {}) if not torch.exception() else {}) | told["results"]
            for line in bench.lines(options.op, known[name], results, OURS.get(options.op), told["device"]):
                text = json.dumps(line)
                print(text, flush=True)
                with out.open("a") as target:
                    target.write(text + "\n")


if __name__ == "__main__":
    main()
