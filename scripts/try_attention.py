"""Times variants of the attention kernels on a GPU, each in a process of its own, and checks them.

Usage: python scripts/try_attention.py [VARIANT ...] [--seconds 170]

One line per variant and shape: milliseconds and TFLOP/s of the forward and of the backward alone, and the errors of
out, dq, dk and dv: to dense float32 attention on ragged packed rows, to cuDNN's on two of the timed shapes.
Programs compile side by side; a lock lets one process at a time use the GPU for checks and timings.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

SHAPES = {  # batch, tokens, heads, key heads, width
    "B4-S4096-D128": (4, 4096, 32, 8, 128),
    "B1-S16384-D128": (1, 16384, 32, 8, 128),
    "B4-S4096-D64": (4, 4096, 32, 8, 64),
    "B4-S2048-D128": (4, 2048, 32, 8, 128),
}
REFERENCE = ("B4-S2048-D128", "B4-S4096-D64")  # whose distance from cuDNN's results is shown
FUSED = {
    "fused-A1": {},
    "fused-B0": {"ahead": False, "dq_first": True},
    "fused-A1-sweep": {"sweep": True},
    "fused-B0-sweep": {"ahead": False, "dq_first": True, "sweep": True},
    # Neighbouring blocks are neighbours in the last axis.
    "fused-A1-sweep-tiles": {"sweep": True, "order": ("batch", "heads", "tiles")},
    "fused-A1-sweep-longest": {"sweep": True, "order": ("tiles", "heads", "batch")},
    "fused-B1": {"dq_first": True},
    "fused-A1-rows": {"flat": False},
    "fused-A1-byrow": {"by_row": True},
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
MAIN = (
    "cudnn",
    "pair",
    "pair-sweep",
    "fused-A1",
    "fused-B0",
    "fused-A1-byrow",
    "fused-A1-sweep",
    "fused-B0-sweep",
)  # timed on every shape, both ways
VARIANTS = ("cudnn", *OTHERS, *FUSED, "passes")


def attention(variant: str):
    """The variant as a function of q, k, v (and segment ids)."""
    from pallas_kernels.flash_attention import flash_attention, mosaic_gpu

    if variant == "oracle":
        import jax
        import jax.numpy as jnp

        def exact(q, k, v, ids=None):
            with jax.default_matmul_precision("highest"):
                wide = (x.astype(jnp.float32) for x in (q, k, v))
                return flash_attention(*wide, segment_ids=ids, implementation="xla")

        return exact
    if variant in ("cudnn", "xla"):
        return lambda q, k, v, ids=None: flash_attention(q, k, v, segment_ids=ids, implementation=variant)
    options = {**FUSED, **OTHERS}[variant]

    def attend(q, k, v, ids=None):
        return mosaic_gpu.forward(
            q,
            k,
            v,
            causal=True,
            window=None,
            segment_ids=ids,
            scale=q.shape[-1] ** -0.5,
            deterministic=variant not in FUSED,
            options=tuple(options.items()),
        )[0]

    return attend


def programs(variant: str, shape: tuple, ids=None):
    """Compiled forward with residuals, forward alone, and backward alone; and the arguments."""
    import jax
    import jax.numpy as jnp

    batch, tokens, heads, kv_heads, width = shape
    attend = attention(variant)
    keys = jax.random.split(jax.random.key(0), 4)
    sizes = [(batch, tokens, n, width) for n in (heads, kv_heads, kv_heads, heads)]
    q, k, v, dout = (jax.random.normal(key, size, jnp.bfloat16) for key, size in zip(keys, sizes, strict=True))
    dout = dout.astype(jnp.float32) if variant == "oracle" else dout
    lowered = jax.jit(lambda q, k, v: jax.vjp(lambda *x: attend(*x, ids), q, k, v)).lower(q, k, v)
    both = lowered.compile()
    forward = None if ids is not None else jax.jit(lambda q, k, v: attend(q, k, v, ids)).lower(q, k, v).compile()
    pull = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), lowered.out_info[1])
    backward = jax.jit(lambda pull, dout: pull(dout)).lower(pull, dout).compile()
    return both, forward, backward, (q, k, v, dout)


def results(compiled):
    both, _, backward, (q, k, v, dout) = compiled
    out, pull = both(q, k, v)
    return out, *backward(pull, dout)


def error(mine, truth) -> str:
    """Frobenius error of out, dq, dk, dv relative to the other's norm."""
    import jax.numpy as jnp

    def one(a, b):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return float(jnp.linalg.norm((a - b).ravel()) / jnp.linalg.norm(b.ravel()))

    return " ".join(f"{one(a, b):.1e}" for a, b in zip(mine, truth, strict=True))


def tiny() -> None:
    """Shapes that a CPU does, to try this program itself."""
    SHAPES.update({name: (1, 128, 4, 2, shape[-1]) for name, shape in SHAPES.items()})


def child(variant: str, lock: str) -> None:
    """Prints the lines of one variant."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.bench import median_seconds

    def say(*words):
        print(variant, *words, flush=True)

    lengths = jnp.asarray([300, 1, 77, 400, 130])
    ids = jnp.pad(jnp.repeat(jnp.arange(1, 6), lengths, total_repeat_length=908), (0, 92))[None].astype(jnp.int32)
    ragged = [(1, 1000, 8, 2, width) for width in (128, 64)]
    checks = []
    for shape in ragged:
        try:
            checks.append((shape, programs(variant, shape, ids), programs("oracle", shape, ids)))
        except Exception as broken:  # as below
            say(f"ragged D{shape[-1]} does not compile: {type(broken).__name__}: {str(broken)[:300]}")
    compiled = {}
    few = [
        name
        for name in SHAPES
        if variant in (*MAIN, "xla") or variant.startswith("forward") or ("D128" in name and "B4" in name)
    ]
    for name, shape in SHAPES.items():
        if name not in few:
            continue
        try:
            compiled[name] = programs(variant, shape)
        except Exception as broken:  # whatever the compiler says: the others go on
            say(name, f"does not compile: {type(broken).__name__}: {str(broken)[:300]}")
    near = REFERENCE if variant in MAIN[1:] else ()
    reference = {name: programs("cudnn", SHAPES[name]) for name in near}
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        say("STARTS")
        for shape, mine, oracle in checks:
            say(f"ragged D{shape[-1]}: errors to float32 (out dq dk dv)", error(results(mine), results(oracle)))
        for name, program in compiled.items():
            batch, tokens, heads, _, width = SHAPES[name]
            flops = 2 * batch * heads * width * tokens * tokens
            both, forward, backward, (q, k, v, dout) = program
            apart = error(results(program), results(reference[name])) if name in reference else ""
            pull = both(q, k, v)[1]
            ahead, back = median_seconds(forward, q, k, v), float("nan")
            if not variant.startswith("forward"):
                back = median_seconds(backward, pull, dout)
            total = 3.5 * flops / (ahead + back) / 1e12
            say(
                f"{name:<15} forward {ahead * 1e3:7.3f} ms {flops / ahead / 1e12:4.0f}   backward {back * 1e3:7.3f} ms"
                f" {2.5 * flops / back / 1e12:4.0f}   both {total:4.0f} TFLOP/s   {apart}"
            )
            del pull
    jax.clear_caches()


def passes(lock: str) -> None:
    """What the fused backward does beside its kernel: delta, zeros, and dQ's way to 16 bits."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.bench import median_seconds

    batch, tokens, heads, _, width = SHAPES["B4-S4096-D128"]
    out = jax.random.normal(jax.random.key(0), (batch, tokens, heads, width), jnp.bfloat16)
    flat = jnp.ones((batch, heads, 2, tokens, width // 2), jnp.float32)
    rows = flat.reshape(out.shape)
    calls = {
        "delta": (
            jax.jit(lambda o, d: jnp.einsum("BTNH,BTNH->BNT", o, d, preferred_element_type=jnp.float32)),
            out,
            out,
        ),
        "zeros": (jax.jit(lambda: jnp.zeros(flat.shape, jnp.float32)),),
        "flat sums": (
            jax.jit(lambda x: (x * 0.1).astype(jnp.bfloat16).transpose(0, 3, 1, 2, 4).reshape(out.shape)),
            flat,
        ),
        "rows of sums": (jax.jit(lambda x: (x * 0.1).astype(jnp.bfloat16)), rows),
    }
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        print("passes STARTS", flush=True)
        for name, (call, *args) in calls.items():
            print(f"passes {name:<14} {median_seconds(call, *args) * 1e3:.3f} ms at B4-S4096-D128", flush=True)


def main() -> None:
    """Starts a process for each variant and kills those that hang."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("variant", nargs="*", default=VARIANTS)
    parser.add_argument("--seconds", type=float, default=170)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--child", action="store_true")
    parser.add_argument("--lock", default="/tmp/try_attention.lock")
    options = parser.parse_args()
    if options.tiny:
        tiny()
    if options.child:
        passes(options.lock) if options.variant[0] == "passes" else child(options.variant[0], options.lock)
        return
    end = time.monotonic() + options.seconds
    running = {}
    for variant in options.variant:
        log = Path(f"/tmp/try_attention.{variant}.log")
        command = [sys.executable, __file__, variant, "--child", "--lock", options.lock, *["--tiny"] * options.tiny]
        with log.open("w") as file:
            running[variant] = (subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT), log)
    began: dict[str, float] = {}
    while running:
        time.sleep(0.2)
        for variant, (process, log) in list(running.items()):
            text = log.read_text()
            if "STARTS" in text:
                began.setdefault(variant, time.monotonic())
            hangs = variant in began and time.monotonic() - began[variant] > 40
            late = time.monotonic() > end
            if process.poll() is None and not (hangs or late):
                continue
            process.kill()
            process.wait()
            text = log.read_text()
            lines = [line for line in text.splitlines() if line.startswith(variant) and "STARTS" not in line]
            fate = (
                ""
                if process.returncode == 0
                else f"{variant} {'HANGS' if hangs else 'LATE' if late else 'FAILS'}: {text[-600:]}"
            )
            print(*lines, *([fate] if fate else []), sep="\n", flush=True)
            del running[variant]


if __name__ == "__main__":
    main()
