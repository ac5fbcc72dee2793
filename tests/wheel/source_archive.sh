#!/usr/bin/env bash
# Builds the source archive as pip does for another user, in folders of its own: first without a CUDA compiler on the PATH, then
# with this machine's one. source_archive.sh ARCHIVE [PYTHON]; takes as long as the builds. NVCC=0 omits the second build.
. "$(dirname "$0")/proofs.sh"
archive=$(realpath "${1:?the archive, such as dist/hopwell-0.1.0.tar.gz}")
python=${2:-python3}

try() {  # NAME EXPECTED-INFO-OF-SM90: installs, runs info, compares
  local began
  began=$(date +%s)
  environment "$python" "$archive" || exit 1
  bare hopwell info | tee "$place/info"
  grep -q "^sm90 *$2" "$place/info"
  bare hopwell check --quick | tail -1
  bare python -c "$call"
  echo "$1: $(($(date +%s) - began)) s"
  passed "$1"
}

without=$(tr ':' '\n' <<<"$PATH" | while read -r folder; do [ -x "$folder/nvcc" ] || echo "$folder"; done | paste -sd:)
if PATH=$without command -v c++ >/dev/null; then
  PATH=$without try "source archive without nvcc" "not in this build"
else
  skipped "source archive without nvcc" "the compiler lies beside nvcc"
fi
if [ "${NVCC:-1}" != 0 ] && command -v nvcc >/dev/null; then
  try "source archive with nvcc" "\(ready\|no such device\)"
else
  skipped "source archive with nvcc" "no nvcc, or not asked for"
fi
