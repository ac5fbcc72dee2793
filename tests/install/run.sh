#!/usr/bin/env bash
# Installs the library built in the folder given into an empty one, builds the consumers against that alone, and runs them and the
# installed command.
set -euo pipefail
cd "$(dirname "$0")/../.."
build=${1:?the build folder, such as build/cpu}
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT

cmake --install "$build" --prefix "$place/prefix" >/dev/null
cp -r tests/install "$place/consumer"
cmake -S "$place/consumer" -B "$place/build" -G Ninja -DCMAKE_PREFIX_PATH="$place/prefix" --log-level=WARNING >/dev/null
cmake --build "$place/build" >/dev/null
passed=0
for program in "$place/build/consumer_cpp" "$place/build/consumer_c" "$place/prefix/bin/hopwell info"; do
  $program >"$place/log" || { cat "$place/log"; echo "install test failed: ${program##*/}" >&2; exit 1; }
  passed=$((passed + 1))
done

library=$(find "$place/prefix/lib" -name libhopwell.so)
# Nothing but the interface is visible: no symbol of BLAS or the standard library leaks out to meet another copy.
leaks=$(nm -D --defined-only "$library" |
  awk '$2 ~ /[TDBR]/ {print $3}' | c++filt | grep -vE '^(hopwell_|hopwell::|typeinfo (name )?for hopwell::|vtable for hopwell::)' || true)
[ -z "$leaks" ] || { printf 'symbols that should be hidden:\n%s\n' "$leaks" >&2; exit 1; }

# A machine that runs it needs the compiler's run-time libraries and nothing else.
others=$(readelf -d "$library" "$place/prefix/bin/hopwell" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' | sort -u |
  grep -vE '^(libhopwell|libgomp|libstdc\+\+|libgcc_s|libm|libc|ld-linux-[a-z0-9_-]+)\.so' || true)
[ -z "$others" ] || { printf 'libraries that should not be needed:\n%s\n' "$others" >&2; exit 1; }
echo "install test: $((passed + 2)) passed, 0 failed"
