#!/usr/bin/env bash
# Tries a wheel in an empty environment: both commands, a check of every backend, a call from Python.
# empty_environment.sh WHEEL [PYTHON]
. "$(dirname "$0")/proofs.sh"
wheel=$(realpath "${1:?the wheel, such as dist/hopwell-0.1.0-….whl}")

began=$(date +%s)
environment "${2:-python3}" "$wheel"
bare hopwell info
bare hopwell check --quick
echo "from an empty environment to the end of the check: $(($(date +%s) - began)) s; the wheel has $(($(stat -c %s "$wheel") / 1000000)) MB"
bare python -c "$call"
# The second command: a kernel for a GPU that this machine lacks, its report, and an error message.
bare hopwell-emulate sparse_mla_forward --backend emu:sm100 --case h_q_64 --report page.html
grep -q '<svg' "$place/page.html" && tail -c 20 "$place/page.html" | grep -q '</html>'
status=0
bare hopwell-emulate sparse_mla_forward --backend cpu --case h_q_64 --report none.html 2>"$place/said" || status=$?
[ "$status" = 2 ] && [ ! -e "$place/none.html" ] && grep -qF 'hopwell emulate: --backend: cpu not in {emu:sm80,emu:sm90,emu:sm100}' "$place/said"
passed "empty environment"
