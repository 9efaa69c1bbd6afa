"""Times variants of the attention kernels on a GPU, each in a process of its own, and checks them.

Usage: python scripts/try_attention.py [VARIANT ...] [--seconds 105] [--shape NAME ...]

One line per variant and shape as soon as it is known: milliseconds and TFLOP/s of the forward (where the variant has
one of its own) and of the backward alone; then the errors of out, dq, dk and dv of one key head against float32 on
the CPU. All compile side by side; a lock lets one process at a time use the GPU.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("OMP_NUM_THREADS", "4")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

SHAPES = {  # batch, tokens, heads, key heads, width
    "B4-S4096-D128": (4, 4096, 32, 8, 128),
    "B1-S16384-D128": (1, 16384, 32, 8, 128),
    "B4-S4096-D64": (4, 4096, 32, 8, 64),
}
FUSED = {
    "fused-A1": {},
    "fused-B0": {"ahead": False, "dq_first": True},
    "fused-B1": {"dq_first": True},
    "fused-A1-sweep": {"sweep": True},
    "fused-B0-sweep": {"ahead": False, "dq_first": True, "sweep": True},
    "fused-A1-byrow": {"by_row": True},
    "fused-A1-rows": {"flat": False},
    # Not right, to tell what costs time: without dQ at all, without adding it, with it written but not added.
    "fused-A0-nodq": {"ahead": False, "omit": "dq"},
    "fused-A1-noreduce": {"omit": "reduce"},
    "fused-A1-noadd": {"omit": "add"},
}
OTHERS = {
    "pair": {},
    "pair-sweep": {"sweep": True},
    "pair-noflight": {"flight": False},
    "forward-meet": {"forward_meet": True},
    "forward-ahead": {"forward_ahead": True},
    "forward-ahead-early": {"forward_ahead": True, "forward_early_word": True},
}
VARIANTS = ("cudnn", *OTHERS, *FUSED)
WRONG = ("fused-A0-nodq", "fused-A1-noreduce", "fused-A1-noadd")


def attention(variant: str):
    """The variant as a function of q, k and v."""
    from pallas_kernels.flash_attention import flash_attention, mosaic_gpu

    if variant in ("cudnn", "xla"):
        return lambda q, k, v: flash_attention(q, k, v, implementation=variant)
    options = {**FUSED, **OTHERS}[variant]

    def attend(q, k, v):
        return mosaic_gpu.forward(
            q,
            k,
            v,
            causal=True,
            window=None,
            segment_ids=None,
            scale=q.shape[-1] ** -0.5,
            deterministic=variant not in FUSED,
            options=tuple(options.items()),
        )[0]

    return attend


def programs(variant: str, shape: tuple):
    """Lowered: inputs, forward with residuals, forward alone or None, backward alone or None."""
    import jax
    import jax.numpy as jnp

    batch, tokens, heads, kv_heads, width = shape
    attend = attention(variant)
    sizes = [(batch, tokens, n, width) for n in (heads, kv_heads, kv_heads, heads)]
    q, k, v, dout = (jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in sizes)

    def inputs():
        keys = jax.random.split(jax.random.key(0, impl="rbg"), 4)
        return [jax.random.normal(key, size, jnp.bfloat16) for key, size in zip(keys, sizes, strict=True)]

    lowered = jax.jit(lambda q, k, v: jax.vjp(attend, q, k, v)).lower(q, k, v)
    pull = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), lowered.out_info[1])
    forward, backward = variant not in FUSED, not variant.startswith("forward")
    return (
        jax.jit(inputs).lower(),
        lowered,
        jax.jit(attend).lower(q, k, v) if forward else None,
        jax.jit(lambda pull, dout: pull(dout)).lower(pull, dout) if backward else None,
    )


def seconds(compiled, *args) -> float:
    """Median of seven batches of about 15 ms."""
    import jax

    jax.block_until_ready([compiled(*args) for _ in range(2)])
    start = time.perf_counter()
    jax.block_until_ready(compiled(*args))
    calls = max(1, min(40, int(0.015 / (time.perf_counter() - start))))
    times = []
    for _ in range(7):
        start = time.perf_counter()
        for _ in range(calls):
            last = compiled(*args)
        jax.block_until_ready(last)
        times.append((time.perf_counter() - start) / calls)
    return sorted(times)[3]


def exact(q, k, v, dout):
    """Out and gradients of the query heads of one key head: q (G, T, H), k and v (T, H), in float32 on the CPU."""
    import numpy as np

    scale = q.shape[-1] ** -0.5
    future = np.triu(np.ones((q.shape[1],) * 2, bool), 1)
    out, dq, dk, dv = [], [], 0.0, 0.0
    for q_TH, dout_TH in zip(q, dout, strict=True):
        score = q_TH @ k.T * scale
        score[future] = -np.inf
        weight = np.exp(score - score.max(1, keepdims=True))
        weight /= weight.sum(1, keepdims=True)
        out.append(weight @ v)
        dv = dv + weight.T @ dout_TH
        dscore = weight * (dout_TH @ v.T - (out[-1] * dout_TH).sum(1, keepdims=True)) * scale
        dq.append(dscore @ k)
        dk = dk + dscore.T @ q_TH
    return np.stack(out), np.stack(dq), dk, dv


def one_head(arrays, kv_head: int, group: int):
    """The last row's part of one key head: (G, T, H) of arrays with all heads, (T, H) of those of keys."""
    import numpy as np

    def part(x):
        x = np.asarray(x)[-1].astype(np.float32).swapaxes(0, 1)
        return x[kv_head] if x.shape[0] * group == heads else x[kv_head * group : (kv_head + 1) * group]

    heads = arrays[0].shape[2]
    return [part(x) for x in arrays]


def child(variant: str, shapes: list[str], lock: str) -> None:
    """Prints the lines of one variant."""
    import jax
    import numpy as np

    def say(*words):
        print(f"{variant:<20}", *words, flush=True)

    def build(name):
        try:
            return [one and one.compile() for one in programs(variant, SHAPES[name])]
        except Exception as broken:  # whatever the compiler says: the others go on
            return broken

    start = time.monotonic()
    jax.devices()
    with ThreadPoolExecutor(len(shapes)) as pool:
        built = dict(zip(shapes, pool.map(build, shapes), strict=True))
    took = time.monotonic() - start
    for_check = {}
    with open(lock, "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate(0)
        print(os.getpid(), file=file, flush=True)
        for name, compiled in built.items():
            if isinstance(compiled, Exception):
                say(name, f"does not compile: {type(compiled).__name__}: {str(compiled)[:300]}")
                continue
            batch, tokens, heads, kv_heads, width = SHAPES[name]
            flops = 2 * batch * heads * width * tokens * tokens
            inputs, both, forward, backward = compiled
            q, k, v, dout = inputs()
            line = f"{name:<15}"
            if forward is not None:
                ahead = seconds(forward, q, k, v)
                line += f" fwd {ahead * 1e3:7.3f} ms {flops / ahead / 1e12:4.0f}"
            if backward is not None:
                out, pull = both(q, k, v)
                back = seconds(backward, pull, dout)
                line += f" bwd {back * 1e3:7.3f} ms {2.5 * flops / back / 1e12:4.0f}"
                if forward is not None:
                    line += f" both {3.5 * flops / (ahead + back) / 1e12:4.0f}"
            say(line, f"TFLOP/s  (compiled in {took:.0f} s)")
            if tokens <= 4096 and variant not in WRONG:
                results = backward(pull, dout) if backward is not None else ()
                arrays = (q, k, v, dout, forward(q, k, v) if backward is None else out, *results)
                for_check[name] = one_head(arrays, kv_heads - 2, heads // kv_heads)
            q = k = v = dout = out = pull = results = arrays = None
        file.truncate(0)
    for name, (q, k, v, dout, *mine) in for_check.items():
        truth = exact(q, k, v, dout)
        apart = [np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(mine, truth, strict=False)]
        say(f"{name:<15} errors of out dq dk dv:", *(f"{one:.1e}" for one in apart))


def watch(running: dict, lock: Path, end: float, patience: float) -> None:
    """Ends processes that hold the GPU for too long, and all that are left at the end."""
    holder, since = "", time.monotonic()
    while running:
        time.sleep(0.1)
        now = time.monotonic()
        if lock.read_text().strip() != holder:
            holder, since = lock.read_text().strip(), now
        for variant, process in list(running.items()):
            hangs = str(process.pid) == holder and now - since > patience
            if process.poll() is None and not hangs and now < end:
                continue
            fate = "hangs" if hangs else "late" if process.poll() is None else f"ended with {process.returncode}"
            if fate != "ended with 0":
                print(f"{variant:<20} {fate}", flush=True)
            process.kill()
            process.wait()
            del running[variant]


def main() -> None:
    """Starts a process for each variant and kills those that hang."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("variant", nargs="*", default=VARIANTS)
    parser.add_argument("--seconds", type=float, default=105, help="until all are ended")
    parser.add_argument("--patience", type=float, default=20, help="seconds that one may hold the GPU")
    parser.add_argument("--shape", nargs="*", default=list(SHAPES))
    parser.add_argument("--tiny", action="store_true", help="shapes that a CPU does, to try this program itself")
    parser.add_argument("--child", action="store_true")
    parser.add_argument("--lock", default=f"/tmp/try_attention.{os.getpid()}")
    options = parser.parse_args()
    if options.tiny:
        SHAPES.update({name: (1, 128, 4, 2, shape[-1]) for name, shape in SHAPES.items()})
    if options.child:
        child(options.variant[0], options.shape, options.lock)
        return
    end = time.monotonic() + options.seconds
    Path(options.lock).write_text("")
    same = ["--child", "--lock", options.lock, *["--tiny"] * options.tiny]
    running = {
        variant: subprocess.Popen([sys.executable, __file__, variant, *same, "--shape", *options.shape])
        for variant in options.variant
    }
    watch(running, Path(options.lock), end, options.patience)


if __name__ == "__main__":
    main()
