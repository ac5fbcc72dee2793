"""The cost of a call from Python: operators on tiny arrays compared with `torch.nn.functional.linear`, in one run.

    python benchmarks/calls.py                    a table, on the CPU
    python benchmarks/calls.py --device cuda      the same on a GPU
    python benchmarks/calls.py --json FILE        and a record

Each operator and `linear` are called in turns, in rounds; a ratio is the median over the rounds. On a GPU the timed
part of a round ends before the wait for its kernels, because only the calls that start kernels are timed. Gradients are
off; there are two threads.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import hopwell
import torch
from hopwell.bench import record
from hopwell.torch import lightning_indexer, nn, nvfp4_linear, nvfp4_quantize, paged_attention, sparse_mla

ROUNDS, CALLS = 31, 200


def seconds_of(call: Callable[[], object], wait: Callable[[], object]) -> float:
    """Returns the seconds of a call, averaged over a round."""
    wait()
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    end = time.perf_counter()
    wait()
    return (end - start) / CALLS


def compare(name: str, ours: Callable[[], object], linear: Callable[[], object], device: str) -> dict[str, object]:
    """Measures the time of a call relative to `linear`."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    for call in (ours, linear):
        seconds_of(call, wait)
    pairs = [(seconds_of(ours, wait), seconds_of(linear, wait)) for _ in range(ROUNDS)]
    ratios = sorted(a / b for a, b in pairs)
    result: dict[str, object] = {
        "name": name,
        "microseconds": 1e6 * median(a for a, _ in pairs),
        "linear_microseconds": 1e6 * median(b for _, b in pairs),
        "of_linear": median(ratios),
        "quartiles": [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]],
    }
    print(f"{name:38} {result['microseconds']:10.1f} {result['linear_microseconds']:10.1f} {result['of_linear']:8.2f}")
    return result


def dtype_on(device: str) -> torch.dtype:
    return torch.bfloat16 if device == "cuda" else torch.float32


def calls(device: str) -> dict[str, Callable[[], object]]:
    """The calls, on arrays so small that the kernels do almost no work."""
    options = {"dtype": dtype_on(device), "device": device}
    d_qk, d_v, heads, topk, d_index = (576, 512, 64, 64, 128) if device == "cuda" else (64, 48, 4, 16, 32)
    weight, scales, global_scale = nvfp4_quantize(torch.randn(64, 64, **options))
    x = torch.randn(1, 64, **options)
    out = torch.empty(1, 64, **options)
    factor = float(global_scale)
    layer = nn.NVFP4Linear.from_linear(torch.nn.Linear(64, 64, bias=False, **options))
    q, kv = torch.randn(1, heads, d_qk, **options), torch.randn(topk, 1, d_qk, **options)
    indices = torch.arange(topk, dtype=torch.int32, device=device).view(1, 1, topk)
    q_index, k_index = torch.randn(1, 4, d_index, **options), torch.randn(topk, d_index, **options)
    weights = torch.rand(1, 4, device=device)
    q_decode, cache = torch.randn(1, 4, 64, **options), torch.randn(2, 16, 4, 64, **options)
    table, length = (torch.tensor(v, dtype=torch.int32, device=device) for v in ([[0, 1]], [20]))
    return {
        "hopwell.nvfp4_linear, out=": lambda: hopwell.nvfp4_linear(x, weight, scales, factor, out=out),
        "hopwell.nvfp4_linear": lambda: hopwell.nvfp4_linear(x, weight, scales, factor),
        "hopwell.torch.nvfp4_linear": lambda: nvfp4_linear(x, weight, scales, factor),
        "hopwell.torch.nn.NVFP4Linear": lambda: layer(x),
        "hopwell.torch.sparse_mla": lambda: sparse_mla(q, kv, indices, 0.1, d_v),
        "hopwell.torch.lightning_indexer": lambda: lightning_indexer(q_index, k_index, weights, topk),
        "hopwell.torch.paged_attention": lambda: paged_attention(q_decode, cache, cache, table, length, 0.1),
    }


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a record to FILE")
    arguments = parser.parse_args()
    device = arguments.device
    torch.set_num_threads(2)
    torch.manual_seed(0)
    x, weight = (torch.randn(n, 64, dtype=dtype_on(device), device=device) for n in (1, 64))
    print(f"{'µs a call':38} {'':>10} {'linear':>10} {'times':>8}")
    results = [
        compare(name, call, lambda: torch.nn.functional.linear(x, weight), device)
        for name, call in calls(device).items()
    ]
    record.write(arguments.json, results, device_of_calls=device)


if __name__ == "__main__":
    main()
