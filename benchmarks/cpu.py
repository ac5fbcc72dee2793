"""All CPU targets of the project, measured in one run: each operator against this machine's ceilings and PyTorch.

    make bench                              a table, and build/benchmarks/cpu.json
    python benchmarks/cpu.py --record       the same, recorded under benchmarks/results/cpu/

Two programs are timed in turns and compared pair by pair, so that a ratio is valid even if the machine's speed drifts.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import hopwell
import torch

ROOT = Path(__file__).resolve().parent.parent
COMMAND = Path(sys.executable).with_name("hopwell")  # the command of the installed package

# Targets of `hopwell bench`: operator, shape, field of its JSON, target.
SHARES = [
    ("sparse_mla_forward", "production", "share_of_matmul", 0.65),
    ("sparse_mla_backward", "production", "share_of_matmul", 0.50),
    ("attention_distribution", "production", "share_of_matmul", 0.60),
    ("nvfp4_linear", "7168x16384", "share_of_read", 0.50),
    ("paged_attention", "b8_ctx4096_h16_d64_fp32", "share_of_read", 0.50),
    ("paged_attention", "b8_ctx4096_h16_d64_bf16", "share_of_read", 0.50),
]

S_Q, S_KV, H_Q, D_QK, D_V, TOPK = 8, 8192, 128, 576, 512, 2048


def output_of(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def paired_ratio(ours: Callable[[], object], theirs: Callable[[], object], rounds: int = 5) -> dict[str, float]:
    """Returns the time of `theirs` divided by the time of `ours`: the median over neighbouring runs."""

    def seconds(run: Callable[[], object]) -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    ours(), theirs()
    pairs = [(seconds(ours), seconds(theirs)) for _ in range(rounds)]
    ratios = sorted(b / a for a, b in pairs)
    return {
        "ratio": median(ratios),
        "least": ratios[0],
        "most": ratios[-1],
        "ours_seconds": median(a for a, _ in pairs),
        "theirs_seconds": median(b for _, b in pairs),
    }


def sparse_inputs(s_q: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    return {
        "q": normal(s_q, H_Q, D_QK),
        "kv": normal(S_KV, D_QK),
        "indices": torch.randint(0, S_KV, (s_q, TOPK), generator=generator, dtype=torch.int32),
        "d_out": normal(s_q, H_Q, D_V),
    }


def hopwell_step(x: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    scale = D_QK**-0.5
    out, _, lse = hopwell.sparse_mla_forward(x["q"], x["kv"], x["indices"], scale, D_V)
    return hopwell.sparse_mla_backward(x["d_out"], x["q"], x["kv"], x["indices"], out, lse, scale, D_V)


def torch_step(x: dict[str, torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Plain PyTorch: gathers the keys, computes two products around a softmax, and differentiates with autograd."""
    q = x["q"].to(dtype, copy=True).requires_grad_()
    kv = x["kv"].to(dtype, copy=True).requires_grad_()
    keys = kv[x["indices"].long()]
    p = torch.softmax(torch.einsum("shd,std->sht", q, keys) * D_QK**-0.5, dim=-1)
    out = torch.einsum("sht,std->shd", p, keys[..., :D_V])
    return torch.autograd.grad(out, (q, kv), x["d_out"].to(dtype))


def attention_against_torch() -> dict[str, Any]:
    """Measures both with the same bfloat16 tensors. It also measures PyTorch after a conversion to float32.

    In float32 PyTorch's products reach this machine's full rate too, so that only the gather and its gradient differ.
    """
    x = sparse_inputs(S_Q)
    as_given, converted = (
        paired_ratio(partial(hopwell_step, x), partial(torch_step, x, dtype), rounds=3)
        for dtype in (torch.bfloat16, torch.float32)
    )
    return {**as_given, "after_conversion_to_float32": converted}


def linear_against_torch() -> dict[str, float]:
    n_out, k = 7168, 16384
    weight = torch.randn(n_out, k, generator=torch.Generator().manual_seed(2))
    codes, scales, global_scale = hopwell.nvfp4_quantize(weight)
    dense = weight.bfloat16()
    x = torch.randn(1, k).bfloat16()
    return paired_ratio(
        lambda: hopwell.nvfp4_linear(x, codes, scales, global_scale),
        lambda: torch.nn.functional.linear(x, dense),
        rounds=9,
    )


def peak_growth(s_q: int) -> int:
    """Returns the growth of this process's peak memory by a forward and backward, without inputs and outputs, in
    bytes.
    """
    x = sparse_inputs(s_q)
    hopwell_step(sparse_inputs(1))  # loads libraries and starts threads and pools
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    results = hopwell_step(x)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    out_bytes = s_q * H_Q * (D_V * 2 + 4 + 4)
    held = out_bytes + sum(r.nbytes for r in results if r is not None)
    return max(0, (after - before) * 1024 - held)


def memory_against_queries() -> dict[str, int]:
    def child(s_q: int) -> int:
        return int(output_of(sys.executable, __file__, "--peak-growth", str(s_q)))

    few, many = 4, 64
    return {
        f"scratch_bytes_s_q_{few}": child(few),
        f"scratch_bytes_s_q_{many}": child(many),
        "gathered_keys_bytes_of_the_difference": (many - few) * TOPK * D_QK * 4,
    }


def shares() -> list[dict[str, Any]]:
    rows = []
    for op, shape, field, bar in SHARES:
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            output_of(COMMAND, "bench", op, "--shape", shape, "--json", file.name)
            result = json.loads(Path(file.name).read_text())["results"][0]
        rows.append({"bar": f"{op} {shape}: {field}", "at_least": bar, "measured": result[field], "details": result})
    return rows


def machine() -> dict[str, Any]:
    models = [
        line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return {
        "date": datetime.date.today().isoformat(),
        "commit": output_of("git", "-C", ROOT, "describe", "--always", "--dirty").strip(),
        "processor": models[0] if models else "unknown",
        "cores": os.cpu_count(),
        "memory_GiB": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "hopwell": hopwell.__version__,
        "build": output_of(COMMAND, "info").split("\n\n")[1].splitlines(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--record", action="store_true", help="write under benchmarks/results/cpu/ instead of build/")
    parser.add_argument("--peak-growth", type=int, metavar="S_Q", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak_growth is not None:
        print(peak_growth(options.peak_growth))
        return 0

    rows = shares()
    linear, attention, memory = linear_against_torch(), attention_against_torch(), memory_against_queries()
    for bar, at_least, result in (
        ("nvfp4_linear 7168x16384, n = 1: times torch bf16", 2.5, linear),
        ("forward + backward, bfloat16: times torch autograd", 3.0, attention),
    ):
        rows.append({"bar": bar, "at_least": at_least, "measured": result["ratio"], "details": result})
    grown = memory["scratch_bytes_s_q_64"] - memory["scratch_bytes_s_q_4"]
    share = max(grown, 0) / memory["gathered_keys_bytes_of_the_difference"]
    bar = "scratch growing with s_q, share of gathered keys"
    rows.append({"bar": bar, "at_most": 0.05, "measured": share, "details": memory})

    width = max(len(row["bar"]) for row in rows)
    held = True
    for row in rows:
        ok = row["measured"] >= row["at_least"] if "at_least" in row else row["measured"] <= row["at_most"]
        held &= ok
        limit = f">= {row['at_least']:g}" if "at_least" in row else f"<= {row['at_most']:g}"
        print(f"{row['bar']:{width}}  {row['measured']:8.3f}  {limit:9}  {'met' if ok else 'NOT MET'}")

    folder = ROOT / ("benchmarks/results/cpu" if options.record else "build/benchmarks")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / (f"{datetime.date.today().isoformat()}.json" if options.record else "cpu.json")
    path.write_text(json.dumps({"machine": machine(), "bars": rows}, indent=1) + "\n")
    print(f"written to {path.relative_to(ROOT)}")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
