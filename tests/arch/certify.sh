#!/bin/sh
# Certifies the emulator against the GPU of this machine: certify.sh [report.json]
# Needs g++ and nvcc; builds into $BUILD (build-certify), takes about two minutes.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
report=${1:-certification.json}
build=${BUILD:-build-certify}
cmake -S "$here" -B "$build" -DCMAKE_BUILD_TYPE=RelWithDebInfo >/dev/null
cmake --build "$build" -j "$(nproc)" --target certify_emulator
"$build/certify_emulator" record "$build/emulator.bin"
nvcc -std=c++20 -O2 -gencode arch=compute_90a,code=sm_90a -I"$here/../../src" -I"$here/certify" -x cu "$here/certify/main.cpp" \
  "$here/certify/sm80.cu" "$here/certify/sm90.cu" "$here/certify/wgmma.cu" -o "$build/certify_device"
"$build/certify_device" compare "$build/emulator.bin" "$report"
