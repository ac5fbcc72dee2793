#!/usr/bin/env bash
# Tries a wheel on processors without AVX2, which QEMU emulates: an instruction that the processor lacks ends the program.
# old_processor.sh WHEEL [PYTHON]; needs qemu-x86_64-static (Debian: qemu-user-static).
. "$(dirname "$0")/proofs.sh"
wheel=$(realpath "${1:?the wheel}")
name="processors without AVX2"

command -v qemu-x86_64-static >/dev/null || { skipped "$name" "no qemu-x86_64-static"; exit 0; }
environment "${2:-python3}" "$wheel"
program=$(bare python -c 'import hopwell._hopwell, pathlib; print(pathlib.Path(hopwell._hopwell.__file__).parent / "bin/hopwell")')
qemu=$(command -v qemu-x86_64-static)
as() {  # PROCESSOR PROGRAM…; QEMU warns of features that do not concern arithmetic
  bare "$qemu" -cpu "$@" 2> >(grep -v "TCG doesn't support requested feature" >&2)
}

# That QEMU stops what the processor has not: vpaddd ymm0, ymm0, ymm0 and ret, as a function.
avx2='import ctypes, mmap
code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
code.write(b"\xc5\xfd\xfe\xc0\xc3")
ctypes.CFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()'
as Haswell "$place/venv/bin/python" -c "$avx2"
if as Nehalem "$place/venv/bin/python" -c "$avx2" >/dev/null 2>&1; then
  echo "this QEMU runs AVX2 on a Nehalem: nothing would be proven" >&2
  exit 1
fi
# Highway's SSE4 also needs AES, which Nehalem lacks; SandyBridge has AVX but not AVX2.
while read -r processor vectors; do
  echo "$processor:"
  info=$(as "$processor" "$program" info)
  grep '^vectors' <<<"$info"
  grep -q "^vectors  $vectors" <<<"$info"
  as "$processor" "$program" check --quick --backend cpu | tail -1
  # numpy itself needs SSE 4.2, and reports if it is missing.
  [ "$processor" = core2duo ] || as "$processor" "$place/venv/bin/python" -c "$call"
done <<'PROCESSORS'
core2duo SSSE3: this processor has no AVX2
Nehalem SSSE3: this processor has no AVX2
Westmere SSE4: this processor has no AVX2
SandyBridge SSE4: this processor has no AVX2
Haswell AVX2
PROCESSORS
passed "$name"
