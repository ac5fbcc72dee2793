# Functions for the proofs of a wheel; to be sourced. A proof ends with `passed NAME` or `skipped NAME WHY`, and fails by `set -e`.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf --one-file-system "$place"' EXIT

say() { echo "$1 …" >&2; }  # before a step that takes more than two seconds
passed() { echo "passed: $1"; }
skipped() { echo "skipped: $1: $2"; }

# A call from Python with the wheel's module and numpy: the result is right, and PyTorch is not loaded.
call='
import numpy as np, hopwell
q, kv = np.ones((2, 4, 24), np.float32), np.ones((9, 24), np.float32)
out, _, lse = hopwell.sparse_mla_forward(q, kv, np.zeros((2, 3), np.int32), 1.0, 16)
assert out.shape == (2, 4, 16) and np.allclose(out, 1) and hopwell.backends()
assert "torch" not in __import__("sys").modules'

# environment PYTHON PACKAGE…: makes an empty virtual environment, $place/venv, and installs these packages.
environment() {
  local python=$1
  shift
  say "pip install ${*##*/}"
  rm -rf "$place/venv"
  "$python" -m venv "$place/venv"
  "$place/venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile "$@" 2>"$place/pip.log" ||
    { cat "$place/pip.log" >&2; return 1; }
}

# Runs a program of that environment as another user would: no compiler on the PATH, no variable of this shell.
bare() { (cd "$place" && env -i PATH="$place/venv/bin" HOME="$place" "$@"); }
