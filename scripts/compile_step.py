"""Compiles a whole training step for an H200 on a machine without a GPU: its memory, and every pass over activations.

Usage: python scripts/compile_step.py [--shape llama3.1-8b] [--base nf4] [--remat full] [--batch 4x2048]
           [--finetune full --optim adamw_8bit] [--attention mosaic_gpu] [--passes] [--hlo FILE]

Prints what the program needs by the compiler's own analysis and by gymjax's plan and, with --passes, what each
operation of the loops over layers writes (MiB) with the name that it has in the model. The step is that of
bench_train.py; nothing is run, and tuning is off, so that matrix products may be another kernel on the GPU.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from offline_h200 import device, prepare

prepare()

import jax
from jax.sharding import SingleDeviceSharding
from step_shapes import Setting, add_options, planned_step, setting_of

from gymjax.training.compile import program_peak_gib
from gymjax.training.kernels_ahead import kernels_ahead
from gymjax.training.metrics import GIB
from gymjax.training.plan import Plan, describe
from gymjax.training.workload import abstract_batch
from pallas_kernels import _platform

WIDTHS = {"pred": 1, "u8": 1, "s8": 1, "bf16": 2, "f16": 2, "u16": 2, "f32": 4, "s32": 4, "u32": 4, "s64": 8, "f64": 8}
SMALL = 4  # MiB; what writes less is not listed


H200_BYTES = int(0.75 * 141e9)  # what JAX takes of an H200 by default


def compile_step(setting: Setting) -> tuple[Any, Plan]:
    """The compiled step, from shapes alone, and the plan of its memory."""
    sharding = SingleDeviceSharding(device())
    _platform.compute_capability = lambda: (9, 0)

    plan, _, step = planned_step(setting, H200_BYTES)
    batch = {
        name: jax.ShapeDtypeStruct((1, *leaf.shape), leaf.dtype)
        for name, leaf in abstract_batch(setting.rows, setting.length).items()
    }
    arguments = (plan.work.state, plan.work.frozen, batch)
    placed = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), arguments)
    lowered = step.trace(*placed).lower(lowering_platforms=("cuda",))
    with kernels_ahead(lowered, device()):
        return lowered.compile(), plan


def written_mib(type_: str) -> float:
    """Size of an HLO type, a tuple's parts added up."""
    total = 0.0
    for dtype, dims in re.findall(r"\b([a-z]+\d*)\[([\d,]*)\]", type_):
        size = WIDTHS.get(dtype, 4)
        for dim in filter(None, dims.split(",")):
            size *= int(dim)
        total += size / 2**20
    return total


def passes(text: str) -> list[str]:
    """The operations of every loop body that write more than SMALL, in the order of the schedule."""
    bodies, computation, found = set(re.findall(r"body=%?([\w.\-]+)", text)), None, []
    for line in text.splitlines():
        if header := re.match(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{", line):
            computation = header[1]
            if computation in bodies:
                found.append(f"loop body {computation}")
        operation = re.match(r"\s+(?:ROOT )?%([\w.\-]+) = (.*?) ([\w\-]+)\(", line)
        if computation not in bodies or operation is None:
            continue
        name, type_, kind = operation.groups()
        size = written_mib(type_)
        if kind in ("fusion", "custom-call", "copy", "convert", "reduce", "dynamic-update-slice") and size > SMALL:
            source = re.search(r'op_name="([^"]*)"', line)
            found.append(f"  {size:8.0f}  {name:<42} {source[1][-90:] if source else ''}")
    return found


def main() -> None:
    """Compiles one step and prints its report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser, attention="mosaic_gpu")
    parser.add_argument(
        "--remat", default="full", help="full, selective, offload, none, auto, or names joined by commas"
    )
    parser.add_argument("--batch", default="4x2048", help="rows x tokens")
    parser.add_argument("--unfused", action="store_true", help="with enable_liger_kernel: false")
    parser.add_argument("--passes", action="store_true")
    parser.add_argument("--hlo", type=Path, help="write the compiled program's text there")
    parser.add_argument("--json", action="store_true", help="print the sizes alone, as check_plan.py reads them")
    options = parser.parse_args()
    setting = setting_of(options, options.batch, options.remat, fused=not options.unfused)
    started = time.perf_counter()
    program, plan = compile_step(setting)
    analysis = program.memory_analysis()
    if options.json:
        found = {"plan_gib": plan.memory.peak / GIB, "predicted_gib": program_peak_gib(program), "remat": plan.remat}
        print("RESULT " + json.dumps(found))
        return
    sizes = {
        "arguments": analysis.argument_size_in_bytes,
        "outputs": analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
        "temporaries": analysis.temp_size_in_bytes,
    }
    parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in sizes.items())
    seconds = time.perf_counter() - started
    print(f"{setting.name}: {program_peak_gib(program):.2f} GiB ({parts}); compiled in {seconds:.0f} s")
    print(*describe(plan), sep="\n")
    if options.hlo:
        options.hlo.write_text(program.as_text())
    if options.passes:
        print(*passes(program.as_text()), sep="\n")


if __name__ == "__main__":
    main()
