#!/bin/sh
# Certifies the emulator against the GPU of this machine: certify.sh [report.json]
#
# Records every case on the emulator, runs the same kernels on the GPU, compares, writes the report. Needs g++ and nvcc.
# Set RECORDED to a file that `certify.sh --record FILE` wrote elsewhere, or DEVICE to a program that --device built, to
# save building them here, and COMMIT where there is no repository. CERTIFY_ONLY=text takes the cases whose names have the
# text, on both sides (their report is no record). Builds into $BUILD (default build-certify).
set -eu
here=$(cd "$(dirname "$0")" && pwd)
source=$here/../../src
build=${BUILD:-build-certify}
kernels="sm80 sm90 wgmma refused"
mkdir -p "$build"

record() {  # record FILE
  for file in "$source"/arch/emu/*.cpp "$here/certify/main.cpp"; do
    printf '%s\n' "-O2 $file"
  done >"$build/files"
  for file in $kernels; do
    printf '%s\n' "-O2 -g1 -fsanitize=thread -xc++ $here/certify/$file.cu"
  done >>"$build/files"
  rm -f "$build"/*.o
  number=0
  while read -r arguments; do
    number=$((number + 1))
    printf '%s\n' "-std=c++20 -I$source -I$here/certify $arguments -c -o $build/$number.o"
  done <"$build/files" | xargs -P "${JOBS:-$(nproc)}" -L 1 "${CXX:-g++}"
  "${CXX:-g++}" "$build"/*.o -o "$build/certify_emulator"
  "$build/certify_emulator" record "$1"
}

device() {  # device PROGRAM
  set -- "$1" "$here/certify/main.cpp"
  for file in $kernels; do
    set -- "$@" "$here/certify/$file.cu"
  done
  program=$1
  shift
  nvcc -std=c++20 -O2 -gencode arch=compute_90a,code=sm_90a -I"$source" -I"$here/certify" -x cu "$@" -o "$program"
}

case ${1:-} in
  --record) record "$2"; exit ;;
  --device) device "$2"; exit ;;
esac
if [ -z "${RECORDED:-}" ]; then
  RECORDED=$build/emulator.bin
  record "$RECORDED"
fi
if [ -z "${DEVICE:-}" ]; then
  DEVICE=$build/certify_device
  device "$DEVICE"
fi
DRIVER=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -n 1)
DATE=$(date -u +%F)
COMMIT=${COMMIT:-$(git -C "$here" rev-parse --short HEAD)}
export DRIVER DATE COMMIT
"$DEVICE" compare "$RECORDED" "${1:-certification.json}"
