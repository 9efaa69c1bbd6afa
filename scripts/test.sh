#!/usr/bin/env bash
# All checks of the project: lint, types, import floors and tests with coverage. Makes its environments when they are missing.
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
    -h | --help) sed -n '2,5s/^# //p' "$0"; exit 0 ;;
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

say "lint, types, import floors"
failed=()
check() { echo "-- $*"; "$@" || failed+=("$1"); }
export PATH=$PWD/.venv/bin:$PATH
check ruff check
check ruff format --check
check pyrefly check
check lint-imports

# Tests run on the CPU on every machine. One process per core, each with one compute thread: more would only wait for each other.
export JAX_PLATFORMS=${JAX_PLATFORMS:-cpu} HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export NPROC=1 OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
workers=$(python -c 'import os; print(min(16, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()))')

say "tests, $workers at a time"
status=0
pytest -n "$workers" --dist worksteal --durations 15 --cov --cov-report term --cov-fail-under 85 || status=$?
if [ ${#failed[@]} -gt 0 ]; then
  echo "failed before the tests: ${failed[*]} (see above)" >&2
  status=1
fi
exit "$status"
