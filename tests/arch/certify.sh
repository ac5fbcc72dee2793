#!/bin/sh
# Certifies the emulator against the GPU of this machine: certify.sh [report.json]
#
# Records every case on the emulator, runs the same kernels on the GPU, compares, writes the report. Needs g++ and nvcc.
# Set RECORDED to a file that `certify.sh --record FILE` wrote elsewhere, or DEVICE to a program that --device built, to
# save building them here. Builds into $BUILD (default build-certify).
set -eu
here=$(cd "$(dirname "$0")" && pwd)
source=$here/../../src
build=${BUILD:-build-certify}
mkdir -p "$build"

record() {  # record FILE
  for file in "$source"/arch/emu/*.cpp "$here/certify/main.cpp"; do
    printf '%s\n' "-O2 $file"
  done >"$build/files"
  for file in sm80 sm90 wgmma; do
    printf '%s\n' "-O2 -g1 -fsanitize=thread -xc++ $here/certify/$file.cu"
  done >>"$build/files"
  rm -f "$build"/*.o
  number=0
  while read -r arguments; do
    number=$((number + 1))
    printf '%s\n' "-std=c++20 -I$source -I$here/certify $arguments -c -o $build/$number.o"
  done <"$build/files" | xargs -P "$(nproc)" -L 1 "${CXX:-g++}"
  "${CXX:-g++}" "$build"/*.o -o "$build/certify_emulator"
  "$build/certify_emulator" record "$1"
}

device() {  # device PROGRAM
  nvcc -std=c++20 -O2 -gencode arch=compute_90a,code=sm_90a -I"$source" -I"$here/certify" -x cu \
    "$here/certify/main.cpp" "$here/certify/sm80.cu" "$here/certify/sm90.cu" "$here/certify/wgmma.cu" -o "$1"
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
"$DEVICE" compare "$RECORDED" "${1:-certification.json}"
