#!/usr/bin/env bash
# Tries a wheel as other users would. Each proof is a script in this folder that also runs alone. run.sh WHEEL [PYTHON]
# The proofs with PyTorch download gigabytes, so torch_versions.sh is not included (make test-wheel-torch runs it).
set -euo pipefail
wheel=$(realpath "${1:?the wheel, such as dist/hopwell-0.1.0-….whl}")
python=${2:-python3}
cd "$(dirname "$0")"
log=$(mktemp)
trap 'rm -f "$log"' EXIT

"$python" machine_code.py "$wheel" | tee -a "$log"
./empty_environment.sh "$wheel" "$python" | tee -a "$log"
./clean_system.sh "$wheel" | tee -a "$log"
./old_processor.sh "$wheel" "$python" | tee -a "$log"
echo "wheel test: $(grep -c '^passed: ' "$log" || true) passed, $(grep -c '^skipped: ' "$log" || true) skipped, 0 failed"
sed -n 's/^skipped: /  skipped: /p' "$log"
