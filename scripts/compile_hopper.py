"""Compiles the Hopper kernels on a machine without a GPU: registers, spills, and what each inner loop consists of.

Usage: python scripts/compile_hopper.py [NAME ...]        (kernels whose name begins so; default all)

The compiler is that of offline_h200.py. Nothing is run: what compiles here is checked and timed on a GPU by
scripts/check_attention.py, scripts/check_nf4.py, scripts/check_grouped_matmul.py and scripts/bench_peers.py.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import itertools
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxlib.mlir import ir

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from offline_h200 import mosaic_environment, tools

from pallas_kernels._tiles import Tiles
from pallas_kernels.flash_attention import mosaic_gpu
from pallas_kernels.grouped_matmul import mosaic_gpu as grouped
from pallas_kernels.linear_cross_entropy.mosaic_gpu_codes import gradients
from pallas_kernels.linear_cross_entropy.mosaic_gpu_exponentials import exponentials
from pallas_kernels.lora_linear import mosaic_gpu as narrow
from pallas_kernels.lora_linear.mosaic_gpu_product import adapted_product, adapted_product_and_low
from pallas_kernels.nf4_linear import mosaic_gpu as nf4
from pallas_kernels.nf4_linear.cases import random_weight
from pallas_kernels.nf4_linear.mosaic_gpu_turned_tiles import TurnedTiles
from pallas_kernels.rms_norm import mosaic_gpu as norm
from pallas_kernels.rope import mosaic_gpu as rope
from pallas_kernels.swiglu import mosaic_gpu as gate_kernel

COUNTED = ("HGMMA", "MUFU", "FFMA", "FMUL", "FADD", "FMNMX", "F2FP", "LDS", "STS", "STSM", "LDL", "STL", "R2UR", "BAR")
COUNTED_STRAIGHT = ("SHFL", "FMUL", "FADD", "F2FP", "SHF", "LOP3", "IMAD", "LDG", "STG", "BAR", "LDL", "STL")


def modules(function, *args) -> list[bytes]:
    """The Mosaic modules of a function lowered for CUDA, in the order of the program."""
    lowered: Any = jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).compiler_ir("stablehlo")
    found = []

    def look(op):
        attributes = op.operation.attributes
        if op.operation.name == "stablehlo.custom_call" and "mosaic_gpu" in str(attributes["call_target_name"]):
            found.append(bytes(attributes["mhlo.backend_config"]["module"].value_bytes))
        return ir.WalkResult.ADVANCE

    lowered.operation.walk(look)
    return found


def assembly(module: bytes) -> str:
    """PTX of a Mosaic module, by a process of its own: the plugin's compiler does not survive its host's LLVM."""
    environment = mosaic_environment() | {"LD_LIBRARY_PATH": str(tools()), "MOSAIC_GPU_DUMP_PTX": "1"}
    with tempfile.NamedTemporaryFile() as file:
        file.write(module)
        file.flush()
        command = [sys.executable, __file__, "--module", file.name]
        done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    if ".version" not in done.stdout:
        raise RuntimeError(f"Mosaic made no PTX: {done.stderr[-2000:]}")
    return done.stdout[done.stdout.index(".version") :]


def print_ptx(path: str) -> None:
    """Compiles one module in this process; the plugin prints its PTX."""
    plugin = ctypes.CDLL(str(tools() / "jax_plugins" / "xla_cuda13" / "xla_cuda_plugin.so"))
    plugin.MosaicGpuCompile.argtypes = [ctypes.c_char_p, ctypes.c_int]
    plugin.MosaicGpuCompile.restype = ctypes.c_void_p
    module = Path(path).read_bytes()
    plugin.MosaicGpuCompile(module, len(module))
    ctypes.CDLL(None).fflush(None)
    os._exit(0)  # its destructors are what does not survive


def report(ptx: str) -> list[str]:
    """ptxas' words on a program, and each inner loop with tensor-core instructions: its length and what is in it.

    Of a program without a loop, all of it.
    """
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(ptx)
        ptxas, nvdisasm = (str(next(tools().glob(f"nvidia/*/bin/{name}"))) for name in ("ptxas", "nvdisasm"))
        command = [ptxas, "-v", "-O3", "-arch=sm_90a", str(source), "-o", str(binary)]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
        listing = subprocess.run([nvdisasm, "-c", str(binary)], check=True, capture_output=True, text=True).stdout
    numbers = re.findall(r"Used \d+ registers|\d+ bytes spill \w+", said)
    warnings = [line for line in said.splitlines() if "warning" in line or "serialized" in line]
    return [", ".join(numbers), *warnings, *(f"  {line}" for line in loops(listing))]


def loops(listing: str) -> list[str]:
    """The innermost loops of a disassembly that use the tensor cores, or the whole of one without."""
    labels, code, found = {}, [], []
    for line in listing.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        elif instruction := re.search(r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+\s+)?(.*?);", line):
            code.append(instruction[1])
            back = re.search(r"BRA.*`\((\.L_x_\d+)\)", instruction[1])
            if back and back[1] in labels and labels[back[1]] < len(code) - 1:
                found.append((labels[back[1]], len(code)))
    if not _products(code, (0, len(code))):
        return [_counts("straight line", code, COUNTED_STRAIGHT)]
    inner = [a for a in found if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in found if _products(code, b))]
    return [_counts("loop", code[a:b], COUNTED) for a, b in inner if _products(code, (a, b))]


def _counts(name: str, code: list[str], counted: tuple[str, ...]) -> str:
    counts = collections.Counter(instruction.split()[0].split(".")[0] for instruction in code)
    return f"{name} of {len(code)}: " + ", ".join(f"{n} {counts[n]}" for n in counted if counts[n])


def _products(code: list[str], span: tuple[int, int]) -> bool:
    return any(instruction.startswith("HGMMA") for instruction in code[span[0] : span[1]])


def attention(width: int, deterministic: bool, softcap: float | None):
    """Gradients of attention at a length of several tiles, and their arguments."""
    q, k = (jax.ShapeDtypeStruct((1, 1024, heads, width), jnp.bfloat16) for heads in (8, 2))
    options = {"causal": True, "window": None, "segment_ids": None, "scale": width**-0.5}
    attend = functools.partial(mosaic_gpu.forward, deterministic=deterministic, softcap=softcap, **options)
    return (lambda q, k, v, dout: jax.vjp(lambda *qkv: attend(*qkv)[0], q, k, v)[1](dout)), (q, k, k, q)


def attention_kernels():
    """Name, function and arguments of each attention kernel's program, and which of its modules are new."""
    for width in mosaic_gpu.WIDTHS:
        for deterministic in (True, False) if width in mosaic_gpu.FUSED_WIDTHS else (True,):
            for softcap in (None, 30.0):
                names = ("forward", "dkv", "dq") if deterministic else ("forward", "fused")
                cases = [f"attention-D{width}{'-softcap' if softcap else ''}-{name}" for name in names]
                yield cases, *attention(width, deterministic, softcap), 0 if deterministic else 1  # its forward is old


def sum_of_three(dy, w, low, down, sizes):
    """The gradient of what two projections with adapters read."""
    return grouped.products((dy, dy, low), (w, w, down), sizes, transposed=False)


def grouped_kernels():
    """Likewise of grouped products: the product and both gradients."""
    for rows, groups, width, out in ((65536, 64, 2048, 1024), (16384, 8, 4096, 192), (65536, 64, 2048, 64)):
        x, dy = (jax.ShapeDtypeStruct((rows, size), jnp.bfloat16) for size in (width, out))
        w = jax.ShapeDtypeStruct((groups, out, width), jnp.bfloat16)
        sizes = jax.ShapeDtypeStruct((groups,), jnp.int32)
        name = f"grouped-D{width}-F{out}"
        yield [f"{name}-forward"], grouped.forward, (x, w, sizes), 0
        yield [f"{name}-dx"], grouped.backward_x, (dy, w, sizes), 0
        low, down = (
            jax.ShapeDtypeStruct((rows, 64), jnp.bfloat16),
            jax.ShapeDtypeStruct((groups, 64, width), jnp.bfloat16),
        )
        yield [f"{name}-sum"], sum_of_three, (dy, w, low, down, sizes), 0
        for dtype in (jnp.bfloat16, jnp.float32):
            case = f"{name}-dw{'' if dtype == jnp.bfloat16 else '-f32'}"
            yield [case], functools.partial(grouped.backward_w, dtype=dtype), (x, dy, sizes), 0


def gated_kernels():
    """Likewise of products that are gated before they leave, and of their gradient."""
    for rows, groups, width, out in ((131072, 64, 2048, 1024), (65536, 128, 2048, 768)):
        x, low, hidden = (jax.ShapeDtypeStruct((rows, size), jnp.bfloat16) for size in (width, 64, out))
        w, more, a, down = (
            jax.ShapeDtypeStruct((groups, *size), jnp.bfloat16)
            for size in ((out, width), (out, 64), (64, out), (width, out))
        )
        weight, sizes = jax.ShapeDtypeStruct((rows,), jnp.float32), jax.ShapeDtypeStruct((groups,), jnp.int32)
        for wide in (width, out):
            shapes = (rows, wide), (groups, wide, 16), (rows, 16)
            args = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
            yield [f"gated-narrow-N{wide}"], grouped.narrow, (*args, sizes), 0
        name = f"gated-D{width}-F{out}"
        yield [f"{name}-forward"], grouped.gated, ((x, low), (w, more), (w, more), weight, sizes), 0
        yield [f"{name}-backward"], grouped.gated_backward, ((x, low), (down, a), hidden, hidden, weight, sizes), 0


def narrow_kernels():
    """Likewise of products with adapters in one pass."""
    for width, rank in ((14336, 16), (4096, 48), (4096, 64)):
        x, factor, low = (
            jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8192, width), (rank, width), (8192, rank))
        )
        both = functools.partial(narrow.one_pass, tiles=narrow.NarrowTiles())
        yield [f"narrow-N{width}-R{rank}"], both, (x, factor, low), 0


def adapted_kernels():
    """Likewise of products with an adapter's in them: its low product made there, given, and both transposed."""
    x, w, up, low, down, dy = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        for shape in ((8192, 4096), (14336, 4096), (14336, 64), (8192, 128), (128, 4096), (8192, 14336))
    )
    yield ["adapted-and-low"], adapted_product_and_low, (x, w, up, down), 0
    yield ["adapted-forward"], adapted_product, (x, w, up, low), 0
    yield ["adapted-dx"], functools.partial(adapted_product, transpose=True), (dy, w, down, low), 0


def nf4_kernels():
    """Likewise of the kernels that decode weights of Llama-3.1-8B."""
    for shape in ((14336, 4096), (4096, 14336)):
        w = jax.eval_shape(lambda shape=shape: random_weight(jax.random.key(0), shape))
        packed = w.codes, w.absmax, w.nested_absmax, w.offset
        name = f"O{shape[0]}-I{shape[1]}"
        unpack = functools.partial(nf4.dequantize, shape=shape, dtype=jnp.bfloat16)
        yield [f"nf4-dequantize-{name}"], unpack, packed, 0
        sizes = (
            *(TurnedTiles(), TurnedTiles(unit=None), TurnedTiles(unit=None, parts=2)),
            TurnedTiles(unit=None, parts=4, pair=False),
            TurnedTiles(rows=128, stages=8, unit=None, parts=4, pair=False),
        )
        for transpose, tiles in itertools.product((False, True), sizes):
            x = jax.ShapeDtypeStruct((512, shape[0] if transpose else shape[1]), jnp.bfloat16)

            def product(x, *packed, shape=shape, transpose=transpose, tiles=tiles):
                return nf4.fused(x, packed, shape, transpose=transpose, tiles=tiles)

            parted = f"{tiles.parts}-parts-of-{tiles.rows}" if tiles.parts > 1 else tiles.unit or "whole"
            yield [f"nf4-{'dx' if transpose else 'forward'}-{parted}-{name}"], product, (x, *packed), 0


def norm_kernels():
    """Likewise of normalisation: forward with room behind, gradient of x alone and with what is added to it."""
    for width, dtype in (
        (128, jnp.bfloat16),
        (896, jnp.float32),
        (1024, jnp.bfloat16),
        (3584, jnp.bfloat16),
        (4096, jnp.bfloat16),
        (5120, jnp.float32),
        (8192, jnp.float32),
    ):
        x = jax.ShapeDtypeStruct((8192, width), jnp.bfloat16)
        scale, rrms = jax.ShapeDtypeStruct((width,), dtype), jax.ShapeDtypeStruct((8192, 1), jnp.float32)
        name = f"norm-D{width}{'' if dtype == jnp.bfloat16 else '-f32-scale'}"
        yield [f"{name}-forward"], lambda x, scale: norm.forward(x, scale, 1e-6, 64), (x, scale), 0
        yield [f"{name}-added"], lambda x, scale: norm.forward_added(x, x, scale, 1e-6, 64), (x, scale), 0
        for more, trained in (("dx", False), ("dscale", True)):
            backward = functools.partial(norm.backward, trained=trained)
            yield [f"{name}-{more}"], backward, (x, scale, rrms, x), 0
            yield [f"{name}-{more}-residual"], backward, (x, scale, rrms, x, x), 0


def gate_kernels():
    """Likewise of the gated activation."""
    gate = jax.ShapeDtypeStruct((8192, 14336), jnp.bfloat16)
    yield ["gate-F14336"], gate_kernel.forward, (gate, gate), 0


def rope_kernels():
    """Likewise of rotation, both ways: halves of whole heads, neighbours, and heads that turn in part."""
    whole = ((32, 8, 128), (32, 2, 128), (32, 32, 128), (14, 2, 64), (16, 8, 256))
    forms = [(*case, case[-1], interleaved) for case in whole for interleaved in (False, True)]
    forms += [(32, heads, 128, 64, interleaved) for heads in (32, 2) for interleaved in (False, True)]
    for (heads, kv_heads, width, turned, interleaved), back in itertools.product(forms, (False, True)):
        q, k = (jax.ShapeDtypeStruct((4, 2048, count, width), jnp.bfloat16) for count in (heads, kv_heads))
        table = jax.ShapeDtypeStruct((4, 2048, turned // 2), jnp.float32)
        case = f"rope-N{heads}-K{kv_heads}-D{width}{f'-R{turned}' if turned < width else ''}"
        case += f"{'-interleaved' if interleaved else ''}-{'backward' if back else 'forward'}"
        yield [case], functools.partial(rope.rotate, back=back, interleaved=interleaved), (q, k, table, table), 0


def loss_kernels():
    """Likewise of the head's product that gives exponentials or codes, and of codes that become gradients."""
    for width, vocabulary in ((4096, 128256), (896, 151936)):
        x, head = (jax.ShapeDtypeStruct((rows, width), jnp.bfloat16) for rows in (1024, vocabulary))
        labels, reference = (jax.ShapeDtypeStruct((1024,), dtype) for dtype in (jnp.int32, jnp.float32))
        for name, options in (("", {}), ("-coded", {"coded": True}), ("-alone", {"tiles": Tiles()})):
            product = functools.partial(exponentials, scale=1.0, **options)
            yield [f"loss-product-V{vocabulary}{name}"], product, (x, head, labels, reference), 0
        codes = jax.ShapeDtypeStruct((1024, vocabulary), jnp.int16)
        yield [f"loss-codes-V{vocabulary}"], gradients, (codes, labels, reference, reference), 0


def main(wanted: list[str]) -> None:
    """Prints the report of every kernel of every case."""
    for cases, function, args, skip in itertools.chain(
        *(attention_kernels(), grouped_kernels(), gated_kernels(), narrow_kernels(), adapted_kernels()),
        *(nf4_kernels(), norm_kernels()),
        *(gate_kernels(), rope_kernels(), loss_kernels()),
    ):
        if wanted and not any(case.startswith(name) for case in cases for name in wanted):
            continue
        for case, module in list(zip(cases, modules(function, *args), strict=True))[skip:]:
            if not wanted or any(case.startswith(name) for name in wanted):
                print(case, *report(assembly(module)), sep="\n  ", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--module"]:
        print_ptx(sys.argv[2])
    main(sys.argv[1:])
