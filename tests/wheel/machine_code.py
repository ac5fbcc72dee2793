"""Checks a wheel's code for GPUs: machine code for each promised GPU, PTX for later ones, and at most 60 MB.

machine_code.py WHEEL; a wheel that was built without nvcc is skipped by name.
"""

import struct
import sys
import zipfile
from collections import Counter
from pathlib import Path

MOST_BYTES = 60e6
# The code of 8.0 runs on 8.6 and 8.9, the code of 10.0 on 10.3; sm90.cu is for 9.0a, sm100.cu for the family 10.0f.
MACHINE_CODE, PTX = {80, 90, 100, 120}, {90, 100}
# nvcc's format (cuobjdump lists the same): a header with a magic number, its own size and the size of the rest; then
# entries, each with its kind, its header's size, its own size and the GPU.
MAGIC, HEADER, ENTRY, GPU = struct.pack("<I", 0xBA55ED50), struct.Struct("<IHHQ"), struct.Struct("<HHIQ"), 28
KINDS = {1: "PTX", 2: "machine code"}


def held(library: bytes) -> Counter[tuple[str, int]]:
    """Counts the entries by kind and GPU."""
    found: Counter[tuple[str, int]] = Counter()
    end = 0
    while (start := library.find(MAGIC, end)) >= 0:
        _, _, header, size = HEADER.unpack_from(library, start)
        entry, end = start + header, start + header + size
        while entry < end:
            kind, _, entry_header, entry_size = ENTRY.unpack_from(library, entry)
            found[KINDS[kind], struct.unpack_from("<I", library, entry + GPU)[0]] += 1
            entry += entry_header + entry_size
    return found


def main() -> None:
    wheel = Path(sys.argv[1])
    size = wheel.stat().st_size
    if size > MOST_BYTES:
        sys.exit(f"the wheel has {size / 1e6:.1f} MB, more than {MOST_BYTES / 1e6:.0f}")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.startswith("hopwell/lib/libhopwell.so"))
        found = held(archive.read(name))
    if not found:
        print("skipped: machine code: the wheel was built without nvcc")
        return
    for kind, wanted in (("machine code", MACHINE_CODE), ("PTX", PTX)):
        gpus = {gpu: count for (of_kind, gpu), count in sorted(found.items()) if of_kind == kind}
        print(f"{kind}: " + ", ".join(f"{gpu / 10:.1f} ({count} files)" for gpu, count in gpus.items()))
        if gpus.keys() != wanted:
            sys.exit(f"{kind} for {sorted(gpus)}, expected {sorted(wanted)}")
    print(f"passed: machine code; the wheel has {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
