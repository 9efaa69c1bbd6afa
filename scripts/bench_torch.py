"""Times what torch has of an operation, for bench_peers.py: one process with all cases of a run."""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Any

from gpu_turns import Turns

Calls = dict[str, tuple[Any, Any, Any]]
"""Name of a peer -> (its forward, its forward with backward of given cotangents, what makes cotangents)."""


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
    """Liger's normalisation."""
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    x, scale = normal(shapes[0]), normal(shapes[1])
    return {"liger": with_backward(lambda: LigerRMSNormFunction.apply(x, scale, static["eps"]), (x, scale))}


def liger_add_rms_norm(shapes: list, static: dict[str, Any]) -> Calls:
    """Liger's sum and normalisation."""
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

IN_BYTES = ("rms_norm", "add_rms_norm", "rope", "swiglu")
"""Timed by the GPU's clock, as torch's own part of a call may be longer."""
TIMED = 10  # calls of those


def normal(shape):
    """A normal bf16 tensor on the GPU that wants a gradient."""
    import torch

    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def with_backward(forward, inputs):
    """(forward, forward with the gradients of inputs by given cotangents, what makes cotangents)."""
    import torch

    out = forward()
    outs = out if isinstance(out, tuple) else (out,)
    return (
        forward,
        lambda cotangents: torch.autograd.grad(forward(), inputs, cotangents),
        lambda: [torch.randn_like(one) for one in outs],
    )


def milliseconds(call) -> float:
    """Median time of a call, as `bench.median_seconds` takes it."""
    from triton.testing import do_bench

    from pallas_kernels._profile import SETTLED

    return do_bench(call, warmup=int(1000 * SETTLED), rep=500, return_mode="median")


def kernel_milliseconds(calls: list) -> float:
    """Median durations of a call's kernels, added up; the first call warms up."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from pallas_kernels._profile import added_medians

    warm_up, *timed = calls
    warm_up()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for call in timed:
            call()
        torch.cuda.synchronize()
    events = (event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA)
    return added_medians(((event.name, event.time_range.elapsed_us()) for event in events), len(timed)) / 1e3


def both_milliseconds(forward, both, cotangents, function: str) -> list[float]:
    """Times of the forward pass and of both. Liger writes gradients over cotangents, so that each call has its own."""
    import torch

    if function not in IN_BYTES:
        fixed = cotangents()
        with torch.no_grad():
            alone = milliseconds(forward)
        return [alone, milliseconds(lambda: both(fixed))]
    with torch.no_grad():
        alone = kernel_milliseconds([forward] * (TIMED + 1))
    return [alone, kernel_milliseconds([partial(both, cotangents()) for _ in range(TIMED + 1)])]


def time_torch(described: list, turns: Turns) -> None:
    """Prints {case: {peer: [ms forward, ms with backward]}}, a line for each of the cases as `describe` gives them."""
    import torch

    for name, function, shapes, static in described:
        found: dict[str, list[float]] = {}
        with turns.alone(f"{name} torch"):
            try:
                for peer, calls in TORCH_PEERS[function](shapes, static).items():
                    found[peer] = both_milliseconds(*calls, function)
            except RuntimeError as error:
                print(f"{name}: {str(error)[:200]}", file=sys.stderr)
            calls = None
            torch.cuda.empty_cache()
        print(json.dumps({name: found}), flush=True)


def describe(op: str, cases: list) -> list:
    """The cases that torch has peers of, as `time_torch` reads them."""
    from pallas_kernels import bench

    described = []
    for case in cases:
        if (case.function or op) in TORCH_PEERS:
            args, arrays, static = bench.shapes_of(case)
            shapes = [list(arg.shape) for arg in args if hasattr(arg, "shape")]
            described.append([case.name, case.function or op, shapes, static | {"packed": bool(arrays)}])
    return described


def torch_metrics(case, forward: float, both: float, *, tera: bool) -> dict[str, float]:
    """Metrics of milliseconds; the backward pass alone is what is left of both."""
    if tera:
        return {"tflops_fwd": case.flops / forward / 1e9, "tflops_fwd_bwd": case.flops_fwd_bwd / both / 1e9}
    backward = (case.bytes_fwd_bwd - case.bytes) / max(both - forward, 1e-6)
    return {"gbps": case.bytes / forward / 1e6, "gbps_bwd": backward / 1e6}
