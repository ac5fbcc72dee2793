#!/usr/bin/env bash
# Installs the build in the given folder to an empty folder, and builds against this installation only: programs that use the
# library, a foreign kernel and the tutorial's kernels on the emulator. Then it runs them and the installed commands.
set -euo pipefail
cd "$(dirname "$0")/../.."
build=${1:?the build folder, such as build/cpu}
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT

cmake --install "$build" --prefix "$place/prefix" >/dev/null

# An installation writes only under its prefix. DESTDIR finds a file that goes to an absolute path. pip installs the Python package
# of the same build folder, so this installation omits it.
DESTDIR="$place/stage" cmake --install "$build" --prefix /prefix >/dev/null
strays=$(cd "$place/stage" && find . ! -type d | sed 's/^\.//' | grep -vE \
  '^/prefix/(bin/hopwell(-emulate)?|include/hopwell/.+|lib(/[^/]+)?/(libhopwell[^/]*|cmake/hopwell/.+|pkgconfig/hopwell\.pc))$' || true)
[ -z "$strays" ] || { printf 'install test failed: an install writes what is not its own:\n%s\n' "$strays" >&2; exit 1; }
rm -rf "$place/stage"
cp -r tests/install "$place/consumer"
cmake -S "$place/consumer" -B "$place/build" -G Ninja -DCMAKE_PREFIX_PATH="$place/prefix" --log-level=WARNING >/dev/null
cmake --build "$place/build" >/dev/null
passed=0
for program in "$place/build/consumer_cpp" "$place/build/consumer_c" "$place/prefix/bin/hopwell info"; do
  $program >"$place/log" || { cat "$place/log"; echo "install test failed: ${program##*/}" >&2; exit 1; }
  passed=$((passed + 1))
done

if command -v pkg-config >/dev/null; then  # a build without CMake, from a moved installation
  mv "$place/prefix" "$place/moved"
  options=$(PKG_CONFIG_PATH=$(dirname "$(find "$place/moved" -name hopwell.pc)") pkg-config --cflags --libs hopwell)
  # shellcheck disable=SC2086  # a list of words
  cc -std=c99 tests/install/consumer.c -o "$place/by_pkg_config" $options
  LD_LIBRARY_PATH=$(find "$place/moved" -name libhopwell.so -printf %h) "$place/by_pkg_config"
  mv "$place/moved" "$place/prefix"
  passed=$((passed + 1))
fi

# ---- the C++ examples of the operators' pages ----
cmake -S tests/install/operators -B "$place/operators" -G Ninja -DCMAKE_PREFIX_PATH="$place/prefix" --log-level=WARNING >/dev/null
cmake --build "$place/operators" >/dev/null
for program in tests/install/operators/*.cpp; do
  name=$(basename "$program" .cpp)
  "$place/operators/$name" >"$place/log" || { cat "$place/log"; echo "install test failed: $name" >&2; exit 1; }
  passed=$((passed + 1))
done

# ---- a decode step of a serving engine: on the CPU, and in a CUDA graph if there is a CUDA toolkit and a GPU ----
cmake -S tests/install/engine -B "$place/engine" -G Ninja -DCMAKE_PREFIX_PATH="$place/prefix" --log-level=WARNING >/dev/null
cmake --build "$place/engine" >/dev/null
"$place/engine/engine" >"$place/log" || { cat "$place/log"; echo "install test failed: engine" >&2; exit 1; }
head -n 4 "$place/log" | diff tests/install/engine/output.txt - || { echo "install test failed: what engine prints" >&2; exit 1; }
passed=$((passed + 1))
if [ -x "$place/engine/engine_graph" ]; then
  "$place/engine/engine_graph" >"$place/log" || { cat "$place/log"; echo "install test failed: engine_graph" >&2; exit 1; }
  if grep -q '^no GPU' "$place/log"; then echo "install test: engine_graph: skipped, because there is no GPU"; else passed=$((passed + 1)); fi
else
  echo "install test: engine_graph: skipped, because there is no CUDA toolkit"
fi

# ---- kernels on the installed emulator: from this build, and from a build of the emulator alone ----
fail() { echo "install test failed: $*" >&2; exit 1; }
quietly() { "$@" >"$place/log" 2>&1 || { cat "$place/log"; fail "$*"; }; }
project() {  # FOLDER PREFIX OPTION...
  quietly cmake -S "$1" -B "$place/build-$(basename "$1")" -G Ninja -DCMAKE_PREFIX_PATH="$2" "${@:3}"
  quietly cmake --build "$place/build-$(basename "$1")"
}
is_a_page() { quietly python3 -c 'import sys, xml.dom.minidom as xml; xml.parse(sys.argv[1])' "$1"; }

project src/arch "" $(command -v ccache >/dev/null && echo -DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
quietly cmake --install "$place/build-arch" --prefix "$place/alone"
cp -r tests/install/kernel examples/emulator "$place"
project "$place/kernel" "$place/alone"
quietly "$place/build-kernel/kernel" "$place/kernel.html"
is_a_page "$place/kernel.html"
if command -v gdb >/dev/null; then  # gdb stops at the planted race and shows the kernel's variables
  gdb -nx -batch -ex 'break hopwell_emulator_finding' -ex run -ex 'frame function kernel' -ex 'info args' -ex 'info locals' \
    --args "$place/build-kernel/kernel_debug" "$place/kernel.html" </dev/null >"$place/log" 2>&1 || true  # the log decides
  for words in 'hopwell_emulator_finding (kind=' 'bug = true' 'lane = [0-9]'; do
    grep -q "$words" "$place/log" || { cat "$place/log"; fail "gdb does not show $words at a finding"; }
  done
  passed=$((passed + 1))
else
  echo "install test: gdb at a finding: skipped, because gdb is not installed"
fi
project "$place/emulator" "$place/prefix"
example=$place/build-emulator/emulator_example
quietly "$example"
for step in async_copies tensor_copies warpgroup_product copy_engine tensor_core pipeline; do
  diff "examples/emulator/reports/$step.txt" <("$example" $step --bug) || fail "what the emulator says of $step without a line"
done
quietly "$place/prefix/bin/hopwell-emulate" sparse_mla_forward --backend emu:sm100 --case h_q_64 --report "$place/case.html"
is_a_page "$place/case.html"
passed=$((passed + 9))

# A missing component is an error with a clear message.
refused() {  # COMPONENT WORDS
  cmake -S "$place/kernel" -B "$place/refused" -DCMAKE_PREFIX_PATH="$place/alone" -DCOMPONENT="$1" >"$place/log" 2>&1 &&
    fail "component '$1' was found"
  tr -s ' \n' ' ' <"$place/log" | grep -qF "$2" || { cat "$place/log"; fail "component '$1' is not refused with: $2"; }
  passed=$((passed + 1))
}
refused emulatr "hopwell: there is no component 'emulatr'; components: library, emulator"
refused library "hopwell: component 'library' is not part of this installation"

library=$(find "$place/prefix/lib" -name libhopwell.so)
# Only the interface is visible. A visible symbol of the standard library could mix with another copy in the process.
leaks=$(nm -D --defined-only "$library" |
  awk '$2 ~ /[TDBR]/ {print $3}' | c++filt | grep -vE '^(hopwell_|hopwell::|typeinfo (name )?for hopwell::|vtable for hopwell::)' || true)
[ -z "$leaks" ] || { printf 'symbols that should be hidden:\n%s\n' "$leaks" >&2; exit 1; }

# The library needs only the compiler's run-time libraries.
others=$(readelf -d "$library" "$place/prefix/bin/hopwell" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' | sort -u |
  grep -vE '^(libhopwell|libstdc\+\+|libgcc_s|libm|libc|ld-linux-[a-z0-9_-]+)\.so' || true)
[ -z "$others" ] || { printf 'libraries that should not be needed:\n%s\n' "$others" >&2; exit 1; }
echo "install test: $((passed + 2)) passed, 0 failed"
