#!/usr/bin/env bash
# Installs a wheel into an empty environment and runs it as a stranger would: no compiler on the PATH, nothing of the sources, no
# variable of this shell. run.sh WHEEL [PYTHON]
set -euo pipefail
wheel=$(realpath "${1:?the wheel, such as dist/hopwell-0.1.0-….whl}")
python=${2:-python3}
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT

"$python" -m venv "$place/venv"
began=$(date +%s)
"$place/venv/bin/python" -m pip install --quiet --disable-pip-version-check "$wheel"
bare() { (cd "$place" && env -i PATH="$place/venv/bin" HOME="$place" "$@"); }
bare hopwell info
bare hopwell check --quick
echo "from pip install to the end of the check: $(($(date +%s) - began)) s; the wheel has $(($(stat -c %s "$wheel") / 1000000)) MB"
bare python -c '
import numpy as np, hopwell
q, kv = np.ones((2, 4, 24), np.float32), np.ones((9, 24), np.float32)
out, _, lse = hopwell.sparse_mla_forward(q, kv, np.zeros((2, 3), np.int32), 1.0, 16)
assert out.shape == (2, 4, 16) and np.allclose(out, 1) and hopwell.backends()
assert "torch" not in __import__("sys").modules'
echo "wheel test: 3 passed, 0 failed"
