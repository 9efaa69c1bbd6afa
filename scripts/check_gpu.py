"""Checks on a GPU what the CPU tests cannot: every operation's implementations against f32 on the same inputs.

Usage: python scripts/check_gpu.py [NAME ...]        (of CHECKS, default all; exit status 1 where an error is above its
bar, or a case fails otherwise, after which the next ones run all the same)

The bar is DESIGN's: 1.5 times the error that dense XLA makes in the same 16-bit dtype; bit equality for NF4.
"""

from __future__ import annotations

import functools
import itertools
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from check_attention import error

from gymjax.quant import nf4
from pallas_kernels.flash_attention import flash_attention
from pallas_kernels.linear_cross_entropy import linear_cross_entropy
from pallas_kernels.lora_linear import Projection, lora_linears, room
from pallas_kernels.nf4_linear import dequantize, nf4_linear
from pallas_kernels.nf4_linear.cases import random_weight
from pallas_kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_residual
from pallas_kernels.rms_norm import explain as explain_norm
from pallas_kernels.swiglu import swiglu

FLOOR = 3e-7  # errors below this are rounding of the comparison itself, a sum of 2,000 terms of it in f32


def out_and_grads(function, args, cotangent):
    """Output and gradients of all arguments, as one tuple."""

    def run(args, cotangent):
        out, back = jax.vjp(function, *args)
        return out, *back(cotangent.astype(out.dtype))

    return jax.jit(run)(args, cotangent)


def compare(name: str, function, dense, args, cotangent, names) -> bool:
    """Errors of `function` and of `dense` in the 16-bit dtype, both against `dense` in f32; prints and judges them."""
    with jax.default_matmul_precision("highest"):
        wide = [arg.astype(jnp.float32) if jnp.issubdtype(arg.dtype, jnp.floating) else arg for arg in args]
        reference = out_and_grads(dense, wide, cotangent.astype(jnp.float32))
    try:
        got = out_and_grads(function, args, cotangent)
    except Exception as failure:  # the other cases are to be seen too
        print(f"FAIL {name}: {type(failure).__name__}: {str(failure)[:1000]}", flush=True)
        return False
    plain = out_and_grads(dense, args, cotangent)
    good = True
    for label, value, other, truth in zip(names, got, plain, reference, strict=True):
        mine, its = error(value, truth), error(other, truth)
        passed = mine <= max(1.5 * its, FLOOR)
        good &= passed
        print(f"{'ok  ' if passed else 'FAIL'} {name:<52} {label:<4} {mine:.2e}  dense {its:.2e}", flush=True)
    return good


def check_attention() -> bool:
    """cuDNN: grouped heads, windows, packed segments with padding, odd lengths; our kernels: check_attention.py."""
    good = True
    cases = itertools.product((127, 512), ((8, 2, 64), (4, 4, 128)), (None, 64), (False, True))
    for tokens, (heads, kv_heads, width), window, packed in cases:
        keys = jax.random.split(jax.random.key(tokens), 4)
        shapes = [(2, tokens, heads, width), *[(2, tokens, kv_heads, width)] * 2, (2, tokens, heads, width)]
        q, k, v, cotangent = (jax.random.normal(key, s, jnp.bfloat16) for key, s in zip(keys, shapes, strict=True))
        third = tokens // 3
        ids = np.repeat([1, 2, 0], [third, tokens - third - 9, 9])[None].repeat(2, 0)
        segments = jnp.asarray(ids, jnp.int32) if packed else None

        def attend(q, k, v, implementation: Any = "cudnn", window=window, segments=segments):
            return flash_attention(q, k, v, window=window, segment_ids=segments, implementation=implementation)

        name = f"cudnn T{tokens} N{heads} K{kv_heads} H{width} window {window} packed {packed}"
        dense = functools.partial(attend, implementation="xla")
        good &= compare(name, attend, dense, (q, k, v), cotangent, ("out", "dq", "dk", "dv"))
    return good


def check_loss() -> bool:
    """Chunked loss against dense logits: frozen and trained head, by token and summed, every option."""
    good = True
    every = {"softcap": 3.0, "scale": 0.5, "label_smoothing": 0.1, "z_loss": 0.01}
    for frozen, summed, options in itertools.product((True, False), (False, True), ({}, every)):
        x_key, head_key, label_key = jax.random.split(jax.random.key(3), 3)
        x = jax.random.normal(x_key, (2, 1000, 512), jnp.bfloat16)
        head = jax.random.normal(head_key, (32003, 512), jnp.bfloat16) * 0.05
        labels = jax.random.randint(label_key, (2, 1000), 0, 32003).at[:, ::7].set(-100)

        def dense(x, head, labels=labels, frozen=frozen, summed=summed, options=options):
            head = jax.lax.stop_gradient(head) if frozen else head
            logits = jnp.einsum("btd,vd->btv", x, head, preferred_element_type=jnp.float32)
            if options:
                logits = options["softcap"] * jnp.tanh(options["scale"] * logits / options["softcap"])
            lse, smoothing = jax.nn.logsumexp(logits, -1), options.get("label_smoothing", 0.0)
            picked = jnp.take_along_axis(logits, labels.clip(0)[..., None], -1)[..., 0]
            nll = lse - (1 - smoothing) * picked - smoothing * logits.mean(-1) + options.get("z_loss", 0.0) * lse**2
            nll = jnp.where(labels >= 0, nll, 0)
            return nll.sum() if summed else nll

        def chunked(x, head, labels=labels, frozen=frozen, summed=summed, options=options):
            chosen: dict[str, Any] = {"frozen_head": frozen, "reduction": "sum" if summed else "none", **options}
            return linear_cross_entropy(x, head, labels, chunk_tokens=256, group_tokens=512, **chosen)

        name = f"loss frozen {frozen} summed {summed} {'every option' if options else ''}"
        cotangent = jnp.float32(1) if summed else jnp.ones((2, 1000))
        good &= compare(name, chunked, dense, (x, head), cotangent, ("nll", "dx", "dh"))
    return good


def check_nf4() -> bool:
    """Dequantized bits on the GPU equal the CPU's; the product against the dense one."""
    w = np.random.default_rng(0).standard_normal((384, 448)).astype(np.float32)
    packed = jax.tree.map(jnp.asarray, nf4.quantize(w))
    on_gpu = np.asarray(jax.jit(dequantize)(packed)).view(np.uint16)
    with jax.default_device(jax.devices("cpu")[0]):
        on_cpu = np.asarray(dequantize(jax.tree.map(np.asarray, packed))).view(np.uint16)
    same = bool((on_gpu == on_cpu).all())
    print(f"{'ok  ' if same else 'FAIL'} nf4 dequantized bits")
    x, cotangent = (jax.random.normal(jax.random.key(i), (100, n), jnp.bfloat16) for i, n in ((0, 448), (1, 384)))
    dense_w = dequantize(packed)

    def dense(x):
        return x @ dense_w.astype(x.dtype).T

    return same & compare("nf4_linear", lambda x: nf4_linear(x, packed), dense, (x,), cotangent, ("out", "dx"))


def check_lora() -> bool:
    """Adapted layers of one input, with ranks and widths that the kernel takes and some that it does not."""
    good = True
    for rows, width, outs, ranks in (
        (2944, 1024, (2048, 512), (16, 8)),
        (2944, 4096, (14336,), (64,)),
        (8192, 14336, (4096,), (16,)),
        (3001, 2048, (1024, 512), (48, 40)),  # a second part of low products, which the second layer begins before
        (70000, 512, (640, 256, 256), (64, 8, 40)),  # more tiles of rows than blocks
        (4096, 4096, (4096, 1024, 1024), (64, 64, 16)),  # more than a product's kernel makes
    ):
        keys = iter(jax.random.split(jax.random.key(width), 3 * len(outs) + 2))  # x, its gradient; each layer's w, a, b
        x = jax.random.normal(next(keys), (rows, width), jnp.bfloat16)
        ws = [jax.random.normal(next(keys), (out, width), jnp.bfloat16) * width**-0.5 for out in outs]
        factors = []
        for out, rank in zip(outs, ranks, strict=True):
            factors.append(jax.random.normal(next(keys), (rank, width), jnp.bfloat16) * width**-0.5)
            factors.append(jax.random.normal(next(keys), (out, rank), jnp.bfloat16))

        def adapted(x, *factors, ws=ws):
            pairs = zip(ws, factors[::2], factors[1::2], strict=True)
            layers = [Projection(w, a, b, jnp.float32(0.5)) for w, a, b in pairs]
            return jnp.concatenate(lora_linears(x, layers), axis=-1)

        def dense(x, *factors, ws=ws):
            pairs = zip(ws, factors[::2], factors[1::2], strict=True)
            return jnp.concatenate([x @ w.astype(x.dtype).T + 0.5 * (x @ a.T) @ b.T for w, a, b in pairs], axis=-1)

        cotangent = jax.random.normal(next(keys), (x.shape[0], sum(outs)), jnp.bfloat16)
        names = ("out", "dx", *(f"d{name}{i}" for i in range(len(outs)) for name in "ab"))
        name = f"lora_linears {rows} x {width} -> {outs}, R {ranks}"
        good &= compare(name, adapted, dense, (x, *factors), cotangent, names)
    return good


def check_swiglu() -> bool:
    """Result and both gradients, by XLA and by the kernel."""
    gate, up, dy = (jax.random.normal(jax.random.key(i), (1000, 4096), jnp.bfloat16) for i in range(3))

    def dense(gate, up):
        return jax.nn.silu(gate) * up

    good = True
    for name in ("xla", "mosaic_gpu"):
        gated = functools.partial(swiglu, implementation=name)
        good &= compare(f"swiglu {name}", gated, dense, (gate, up), dy, ("out", "dg", "du"))
    return good


def check_norm() -> bool:
    """Output and gradients, alone and beside a residual stream, of one, two and four rows a block."""
    good = True
    print(explain_norm(4096))
    for rows, width, dtype in (
        (1032, 896, jnp.bfloat16),
        (16384, 896, jnp.bfloat16),
        (4096, 128, jnp.bfloat16),
        (1040, 576, jnp.float16),
        (8192, 4096, jnp.bfloat16),
        (1025, 1024, jnp.bfloat16),
        (2050, 1024, jnp.bfloat16),
        (1024, 2048, jnp.float16),
        (1077, 5120, jnp.bfloat16),
        (1030, 8192, jnp.bfloat16),
        (1030, 1536, jnp.bfloat16),
        (1030, 130, jnp.bfloat16),
    ):
        x, other, dy = (jax.random.normal(jax.random.key(i), (rows, width), dtype) for i in range(3))
        scale = 1 + jax.random.normal(jax.random.key(3), (width,), jnp.float32) / 4
        asked = "xla" if width % 64 else "mosaic_gpu"
        norm = functools.partial(rms_norm, implementation=asked)
        beside, added_norm = (functools.partial(f, implementation=asked) for f in (rms_norm_residual, add_rms_norm))

        def dense(x, scale):
            wide = x.astype(jnp.float32)
            normed = wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)
            return normed.astype(x.dtype) * scale.astype(x.dtype)

        def residual(x, scale, other=other, norm=beside):
            x, y = norm(x, scale)
            return x * other.astype(x.dtype) + y

        def dense_residual(x, scale, other=other):
            return x * other.astype(x.dtype) + dense(x, scale)

        def added(x, scale, other=other, norm=added_norm):
            total, y = norm(x, other.astype(x.dtype), scale)
            return total * 2 + y

        def dense_added(x, scale, other=other):
            total = x + other.astype(x.dtype)
            return total * 2 + dense(total, scale)

        def with_room(x, scale, width=width, norm=norm):
            return norm(x, scale, room=64)[:, :width]

        names, name = ("out", "dx", "ds"), f"rms_norm {rows}x{width} {jnp.dtype(dtype).name}"
        good &= compare(name, norm, dense, (x, scale), dy, names)
        good &= compare(f"{name} room", with_room, dense, (x, scale), dy, names)
        good &= compare(f"{name} added", added, dense_added, (x, scale), dy, names)
        good &= compare(f"{name} residual", residual, dense_residual, (x, scale), dy, names)
    return good


def check_norm_into_lora() -> bool:
    """A branch of a residual stream: norm with room for what adapted layers put there, weights as arrays and packed."""
    good = True
    cases = ((False, 1024, (2048, 1024)), (True, 4096, (14336, 4096)), (True, 4096, (4096, 1024)))
    for packed, width, outs in cases:
        keys = iter(jax.random.split(jax.random.key(width), 12))
        x, other = (jax.random.normal(next(keys), (2, 2048, width), jnp.bfloat16) for _ in range(2))
        scale = 1 + jax.random.normal(next(keys), (width,), jnp.float32) / 4
        shapes = [(out, width) for out in outs]
        arrays = [jax.random.normal(next(keys), shape, jnp.bfloat16) * width**-0.5 for shape in shapes]
        ws: list[Any] = arrays
        if packed:
            ws = [random_weight(next(keys), shape) for shape in shapes]
            arrays = [dequantize(w, implementation="xla") for w in ws]
        a = jax.random.normal(next(keys), (16, width), jnp.bfloat16) * width**-0.5
        b = jax.random.normal(next(keys), (outs[0], 16), jnp.bfloat16)

        def branch(x, scale, a, b, ws=ws, other=other):
            none = Projection(ws[1], None, None, jnp.float32(1))
            layers = [Projection(ws[0], a, b, jnp.float32(0.5)), none]
            x, y = rms_norm_residual(x, scale, room=room(x, layers))
            return jnp.concatenate([x * other.astype(x.dtype), *lora_linears(y, layers)], axis=-1)

        def dense(x, scale, a, b, arrays=arrays, other=other):
            wide = x.astype(jnp.float32)
            normed = wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)
            y = normed.astype(x.dtype) * scale.astype(x.dtype)
            first, second = (y @ w.astype(x.dtype).T for w in arrays)
            return jnp.concatenate([x * other.astype(x.dtype), first + 0.5 * (y @ a.T) @ b.T, second], axis=-1)

        cotangent = jax.random.normal(next(keys), (2, 2048, width + sum(outs)), jnp.bfloat16)
        name = f"norm into {width} -> {outs}, packed {packed}"
        good &= compare(name, branch, dense, (x, scale, a, b), cotangent, ("out", "dx", "ds", "da", "db"))
    return good


CHECKS = {
    "lora": check_lora,
    "swiglu": check_swiglu,
    "norm": check_norm,
    "norm_into_lora": check_norm_into_lora,
    "attention": check_attention,
    "loss": check_loss,
    "nf4": check_nf4,
}


def main(wanted: list[str]) -> int:
    """Runs the named checks, or every one."""
    if unknown := set(wanted) - set(CHECKS):
        raise SystemExit(f"unknown checks {sorted(unknown)}; known: {', '.join(CHECKS)}")
    print(jax.devices()[0].device_kind, "jax", jax.__version__)
    results = [CHECKS[name]() for name in wanted or CHECKS]
    print("all good" if all(results) else "some checks FAILED")
    return int(not all(results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
