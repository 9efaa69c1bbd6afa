"""`python -m gymjax.verify CONFIG.yaml`: logits against transformers and PEFT, merged weights against adapters."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float, Int

from gymjax.adapters.lora import merge
from gymjax.checkpoint.load import load_base, locate, with_own_base
from gymjax.checkpoint.peft import load_adapter
from gymjax.config import Config, ConfigError, load
from gymjax.dtypes import policy
from gymjax.export import adapter_folder, saved_dtype, unpack
from gymjax.models.decoder import Decoder
from gymjax.training.command import flag, keys_text, run_process, split_arguments, take

OWN = {
    "torch": "true (default): compare with transformers and PEFT too, in a Python of their own",
    "tolerance": "largest difference over largest logit (default 1e-4: f32 sums in another order)",
    "tokens": "length of the two random rows that are compared (default 64)",
}
PYTHON = "GYMJAX_TORCH_PYTHON"
_TORCH_SCRIPT = """
import json, sys
import numpy, torch
from transformers import AutoConfig, AutoModelForCausalLM
request = json.loads(sys.argv[1])
options = {"dtype": torch.float32, "local_files_only": True}
options |= {"gguf_file": request["gguf"]} if request["gguf"] else {"use_safetensors": True}
if request["config"]:
    options["config"] = AutoConfig.for_model(request["config"].pop("model_type"), **request["config"])
model = AutoModelForCausalLM.from_pretrained(request["folder"], **options).eval()
tokens = torch.from_numpy(numpy.load(request["tokens"])).long()
def logits(start):
    positions = torch.arange(start, start + tokens.shape[1]).expand_as(tokens)
    return model(tokens, position_ids=positions).logits.float().numpy()
with torch.no_grad():
    numpy.save(request["base"], numpy.stack([logits(start) for start in request["starts"]]))
    if request["adapter"]:
        from peft import PeftModel
        model = PeftModel.from_pretrained(model, request["adapter"]).eval()
        numpy.save(request["adapted"], logits(0))
"""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """How far two computations of the same logits are apart.

    Attributes:
        name: what was compared with what.
        max_difference: largest absolute difference.
        max_logit: largest absolute logit.
        agreement: share of positions whose likeliest token is the same.
        passed: whether the difference is within the tolerance; None where it is only reported.
    """

    name: str
    max_difference: float
    max_logit: float
    agreement: float
    passed: bool | None


def compare(
    name: str, ours: Float[np.ndarray, "B T V"], theirs: Float[np.ndarray, "B T V"], tolerance: float | None
) -> Comparison:
    """Compares logits; tolerance None only reports.

    Raises:
        ValueError: the shapes differ.
    """
    if ours.shape != theirs.shape:
        raise ValueError(f"{name}: logits must have one shape, are {ours.shape} and {theirs.shape}")
    difference = float(np.abs(ours - theirs).max())
    largest = float(np.abs(theirs).max())
    agreement = float((ours.argmax(-1) == theirs.argmax(-1)).mean())
    passed = None if tolerance is None else difference <= tolerance * max(largest, 1.0)
    return Comparison(name, difference, largest, agreement, passed)


def logits(model: Decoder, tokens: Int[np.ndarray, "B T"], start: int = 0) -> Float[np.ndarray, "B T V"]:
    """A model's logits of rows whose first token stands at position `start`, on the host."""
    graphdef, state = nnx.split(model)

    @jax.jit
    def forward(state: nnx.State, tokens, positions):
        model = nnx.merge(graphdef, state)
        return model.logits(model(tokens, positions_BT=positions))

    with jax.default_matmul_precision("highest"):
        return np.asarray(forward(state, tokens, start + np.arange(tokens.shape[1], dtype=np.int32)[None]))


def verify(config: Config, *, torch: bool = True, tolerance: float = 1e-4, tokens: int = 64) -> list[Comparison]:
    """Compares what can be compared for a config, in f32, on two rows of random tokens.

    The base is compared at the first positions and at the last that the model is made for, where RoPE scaling shows.

    Args:
        config: the model section, and export_dtype; the adapter is the one that `export` would merge.
        torch: compare with transformers (and PEFT, with an adapter) too.
        tolerance: largest difference over largest logit. At the last positions it is ten times that: one bit of an f32
            frequency, times 131,072 positions, is an angle of up to 1e-3.
        tokens: length of the rows.

    Raises:
        ConfigError: neither torch nor an adapter: nothing to compare.
        FileNotFoundError: a file, or the interpreter with torch, is missing.
    """
    adapter = adapter_folder(config)
    if not torch and adapter is None:
        raise ConfigError("torch=false and no adapter: nothing to compare; give adapter_name_or_path")
    python = torch_python() if torch else None
    config = dataclasses.replace(config, model=with_own_base(config.model, adapter))
    path = locate(config.model)
    dense = dataclasses.replace(config.model, quantization_bit=None)
    loaded = load_base(dense, policy("fp32"), cutoff_len=config.data.cutoff_len)
    model = loaded.model
    length = min(tokens, model.cfg.max_positions)
    starts = (0, model.cfg.max_positions - length)
    rows = np.random.default_rng(0).integers(0, model.cfg.vocab_size, (2, length), dtype=np.int32)
    found: list[Comparison] = []
    theirs_adapted = None
    if python is not None:
        changed = loaded.hf_config if config.model.rope_scaling else None
        theirs, theirs_adapted = torch_logits(python, path, rows, adapter, starts=starts, hf_config=changed)
        found.append(compare("base in gymjax; in transformers", logits(model, rows), theirs[0], tolerance))
        name = f"base at positions {starts[1]} to {model.cfg.max_positions - 1}; in transformers"
        found.append(compare(name, logits(model, rows, starts[1]), theirs[1], 10 * tolerance))
    if adapter is not None:
        load_adapter(model, adapter)
        adapted = logits(model, rows)
        if theirs_adapted is not None:
            found.append(compare("adapter in gymjax; in PEFT", adapted, theirs_adapted, tolerance))
        found += _merged(config, path, model, adapter, adapted, rows, tolerance)
    return found


def _merged(
    config: Config, base: Path, model: Decoder, adapter: Path, adapted, rows, tolerance: float
) -> list[Comparison]:
    """The merged model against the adapter; with a quantized base also against the adapter over that."""
    unpack(model, jnp.dtype("float32"))
    merge(model)
    merged = logits(model, rows)
    found = [compare("merged in f32; adapter", merged, adapted, tolerance)]
    dtype = saved_dtype(config, base)
    rounded = jax.tree.map(lambda leaf: leaf.astype(dtype).astype(leaf.dtype), nnx.state(model))
    nnx.update(model, rounded)
    merged = logits(model, rows)
    found.append(compare(f"merged, rounded to {dtype.name}; adapter", merged, adapted, None))
    if config.model.quantization_bit:
        packed = load_base(config.model, policy("fp32"), cutoff_len=config.data.cutoff_len).model
        load_adapter(packed, adapter)
        name = f"merged, rounded to {dtype.name}; adapter over the 4-bit base"
        found.append(compare(name, merged, logits(packed, rows), None))
    return found


def torch_python() -> str:
    """Interpreter with torch and transformers: $GYMJAX_TORCH_PYTHON, .venv-torch, or this one.

    Raises:
        FileNotFoundError: there is none.
    """
    named = os.environ.get(PYTHON)
    local = Path(".venv-torch/bin/python")
    if named or local.is_file():
        python = Path(named or local)
        if not python.is_file():
            raise FileNotFoundError(f"{PYTHON}: {python} does not exist; give a Python that has torch and transformers")
        return str(python)
    if importlib.util.find_spec("torch") is not None:
        return sys.executable
    raise FileNotFoundError(
        f"verify needs a Python that has torch and transformers: set {PYTHON} to it, make .venv-torch with "
        "`bash scripts/test.sh --setup-only`, or give torch=false to compare only merged weights with the adapter"
    )


def torch_logits(
    python: str,
    path: Path,
    tokens: Int[np.ndarray, "B T"],
    adapter: Path | None = None,
    *,
    starts: Sequence[int] = (0,),
    hf_config: Mapping[str, Any] | None = None,
) -> tuple[Float[np.ndarray, "X B T V"], Float[np.ndarray, "B T V"] | None]:
    """Logits of transformers, and of PEFT where there is an adapter, in f32, computed by another interpreter.

    Args:
        python: that interpreter.
        path: model folder or .gguf file.
        tokens: rows.
        adapter: PEFT folder.
        starts: positions of the rows' first token; the base is computed for each.
        hf_config: what to read in place of the folder's config.json.

    Raises:
        ValueError: that interpreter failed; the message has its last line.
    """
    folder, gguf = (path.parent, path.name) if path.suffix == ".gguf" else (path, None)
    with tempfile.TemporaryDirectory() as temporary:
        files = {name: str(Path(temporary) / f"{name}.npy") for name in ("tokens", "base", "adapted")}
        np.save(files["tokens"], tokens)
        request = {"folder": str(folder), "gguf": gguf, "adapter": adapter and str(adapter), **files}
        request |= {"starts": list(starts), "config": hf_config}
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        ended = subprocess.run(
            [python, "-c", _TORCH_SCRIPT, json.dumps(request)], capture_output=True, text=True, env=environment
        )
        if ended.returncode:
            lines = ended.stderr.strip().splitlines() or [f"exit status {ended.returncode}"]
            raise ValueError(f"{python} could not compute transformers' logits of {path}: {lines[-1]}")
        return np.load(files["base"]), np.load(files["adapted"]) if adapter else None


def report(found: Sequence[Comparison]) -> str:
    """A table of comparisons."""
    width = max(len(row.name) for row in found)
    verdict = {True: "passed", False: "FAILED", None: "reported only"}
    lines = [f"{'f32 logits compared':<{width}}  max difference  max logit  same argmax"]
    lines += [
        f"{row.name:<{width}}  {row.max_difference:14.3g}  {row.max_logit:9.3g}  {row.agreement:11.2%}"
        f"  {verdict[row.passed]}"
        for row in found
    ]
    return "\n".join(lines)


def usage() -> str:
    """Text of --help."""
    return f"""
usage: python -m gymjax.verify [CONFIG.yaml] [key=value ...]

Compares logits in f32: the base with transformers, the adapter with PEFT, the merged weights with the adapter. Exit
status 1 when one is beyond the tolerance. Keys:
{keys_text(("model",), OWN)}
 data: cutoff_len (with rope_scaling)   train: output_dir (its adapter, where adapter_name_or_path is not given)
 export: export_dtype
"""


def main(arguments: Sequence[str]) -> int:
    """Compares and prints a table; 1 when a comparison failed."""
    path, overrides = split_arguments(arguments)
    own, overrides = take(overrides, OWN)
    try:
        tolerance, tokens = float(own.get("tolerance", "1e-4")), int(own.get("tokens", "64"))
    except ValueError as error:
        raise ConfigError(f"command line: tolerance and tokens must be numbers ({error})") from None
    if not 0 < tolerance < math.inf or tokens < 1:
        raise ConfigError(f"command line: tolerance and tokens must be above 0, are {tolerance:g} and {tokens}")
    found = verify(load(path, overrides), torch=flag(own, "torch", default=True), tolerance=tolerance, tokens=tokens)
    print(report(found))
    return int(any(row.passed is False for row in found))


if __name__ == "__main__":
    run_process(main, usage)
