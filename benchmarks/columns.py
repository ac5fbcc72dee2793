"""nvfp4_linear with many columns on a GPU, compared with two other ways to the product: nvfp4_dequantize followed by
PyTorch's product, and PyTorch's product alone with bf16 weights.

    python benchmarks/columns.py                 a table
    python benchmarks/columns.py --json FILE     and a record

All of them are captured in CUDA graphs and replayed in turns. A graph uses several copies of the weights, which
together are larger than the L2 cache.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import median

import hopwell
import torch
from hopwell.bench import record
from hopwell.torch import ops
from torch import Tensor

SHAPES = [(28672, 4096), (7168, 16384), (8192, 8192), (4096, 7168), (7168, 2048), (1536, 7168)]
COLUMNS = [17, 32, 64, 96, 128, 256, 512, 1024, 2048, 4096]
ROUNDS = 15
MOST_OF_SM80 = 256  # columns; sm80 processes 16 at a time
L2_BYTES = 100e6  # smallest size of all weights that a graph reads


def graph_of(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def microseconds(works: dict[str, Callable[[], object]], calls: int) -> dict[str, float]:
    """Returns the microseconds of a call in each graph of `calls` calls: the median over replays in turns."""
    graphs = {name: graph_of(work) for name, work in works.items()}
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times[name].append(begin.elapsed_time(end) * 1e3 / calls)
    return {name: median(of) for name, of in times.items()}


def measure(rows: int, k: int, n: int, backends: list[str]) -> dict[str, object]:
    copies = max(2, round(L2_BYTES / (rows * k * 9 / 16)))
    weights: list[tuple[Tensor, Tensor, Tensor]] = []
    for _ in range(copies):
        weights.append(ops.nvfp4_quantize(torch.randn(rows, k, dtype=torch.bfloat16, device="cuda")))
    x = torch.randn(n, k, dtype=torch.bfloat16, device="cuda")
    dense = [ops.nvfp4_dequantize(*w, dtype="bfloat16") for w in weights[:2]]

    def by(backend: str) -> Callable[[], object]:
        return lambda: [ops.nvfp4_linear(x, *w, backend=backend) for w in weights]

    expected = x.double() @ dense[0].double().t()
    works: dict[str, Callable[[], object]] = {}
    error = 0.0
    for backend in backends:
        if backend == "sm80" and n > MOST_OF_SM80:
            continue
        try:
            got = ops.nvfp4_linear(x, *weights[0], backend=backend).double()
        except hopwell.Error:  # this backend does not support the call
            continue
        error = max(error, float((got - expected).norm() / expected.norm()))
        works[backend] = by(backend)
    works["dequantise"] = lambda: [
        torch.nn.functional.linear(x, ops.nvfp4_dequantize(*w, dtype="bfloat16")) for w in weights
    ]
    works["matmul"] = lambda: [torch.nn.functional.linear(x, dense[i % 2]) for i in range(copies)]
    us = microseconds(works, copies)
    result: dict[str, object] = {"rows": rows, "k": k, "n": n, "us": us, "error": error}
    best = min(us[backend] for backend in backends if backend in us)
    print(
        f"{rows:6} x {k:5}, n {n:4}  "
        + "  ".join(f"{name} {time:7.1f}" for name, time in us.items())
        + f"  {2e-6 * rows * k * n / best:4.0f} TFLOP/s, {us['dequantise'] / best:5.2f} times as fast as dequantise, "
        f"{us['matmul'] / best:5.2f} as matmul, error {error:.1e}",
        flush=True,
    )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a record to FILE")
    parser.add_argument("--backend", action="append", help="default: sm90 and sm80")
    parser.add_argument("--columns", type=int, nargs="*", default=COLUMNS)
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="number of shapes to measure")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("columns.py: PyTorch sees no GPU")
    torch.manual_seed(0)
    results = [
        measure(rows, k, n, arguments.backend or ["sm90", "sm80"])
        for rows, k in SHAPES[: arguments.shapes]
        for n in arguments.columns
    ]
    record.write(arguments.json, results)


if __name__ == "__main__":
    main()
