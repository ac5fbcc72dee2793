"""The limit of each kernel of the decode operators and the indexer: counters of one launch, by Nsight Compute.

    python benchmarks/limits.py                 a table
    python benchmarks/limits.py --json FILE     and a record

Needs `ncu` and permission to read the counters. Caches are empty when a kernel starts; clocks are not locked. The
counters need several passes, so the times differ from docs/performance: use the shares.
"""

from __future__ import annotations

import argparse
import csv
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import hopwell
import torch
from hopwell.bench import record

SHARES = {  # percent of the hardware's maximum
    "memory": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "L2": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "shared memory": "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed",
    "issue": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "logic": "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active",
    "tensor cores": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "warps": "sm__warps_active.avg.pct_of_peak_sustained_active",
}
STALL, PER_ISSUE = "smsp__average_warps_issue_stalled_", "_per_issue_active.ratio"
STALLS = [
    "barrier",
    "branch_resolving",
    "dispatch_stall",
    "drain",
    "gmma",
    "imc_miss",
    "lg_throttle",
    "long_scoreboard",
    "math_pipe_throttle",
    "membar",
    "mio_throttle",
    "no_instruction",
    "short_scoreboard",
    "sleeping",
    "wait",
]
TIME, REGISTERS = "gpu__time_duration.sum", "launch__registers_per_thread"
METRICS = [TIME, REGISTERS, *SHARES.values(), *(STALL + stall + PER_ISSUE for stall in STALLS)]


def attention(b: int, context: int, h: int, h_kv: int, d: int, backend: str) -> Callable[[], object]:
    block, options = 16, {"dtype": torch.bfloat16, "device": "cuda"}
    width = context // block
    k_cache, v_cache = torch.randn(2, b * width, block, h_kv, d, **options).unbind(0)
    tables = torch.randperm(b * width, device="cuda").view(b, width).int()
    lengths = torch.full((b,), context, dtype=torch.int32, device="cuda")
    q, bias = torch.randn(b, h, d, **options), torch.randn(b, h, 1, context, **options)
    return lambda: hopwell.paged_attention(q, k_cache, v_cache, tables, lengths, d**-0.5, bias=bias, backend=backend)


def linear(n: int, rows: int, k: int) -> Callable[[], object]:
    codes, scales, scale = hopwell.nvfp4_quantize(torch.randn(rows, k, dtype=torch.bfloat16, device="cuda"))
    x = torch.randn(n, k, dtype=torch.bfloat16, device="cuda")
    return lambda: hopwell.nvfp4_linear(x, codes, scales, scale)


def quantize(given: bool) -> Callable[[], object]:
    x = torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda")
    scale = float(x.abs().max()) / 2688
    return lambda: hopwell.nvfp4_quantize(x, global_scale=scale if given else None)


def dequantize() -> Callable[[], object]:
    packed = hopwell.nvfp4_quantize(torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda"))
    return lambda: hopwell.nvfp4_dequantize(*packed, dtype="bfloat16")


def indexer(s_q: int, s_kv: int) -> Callable[[], object]:
    options = {"dtype": torch.bfloat16, "device": "cuda"}
    q, k = torch.randn(s_q, 64, 128, **options), torch.randn(s_kv, 128, **options)
    weights = torch.randn(s_q, 64, device="cuda")
    return lambda: hopwell.lightning_indexer(q, k, weights, 2048)


CALLS: dict[str, Callable[[], Callable[[], object]]] = {
    "paged_attention H 32 d 128 B 64 ctx 4096": lambda: attention(64, 4096, 32, 32, 128, "sm80"),
    "paged_attention H 16 d 64 B 32 ctx 4096": lambda: attention(32, 4096, 16, 16, 64, "sm80"),
    "paged_attention GQA 32/8 d 128 B 16 ctx 8192": lambda: attention(16, 8192, 32, 8, 128, "sm80"),
    "paged_attention H 16 d 64 B 1 ctx 32768": lambda: attention(1, 32768, 16, 16, 64, "sm90"),
    "paged_attention H 16 d 64 B 1 ctx 1008": lambda: attention(1, 1008, 16, 16, 64, "sm90"),
    "nvfp4_linear 28672x4096 n 1": lambda: linear(1, 28672, 4096),
    "nvfp4_linear 28672x4096 n 8": lambda: linear(8, 28672, 4096),
    "nvfp4_linear 28672x4096 n 16": lambda: linear(16, 28672, 4096),
    "nvfp4_linear 7168x16384 n 1": lambda: linear(1, 7168, 16384),
    "nvfp4_linear 7168x16384 n 8": lambda: linear(8, 7168, 16384),
    "nvfp4_linear 7168x16384 n 16": lambda: linear(16, 7168, 16384),
    "nvfp4_linear 28672x4096 n 32": lambda: linear(32, 28672, 4096),
    "nvfp4_linear 28672x4096 n 128": lambda: linear(128, 28672, 4096),
    "nvfp4_linear 28672x4096 n 1024": lambda: linear(1024, 28672, 4096),
    "nvfp4_quantize 4096x4096": lambda: quantize(given=False),
    "nvfp4_quantize 4096x4096 with a global": lambda: quantize(given=True),
    "nvfp4_dequantize 4096x4096": dequantize,
    "lightning_indexer s_q 512 s_kv 8192": lambda: indexer(512, 8192),
    "lightning_indexer s_q 1 s_kv 65536": lambda: indexer(1, 65536),
}


def launch() -> None:
    """Runs in the child process, which the profiler watches."""
    torch.manual_seed(0)
    profiler = torch.cuda.cudart()
    for name, prepare in CALLS.items():
        call = prepare()
        call()
        torch.cuda.synchronize()
        with torch.cuda.nvtx.range(f"[{name}]"):
            profiler.cudaProfilerStart()
            call()
            torch.cuda.synchronize()
            profiler.cudaProfilerStop()


def measure() -> list[dict[str, object]]:
    ncu = shutil.which("ncu")
    if ncu is None:
        raise SystemExit("limits.py: needs ncu; found none")
    command = [ncu, "--profile-from-start", "off", "--clock-control", "none", "--nvtx", "--csv", "--page", "raw"]
    command += ["--print-kernel-base", "function"]
    command += ["--metrics", ",".join(METRICS), sys.executable, __file__, "--launch"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in run.stdout.splitlines() if line.startswith('"')]
    if run.returncode or len(lines) < 3:
        raise SystemExit(f"limits.py: ncu failed\n{run.stdout[-2000:]}{run.stderr[-2000:]}")
    header, units, *rows = csv.reader(lines)
    unit = dict(zip(header, units, strict=True))
    results: list[dict[str, object]] = []
    for row in rows:
        cells = dict(zip(header, row, strict=True))
        stalls = {stall: number(cells[STALL + stall + PER_ISSUE]) for stall in STALLS}
        longest = sorted(stalls, key=lambda stall: -stalls[stall])[:3]
        results.append(
            {
                "call": next(name for name in CALLS if any(f"[{name}]" in cell for cell in row)),
                "kernel": cells["Kernel Name"],
                "microseconds": number(cells[TIME]) * {"ns": 1e-3, "us": 1, "ms": 1e3}[unit[TIME]],
                "registers": int(number(cells[REGISTERS])),
                "percent": {share: number(cells[metric]) for share, metric in SHARES.items()},
                "stalls_per_issue": {stall: stalls[stall] for stall in longest},
            }
        )
    return results


def number(text: str) -> float:
    return float(text.replace(",", "")) if text not in ("", "n/a") else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a record to FILE")
    parser.add_argument("--launch", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("limits.py: PyTorch sees no GPU")
    if options.launch:
        return launch()
    results = measure()
    print(f"{'call':46} {'kernel':20} {'us':>8} " + " ".join(f"{share:>13}" for share in SHARES) + "  stalls an issue")
    for r in results:
        percent, stalls = r["percent"], r["stalls_per_issue"]
        assert isinstance(percent, dict) and isinstance(stalls, dict)
        shares = " ".join(f"{share:12.0f}%" for share in percent.values())
        told = ", ".join(f"{stall} {cost:.1f}" for stall, cost in stalls.items())
        print(f"{r['call']:46} {r['kernel']:20} {r['microseconds']:8.1f} {shares}  {told}")
    record.write(options.json, results)


if __name__ == "__main__":
    main()
