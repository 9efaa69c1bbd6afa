"""Times the torch stack rung by rung for bench_ladder.py: transformers + PEFT + bitsandbytes, loaded once.

Usage: python scripts/peer_ladder.py FOLDER nf4|bf16 ROWSxLENGTH STEPS      FOLDER as peer_step.py makes it

Rungs: eager attention; SDPA, which is flash attention 2 here; Liger's kernels on top. Prints one line "RESULT {...}"
for each, with its name, or the error of one that failed.
"""

import json
import sys
from collections.abc import Iterator

from peer_step import load_hf, time_step


def rungs(model) -> Iterator[str]:
    """Changes the loaded model into one rung after the other and gives their names."""
    inner = model.get_base_model()
    for name, attention in {"hf-eager": "eager", "hf-sdpa": "sdpa"}.items():
        inner.set_attn_implementation(attention)
        yield name
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama(model=inner)
    yield "hf-liger"


def main(arguments: list[str]) -> None:
    """Times each rung."""
    folder, base, batch, steps = arguments
    rows, length = map(int, batch.split("x"))
    model = load_hf(folder, base, length)
    for name in rungs(model):
        try:
            result = time_step(model, rows, length, int(steps))
        except RuntimeError as error:  # too little memory; the rungs above need less
            result = {"error": str(error)[:200]}
            model.zero_grad(set_to_none=True)
        print("RESULT " + json.dumps({"name": name} | result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
