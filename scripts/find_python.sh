#!/usr/bin/env bash
# Prints the path of a CPython >= 3.MINOR that can make virtual environments.
# Usage: scripts/find_python.sh [MINOR]     (default 12; the lowest acceptable version is preferred: it is the tested one)
set -euo pipefail

minor=${1:-12}
newest=14

# Does this command run, is it at least 3.minor, and can it make a virtual environment with pip in it?
usable() {
  "$1" - "$minor" >/dev/null 2>&1 <<'PY'
import sys
import ensurepip, venv
sys.exit(sys.version_info < (3, int(sys.argv[1])) or sys.implementation.name != "cpython")
PY
}

candidates() {
  local version root
  for version in $(seq "$minor" "$newest"); do
    command -v "python3.$version" || true
    for root in "${PYENV_ROOT:-$HOME/.pyenv}/versions" /opt/homebrew/bin /usr/local/bin; do
      # pyenv's versions are folders; a shim may exist for a version that is not active
      for path in "$root/3.$version".*/bin/python "$root/python3.$version"; do
        if [ -x "$path" ]; then echo "$path"; fi
      done
    done
  done
  command -v python3 || true
  command -v python || true
  if command -v uv >/dev/null; then uv python find ">=3.$minor" 2>/dev/null || true; fi
}

while read -r python; do
  if usable "$python"; then
    echo "$python"
    exit 0
  fi
done < <(candidates)

cat >&2 <<EOF
No Python >= 3.$minor with the venv and ensurepip modules was found (looked at python3.$minor to python3.$newest on the PATH,
pyenv's versions, python3, and uv). Install one, then run this again:
  Ubuntu, Debian:  sudo apt install python3.$minor python3.$minor-venv
  Fedora:          sudo dnf install python3.$minor
  macOS:           brew install python@3.$minor
  without root:    uv python install 3.$minor      or      pyenv install 3.$minor
EOF
exit 1
