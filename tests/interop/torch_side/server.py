"""Answers the interop tests' questions in an interpreter that has torch, transformers, PEFT and bitsandbytes.

One JSON request a line on stdin, {"call": name, "args": {...}}; one JSON answer a line on stdout. Arrays travel as .npy
files. Importing torch takes seconds, so one process answers many questions.
"""

import contextlib
import json
import sys
import traceback

answers = sys.stdout
sys.stdout = sys.stderr  # what libraries print must not mix with the answers

import adapters  # noqa: E402
import models  # noqa: E402
import optimizers  # noqa: E402
import quantized  # noqa: E402
import rope  # noqa: E402
import torch  # noqa: E402

CALLS = {
    function.__name__: function
    for module in (models, quantized, adapters, rope, optimizers)
    for function in module.CALLS
}


def answer(line):
    request = json.loads(line)
    try:
        return {"result": CALLS[request["call"]](**request["args"])}
    except Exception:
        return {"error": traceback.format_exc()}


if __name__ == "__main__":
    torch.set_num_threads(1)  # torch's sums depend on the number of threads
    with contextlib.suppress(KeyboardInterrupt):
        for line in sys.stdin:
            print(json.dumps(answer(line)), file=answers, flush=True)
