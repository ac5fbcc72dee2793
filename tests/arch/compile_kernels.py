"""Compiles every kernel file for every architecture with nvcc, and prints registers and spills of each kernel.

Fails if a kernel spills or has a stack frame, if a header of instructions costs more compile time than it may, if an
instruction of sm_100a is missing from the PTX of the compile test, or if a header of the emulator reaches device code.
"""

import argparse
import re
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURES = {"sm_80": "compute_80", "sm_90a": "compute_90a", "sm_100a": "compute_100a"}
HEADER_SECONDS = 4.0
HEADERS = [
    "sm80/async_copy.hpp",
    "sm80/matrix.hpp",
    "sm90/tma.hpp",
    "sm90/wgmma.hpp",
    "sm100/tcgen05.hpp",
    "sm100/tma.hpp",
    "sm100/cluster_launch.hpp",
]
# What compile/sm100_instructions.cu must contain once compiled: every instruction that only sm_100a has.
GROUPS = ("cta_group::1", "cta_group::2")
COPIES = ("128x256b", "128x128b", "64x128b.warpx2::02_13", "64x128b.warpx2::01_23", "32x128b.warpx4")
SHAPES = ("32x32b.x32", "16x64b.x4", "16x128b.x2", "16x256b.x1", "16x32bx2.x4")
COMMIT = "mbarrier::arrive::one.shared::cluster"
SM100_PTX = [
    *[f"tcgen05.{name}.{g}" for name in ("alloc", "dealloc", "relinquish_alloc_permit") for g in GROUPS],
    *[f"tcgen05.mma.{g}.kind::{kind}" for kind in ("f16", "mxf4nvf4.block_scale.block16") for g in GROUPS],
    "tcgen05.mma.ws.cta_group::1.kind::f16",
    *[f"tcgen05.commit.{g}.{COMMIT}{m}.b64" for m in ("", ".multicast::cluster") for g in GROUPS],
    *[f"tcgen05.cp.{g}.{shape}" for shape in COPIES for g in GROUPS],
    *[f"tcgen05.shift.{g}.down" for g in GROUPS],
    *[f"tcgen05.{op}.sync.aligned.{shape}" for op in ("ld", "st") for shape in SHAPES],
    "tcgen05.wait::ld",
    "tcgen05.wait::st",
    "tcgen05.fence::before_thread_sync",
    "tcgen05.fence::after_thread_sync",
    *[f"tile::gather4.mbarrier::complete_tx::bytes.{g}" for g in GROUPS],
    "tile::scatter4.bulk_group",
    ".tile.mbarrier::complete_tx::bytes.cta_group::2",
    "clusterlaunchcontrol.try_cancel.async",
    "clusterlaunchcontrol.query_cancel.is_canceled",
    "clusterlaunchcontrol.query_cancel.get_first_ctaid",
    "cvt.rn.satfinite.e2m1x2.f32",
    "cvt.rn.f16x2.e2m1x2",
    "cvt.rn.satfinite.e4m3x2.f32",
    "cvt.rn.f16x2.e4m3x2",
]


def nvcc(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs nvcc with the include path of the sources."""
    paths = [f"-I{ROOT / path}" for path in ("src", "include", ".", "tests/arch")]
    return subprocess.run(
        ["nvcc", "-std=c++20", "-O3", *paths, *arguments], capture_output=True, text=True, check=False
    )


def cubin(source: Path, arch: str, scratch: Path) -> subprocess.CompletedProcess[str]:
    """Compiles for one architecture, with ptxas' report."""
    target = f"arch={ARCHITECTURES[arch]},code={arch}"
    return nvcc("-gencode", target, "-cubin", "-Xptxas", "-v", str(source), "-o", str(scratch / "kernel.cubin"))


def kernels_of(report: str) -> list[tuple[str, int, int, int]]:
    """(name, registers, stack bytes, spilled bytes) of every kernel in ptxas' report."""
    found, name, stack, spill = [], "", 0, 0
    for line in report.splitlines():
        if m := re.search(r"Function properties for (\S+)|Compiling entry function '(\S+)'", line):
            name = m.group(1) or m.group(2)
        elif m := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            stack, spill = int(m.group(1)), int(m.group(2)) + int(m.group(3))
        elif m := re.search(r"Used (\d+) registers", line):
            found.append((name, int(m.group(1)), stack, spill))
    return found


def demangled(name: str) -> str:
    """The name as written in the source."""
    text = subprocess.run(["c++filt", "-p", name], capture_output=True, text=True, check=False).stdout.strip()
    return text.replace("(anonymous namespace)::", "")


def check_file(path: Path, scratch: Path) -> list[str]:
    """Compiles one file for every architecture and prints its kernels; returns what is wrong."""
    problems = []
    if "arch/emu/" in nvcc("-arch=sm_100a", "-M", str(path)).stdout:
        problems.append(f"{path.name}: nvcc reads a header of the emulator")
    for arch in ARCHITECTURES:
        done = cubin(path, arch, scratch)
        if done.returncode:
            problems.append(f"{path.name} does not compile for {arch}:\n{done.stderr[:2000]}")
            continue
        for name, registers, stack, spill in kernels_of(done.stderr):
            kernel = f"{path.parent.name}/{path.name}  {demangled(name)}"
            if registers > 8:  # fewer: the body is for another architecture
                print(f"{arch:8} {registers:4} registers {stack:5} B stack {spill:5} B spilled  {kernel}", flush=True)
            if stack or spill:
                problems.append(f"{arch}: {kernel} has {stack} bytes of stack and {spill} bytes of spills")
    return problems


def processor_seconds() -> float:
    """Processor time of all finished child processes: other load on the machine does not count."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def check_headers(scratch: Path) -> list[str]:
    """The processor time of a file that includes one header and has an empty kernel."""
    problems = []
    for header in HEADERS:
        source = scratch / "header.cu"
        source.write_text(f'#include "arch/{header}"\n__global__ void kernel() {{}}\n')
        start = processor_seconds()
        done = cubin(source, "sm_100a", scratch)
        seconds = processor_seconds() - start
        print(f"{header:28} {seconds:5.2f} s of nvcc", flush=True)
        if done.returncode:
            problems.append(f"{header} does not compile:\n{done.stderr[:2000]}")
        elif seconds > HEADER_SECONDS:
            problems.append(f"{header}: {seconds:.1f} s of nvcc, more than {HEADER_SECONDS}")
    return problems


def check_instructions(scratch: Path) -> list[str]:
    """Every sm_100a instruction assembles and is found in the PTX."""
    source, ptx = ROOT / "tests/arch/compile/sm100_instructions.cu", scratch / "instructions.ptx"
    done, assembled = nvcc("-arch=sm_100a", "-ptx", str(source), "-o", str(ptx)), cubin(source, "sm_100a", scratch)
    if done.returncode or assembled.returncode:
        return [f"{source.name} does not compile:\n{(done.stderr + assembled.stderr)[:2000]}"]
    text = ptx.read_text()
    missing = [i for i in SM100_PTX if i not in text]
    print(f"{len(SM100_PTX) - len(missing)} of {len(SM100_PTX)} sm_100a instructions are in the PTX", flush=True)
    return [f"not in the PTX: {i}" for i in missing]


def main() -> int:
    """Runs all checks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, help="default: all of src/ops and tests/arch/kernels")
    arguments = parser.parse_args()
    files = arguments.files or sorted([*ROOT.glob("src/ops/*/sm*.cu"), *ROOT.glob("tests/arch/kernels/*.cu")])
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        problems = [p for f in files for p in check_file(f, scratch)]
        if not arguments.files:
            problems += check_instructions(scratch) + check_headers(scratch)
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
