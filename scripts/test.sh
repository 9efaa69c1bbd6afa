#!/usr/bin/env bash
# All checks of the project in one pytest run: tests with coverage, lint, types and import floors (tests/test_house.py).
# Makes its environments when they are missing.
# Usage: scripts/test.sh [--no-torch] [--setup-only]
#   --no-torch     leave out the tests that compare with torch, transformers, PEFT and bitsandbytes
#   --setup-only   make the environments and stop
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh

torch=yes setup_only=no
for argument in "$@"; do
  case $argument in
    --no-torch) torch=no ;;
    --setup-only) setup_only=yes ;;
    -h | --help) sed -n '2,6s/^# //p' "$0"; exit 0 ;;
    *) echo "unknown option $argument; known: --no-torch --setup-only" >&2; exit 2 ;;
  esac
done

make_venv .venv 12
install .venv gymjax --constraint constraints.txt --editable ".[test,dev]"
smollm2 .venv

# The interop tests run torch in an interpreter of its own, so that gymjax is tested without torch beside it.
if [ "$torch" = no ]; then
  say "interop tests are left out: --no-torch"
  export GYMJAX_TORCH_PYTHON="none (--no-torch)"
elif make_venv .venv-torch 11 && install .venv-torch torch --constraint constraints-torch.txt \
  torch transformers peft bitsandbytes safetensors accelerate gguf; then
  export GYMJAX_TORCH_PYTHON=$PWD/.venv-torch/bin/python
else
  echo "torch could not be installed (see above). Run again with --no-torch to leave the interop tests out." >&2
  exit 1
fi
if [ "$setup_only" = yes ]; then
  say "set-up done"
  exit 0
fi

# Tests run on the CPU on every machine, without network, one process per core.
export PATH=$PWD/.venv/bin:$PATH
export JAX_PLATFORMS=${JAX_PLATFORMS:-cpu} HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
export COVERAGE_CORE=${COVERAGE_CORE:-sysmon}  # Python 3.12's own events: a third less time than tracing
workers=$(python -c 'import os; print(min(16, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()))')

say "lint, types, import floors and tests, $workers at a time"
exec pytest -n "$workers" --dist worksteal --durations 15 --cov --cov-report term --cov-fail-under 85
