"""`python -m gymjax`: what can be run, and versions and devices for a bug report."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence

import jax

from gymjax.training.command import run_process

ENTRIES = {
    "train CONFIG.yaml": "fine-tune a model: LoRA, QLoRA, freeze or full",
    "chat [CONFIG.yaml]": "talk with a model, streamed",
    "generate [CONFIG.yaml]": "answer a prompt or a file of prompts",
    "evaluate [CONFIG.yaml]": "loss and perplexity on held-out data",
    "preview [CONFIG.yaml]": "each token of a row, and whether it is trained",
    "export [CONFIG.yaml]": "merge an adapter into its base, or copy the adapter out of a run",
    "verify [CONFIG.yaml]": "logits against transformers and PEFT, merged weights against the adapter",
    "plot OUTPUT_DIR": "draw the loss curves of a run",
}
PACKAGES = (
    "gymjax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "transformers", "tokenizers", "safetensors",
    "numpy", "jax-cuda13-plugin", "jax-triton", "nvidia-cudnn-cu13",
)  # fmt: skip
USAGE = """
usage: python -m gymjax

Lists the entries, and prints versions and devices. `python -m gymjax.ENTRY --help` lists the keys of an entry.
"""


def entries() -> str:
    """One line for each entry."""
    return "\n".join(f"  python -m gymjax.{name:<24}{meaning}" for name, meaning in ENTRIES.items())


def versions() -> dict[str, str]:
    """Versions of gymjax, Python and the packages that it computes with; absent ones are left out."""
    found = {"python": platform.python_version(), "system": platform.platform()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found | _driver()


def _driver() -> dict[str, str]:
    """Version of NVIDIA's driver, where there is one."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return {}
    query = [command, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return {"NVIDIA driver": lines[0].strip()} if lines else {}


def devices() -> list[str]:
    """One line for each device: kind, and memory where the device tells it."""
    lines = []
    for device in jax.devices():
        limit = (device.memory_stats() or {}).get("bytes_limit")
        memory = f", {limit / 2**30:.1f} GiB for JAX" if limit else ""
        lines.append(f"{device.platform}:{device.id} {device.device_kind}{memory}")
    return lines


def settings() -> dict[str, str]:
    """Environment variables that change how JAX runs."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(("JAX_", "XLA_"))}


def main(arguments: Sequence[str]) -> None:
    """Prints entries, versions, devices."""
    if arguments:
        raise ValueError(f"python -m gymjax takes no arguments, got {' '.join(arguments)}; entries:\n{entries()}")
    print(f"gymjax fine-tunes and runs language models.\n\n{entries()}\n\nFor a bug report:")
    for name, value in (versions() | settings()).items():
        print(f"  {name:<24}{value}")
    for line in devices():
        print(f"  {'device':<24}{line}")


if __name__ == "__main__":
    run_process(main, lambda: USAGE)
