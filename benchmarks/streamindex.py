"""The indexer of DeepSeek-V4-Flash at the lengths that StreamIndex published, on one GPU.

    python benchmarks/streamindex.py                     32,768 to 262,144 tokens
    python benchmarks/streamindex.py --tokens 1024       that length; without a GPU too
    python benchmarks/streamindex.py --json FILE         and a record

64 heads of 128, one key for 4 tokens, topk 512, bf16, causal. The published times are those of StreamIndex's README
(github.com/RightNow-AI/StreamIndex, arXiv 2605.02568): bf16 on one H200 SXM. They were not measured by this program.
A ratio means something only on that card. Like StreamIndex's program, this one warms up once and takes the mean of 3
calls in a row.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import hopwell.torch
import torch
from hopwell.bench import record

HEADS, DIM, STRIDE, TOPK, CALLS = 64, 128, 4, 512, 3
PUBLISHED_MS = {32768: 31.0, 65536: 122.0, 131072: 485.0, 262144: 1935.0}


def seconds_a_call(tokens: int, device: torch.device) -> tuple[float, int]:
    """Returns the time of a call, and the largest number of bytes in PyTorch's allocator."""
    options = {"dtype": torch.bfloat16, "device": device}
    q = torch.randn(tokens, HEADS, DIM, **options)
    k = torch.randn(tokens // STRIDE, DIM, **options)
    weights = torch.randn(tokens, HEADS, **options) * (HEADS * DIM) ** -0.5

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    def call() -> torch.Tensor:
        return hopwell.torch.lightning_indexer(q, k, weights, TOPK, q_start=0, kv_stride=STRIDE)[0]

    indices = call()
    positions = torch.arange(tokens, device=device)
    chosen = (indices >= 0).sum(1)
    if not torch.equal(chosen, ((positions + 1) // STRIDE).clamp(max=TOPK)):
        raise SystemExit("streamindex.py: a query has the wrong number of keys")
    if int((indices.amax(1) - (positions + 1) // STRIDE).amax()) >= 0:
        raise SystemExit("streamindex.py: a query has a key of its future")
    del indices, chosen, positions
    wait()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    for _ in range(CALLS):
        call()
    wait()
    seconds = (time.perf_counter() - begin) / CALLS
    return seconds, torch.cuda.max_memory_allocated() if device.type == "cuda" else 0


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=list(PUBLISHED_MS), metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a record to FILE")
    options = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    results: list[dict[str, object]] = []
    print(f"{'tokens':>8} {'ms':>10} {'peak GB':>8} {'StreamIndex ms (published)':>27}")
    for tokens in options.tokens:
        seconds, peak = seconds_a_call(tokens, device)
        published = PUBLISHED_MS.get(tokens)
        print(f"{tokens:8} {1e3 * seconds:10.1f} {peak / 1e9:8.2f} {published or '':>27}", flush=True)
        results.append({"tokens": tokens, "seconds": seconds, "peak_bytes": peak, "published_ms": published})
    record.write(options.json, results)


if __name__ == "__main__":
    main()
