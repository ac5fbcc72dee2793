#!/usr/bin/env bash
# A wheel in an empty environment: the command, a check of every backend, a call from Python, the manual page.
# empty_environment.sh WHEEL [PYTHON]
. "$(dirname "$0")/proofs.sh"
wheel=$(realpath "${1:?the wheel, such as dist/hopwell-0.1.0-….whl}")

began=$(date +%s)
environment "${2:-python3}" "$wheel"
bare hopwell info
bare hopwell check --quick
echo "from an empty environment to the end of the check: $(($(date +%s) - began)) s; the wheel has $(($(stat -c %s "$wheel") / 1000000)) MB"
bare python -c "$call"
for page in man/man1/hopwell.1 bash-completion/completions/hopwell zsh/site-functions/_hopwell fish/vendor_completions.d/hopwell.fish; do
  [ -s "$place/venv/share/$page" ]
done
passed "empty environment"
