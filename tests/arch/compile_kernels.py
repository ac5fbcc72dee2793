"""Compiles the tests' kernels and those of Blackwell's first hour with nvcc, or the files it is given.

Prints registers, shared memory and spills of each kernel.

Fails if a kernel file, the operators' included, names what only the instruction layer may, if a kernel spills or has a
stack frame, if a header of instructions costs more compile time than it may, if an instruction of sm_100a is missing
from the PTX of the compile test, or if the device code of a kernel is another one where the emulator's headers are
absent. The build itself refuses spills and stack frames of the operators' kernels. Ends with 77 ("skipped") where there
is no nvcc.
"""

import argparse
import math
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURES = {"sm_80": "compute_80", "sm_90a": "compute_90a", "sm_100a": "compute_100a"}
# Backend files and kernels for Blackwell alone; other files compile for all GPUs, as wgmma_gemm.cu does.
RUNS_ON = {
    "sm80": ["sm_80", "sm_90a"],
    "sm90": ["sm_90a"],
    "sm100": ["sm_100a"],
    "blackwell_first_hour": ["sm_100a"],
    "tcgen05_gather_gemm": ["sm_100a"],
    "nvfp4_gemm": ["sm_100a"],
    "mla_backward_flow": ["sm_100a"],
}
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
KINDS = ("f16", "mxf4nvf4.block_scale.block16")
COLLECTOR_USES = ("fill", "use", "lastuse", "discard")
COPIES = ("128x256b", "128x128b", "64x128b.warpx2::02_13", "64x128b.warpx2::01_23", "32x128b.warpx4", "4x256b")
SHAPES = ("32x32b.x32", "16x64b.x4", "16x128b.x2", "16x256b.x1", "16x32bx2.x4")
MULTICAST = ("", ".multicast::cluster")
POLICY = ("", ".L2::cache_hint")
COMMIT = "mbarrier::arrive::one.shared::cluster"
SM100_PTX = [
    *[f"tcgen05.{name}.{g}" for name in ("alloc", "dealloc", "relinquish_alloc_permit") for g in GROUPS],
    *[f"tcgen05.mma.{g}.kind::{kind} " for kind in KINDS for g in GROUPS],
    "tcgen05.mma.ws.cta_group::1.kind::f16 ",
    *[f"tcgen05.mma.{g}.kind::{k}.collector::a::{use} " for k in KINDS for use in COLLECTOR_USES for g in GROUPS],
    *[f"tcgen05.mma.ws.cta_group::1.kind::f16.collector::b{b}::{use} " for b in range(4) for use in COLLECTOR_USES],
    *[f"tcgen05.commit.{g}.{COMMIT}{m}.b64" for m in MULTICAST for g in GROUPS],
    *[f"tcgen05.cp.{g}.{shape}" for shape in COPIES for g in GROUPS],
    *[f"tcgen05.shift.{g}.down" for g in GROUPS],
    *[f"tcgen05.{op}.sync.aligned.{shape}" for op in ("ld", "st") for shape in SHAPES],
    "tcgen05.wait::ld",
    "tcgen05.wait::st",
    "tcgen05.fence::before_thread_sync",
    "tcgen05.fence::after_thread_sync",
    *[f"tile::gather4.mbarrier::complete_tx::bytes{m}.{g}{p} " for m in MULTICAST for g in GROUPS for p in POLICY],
    "tile::scatter4.bulk_group",
    "st.global.L1::no_allocate.v8.b32",
    ".tile.mbarrier::complete_tx::bytes.cta_group::2",
    "clusterlaunchcontrol.try_cancel.async",
    "clusterlaunchcontrol.query_cancel.is_canceled",
    "clusterlaunchcontrol.query_cancel.get_first_ctaid",
    "cvt.rn.satfinite.e2m1x2.f32",
    "cvt.rn.f16x2.e2m1x2",
    "cvt.rn.satfinite.e4m3x2.f32",
    "cvt.rn.f16x2.e4m3x2",
]


SKIPPED = 77
compiler = "nvcc"
generated: list[Path] = []  # include path of the headers that follow from the operators' declarations


def nvcc(*arguments: str, sources: Path = ROOT / "src") -> subprocess.CompletedProcess[str]:
    """Runs nvcc as the build does, with the include path of the sources."""
    paths = [f"-I{path}" for path in (sources, ROOT / "include", ROOT, ROOT / "tests/arch", *generated)]
    return subprocess.run(
        [compiler, "-std=c++20", "-O3", "--expt-relaxed-constexpr", *paths, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


def cubin(source: Path, arch: str, output: Path, sources: Path = ROOT / "src") -> subprocess.CompletedProcess[str]:
    """Compiles for one architecture, with ptxas' report."""
    target = f"arch={ARCHITECTURES[arch]},code={arch}"
    return nvcc("-gencode", target, "-cubin", "-Xptxas", "-v", str(source), "-o", str(output), sources=sources)


class Kernel(NamedTuple):
    """What ptxas says of a kernel; shared memory is the static part, bytes."""

    name: str
    registers: int
    shared: int
    stack: int
    spilled: int


def kernels_of(report: str) -> list[Kernel]:
    """All kernels in ptxas' report."""
    found, name, stack, spill = [], "", 0, 0
    for line in report.splitlines():
        if m := re.search(r"Function properties for (\S+)|Compiling entry function '(\S+)'", line):
            name = m.group(1) or m.group(2)
        elif m := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            stack, spill = int(m.group(1)), int(m.group(2)) + int(m.group(3))
        elif m := re.search(r"Used (\d+) registers", line):
            shared = re.search(r"(\d+) bytes smem", line)
            found.append(Kernel(name, int(m.group(1)), int(shared.group(1)) if shared else 0, stack, spill))
    return found


def demangled(name: str) -> str:
    """The name as written in the source."""
    text = subprocess.run(["c++filt", "-p", name], capture_output=True, text=True, check=False).stdout.strip()
    return text.replace("(anonymous namespace)::", "")


def check_source(path: Path) -> list[str]:
    """Kernels use the functions of src/arch and plain C++ only."""
    code = re.sub(r"//[^\n]*", "", path.read_text())
    return [f"{path.name} contains {m.group()}" for m in re.finditer(r"\basm\b|cuda::ptx|__shared__|<<<", code)]


def check_file(path: Path, arch: str, scratch: Path) -> list[str]:
    """Compiles one file for one architecture and prints its kernels; returns what is wrong."""
    done = cubin(path, arch, scratch / f"{path.parent.name}_{path.stem}_{arch}.cubin")
    if done.returncode:
        return [f"{path.name} does not compile for {arch}:\n{done.stderr[:2000]}"]
    lines, problems = [], []
    for kernel in kernels_of(done.stderr):
        place = f"{path.parent.name}/{path.name}  {demangled(kernel.name)}"
        if kernel.registers > 8:  # fewer: the body is for another architecture
            lines.append(
                f"{arch:8} {kernel.registers:4} registers {kernel.shared:6} B shared {kernel.stack:5} B stack "
                f"{kernel.spilled:5} B spilled  {place}"
            )
        if kernel.stack or kernel.spilled:
            problems.append(f"{arch}: {place} has {kernel.stack} bytes of stack and {kernel.spilled} bytes of spills")
    if lines:
        print("\n".join(lines), flush=True)
    return problems


def check_device_code(path: Path, arch: str, scratch: Path) -> list[str]:
    """The same device code, byte for byte, from a tree that has no emulator in it."""
    bare = scratch / f"bare_{arch}"
    shutil.copytree(ROOT / "src/arch", bare / "arch", ignore=shutil.ignore_patterns("emu"))
    outputs = [scratch / f"{name}_{arch}.cubin" for name in ("with", "without")]
    for output, sources in zip(outputs, (ROOT / "src", bare), strict=True):
        done = cubin(path, arch, output, sources)
        if done.returncode:
            return [f"{path.name} does not compile for {arch} in {sources}:\n{done.stderr[:2000]}"]
    same = outputs[0].read_bytes() == outputs[1].read_bytes()
    print(f"{arch:8} {path.name}: device code {'the same' if same else 'differs'} without the emulator", flush=True)
    return [] if same else [f"{path.name}: the emulator's headers change the device code for {arch}"]


def processor_seconds() -> float:
    """Processor time of all finished child processes: other load on the machine does not count."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def check_headers(scratch: Path) -> list[str]:
    """The processor time of a file that includes one header and has an empty kernel.

    If it is too long, the least of three counts: other processes that share a core's units or the caches lengthen it.
    """
    problems = []
    for header in HEADERS:
        source = scratch / "header.cu"
        source.write_text(f'#include "arch/{header}"\n__global__ void kernel() {{}}\n')
        seconds = math.inf
        for _ in range(3):
            start = processor_seconds()
            done = cubin(source, "sm_100a", scratch / "header.cubin")
            seconds = min(seconds, processor_seconds() - start)
            if done.returncode or seconds <= HEADER_SECONDS:
                break
        print(f"{header:28} {seconds:5.2f} s of nvcc", flush=True)
        if done.returncode:
            problems.append(f"{header} does not compile:\n{done.stderr[:2000]}")
        elif seconds > HEADER_SECONDS:
            problems.append(f"{header}: {seconds:.1f} s of nvcc, more than {HEADER_SECONDS}")
    return problems


def check_instructions(scratch: Path) -> list[str]:
    """Every sm_100a instruction assembles and is found in the PTX."""
    source, ptx = ROOT / "tests/arch/compile/sm100_instructions.cu", scratch / "instructions.ptx"
    done = nvcc("-arch=sm_100a", "-ptx", str(source), "-o", str(ptx))
    assembled = cubin(source, "sm_100a", scratch / "instructions.cubin")
    if done.returncode or assembled.returncode:
        return [f"{source.name} does not compile:\n{(done.stderr + assembled.stderr)[:2000]}"]
    text = ptx.read_text()
    missing = [i for i in SM100_PTX if i not in text]
    print(f"{len(SM100_PTX) - len(missing)} of {len(SM100_PTX)} sm_100a instructions are in the PTX", flush=True)
    return [f"not in the PTX: {i}" for i in missing]


def main() -> int:
    """Runs all checks."""
    global compiler
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "files", nargs="*", type=Path, help="default: tests/arch/kernels and benchmarks/blackwell_first_hour.cu"
    )
    parser.add_argument("--nvcc", default="nvcc", help="the compiler")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compilations at a time")
    arguments = parser.parse_args()
    compiler = arguments.nvcc
    kernels = ROOT / "tests/arch/kernels"
    files = arguments.files or [*sorted(kernels.glob("*.cu")), ROOT / "benchmarks/blackwell_first_hour.cu"]
    operators = [] if arguments.files else [*ROOT.glob("src/ops/**/*.cu"), *ROOT.glob("src/ops/**/*.hpp")]
    found = [check_source(file) for file in [*files, *operators]]
    if not shutil.which(compiler) and not any(found):
        print(f"skipped: no {compiler} here")
        return SKIPPED
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(arguments.jobs) as pool:
        scratch = Path(directory)
        generated.append(scratch / "generated" / "include")
        subprocess.run([sys.executable, ROOT / "scripts/declare", "--write", scratch / "generated"], check=True)
        jobs = [
            partial(check_file, file, arch, scratch) for file in files for arch in RUNS_ON.get(file.stem, ARCHITECTURES)
        ]
        if not arguments.files:
            jobs += [
                partial(check_device_code, kernels / "nvfp4_gemm.cu", "sm_100a", scratch),
                partial(check_device_code, kernels / "wgmma_gemm.cu", "sm_90a", scratch),
                partial(check_instructions, scratch),
            ]
        found += pool.map(lambda job: job(), jobs)
        if not arguments.files:
            found.append(check_headers(scratch))  # which no other compilation may run beside
    problems = [problem for of_one in found for problem in of_one]
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
