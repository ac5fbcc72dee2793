#!/usr/bin/env bash
# Tries one wheel with several PyTorch versions: the operators in autograd and with PyTorch's compiler.
# torch_versions.sh WHEEL PYTHON [VERSION…]; versions that pip cannot install are skipped by name.
. "$(dirname "$0")/proofs.sh"
wheel=$(realpath "${1:?the wheel}")
python=${2:-python3}
shift 2 || shift $#
[ $# -gt 0 ] || set -- 2.9.0 "$(sed -n 's/^torch==//p' "$(dirname "$0")/../../requirements.txt")"

for version in "$@"; do
  environment "$python" "torch==$version" "$wheel" || { skipped "torch $version" "pip cannot install it"; continue; }
  bare python "$(realpath "$(dirname "$0")")/with_torch.py"
  passed "torch $version"
done
