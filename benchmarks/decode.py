"""The decode operators on a GPU, compared with plain PyTorch: tokens per second.

    python benchmarks/decode.py                 a table
    python benchmarks/decode.py --json FILE     and a record

Both sides are captured in CUDA graphs and replayed in turns; a ratio is the median over neighbouring replays.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import median

import hopwell
import torch
from hopwell.bench import record
from hopwell.torch import nn
from torch import Tensor

ROUNDS = 21


def graph_of(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    for _ in range(2):
        work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def compare(name: str, tokens: int, ours: Callable[[], object], theirs: Callable[[], object]) -> dict[str, object]:
    """Times both graphs. One replay of either produces `tokens` tokens."""
    graphs, times = [graph_of(ours), graph_of(theirs)], [[], []]
    for _ in range(ROUNDS):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        for i, graph in enumerate(graphs):
            events[2 * i].record()
            graph.replay()
            events[2 * i + 1].record()
        torch.cuda.synchronize()
        for i in range(2):
            times[i].append(events[2 * i].elapsed_time(events[2 * i + 1]) * 1e-3)
    ratio = median(b / a for a, b in zip(*times, strict=True))
    result = {
        "name": name,
        "tokens_per_s": tokens / median(times[0]),
        "pytorch_tokens_per_s": tokens / median(times[1]),
        "times_as_fast": ratio,
    }
    print(f"{name:58} {result['tokens_per_s']:12,.0f} {result['pytorch_tokens_per_s']:12,.0f} {ratio:8.2f}")
    return result


class FeedForward(torch.nn.Module):
    """Layers with the sizes of a large model's feed-forward networks: decoding reads most of its bytes for them."""

    def __init__(self, layers: int, width: int, inner: int) -> None:
        super().__init__()
        options = {"bias": False, "device": "cuda", "dtype": torch.bfloat16}
        self.up = torch.nn.ModuleList(torch.nn.Linear(width, inner, **options) for _ in range(layers))
        self.down = torch.nn.ModuleList(torch.nn.Linear(inner, width, **options) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(torch.nn.functional.gelu(up(x)))
        return x


@torch.no_grad()
def quantised_layers(n: int) -> dict[str, object]:
    dense = FeedForward(4, 4096, 14336)
    quantised = FeedForward(0, 1, 1)
    for name in ("up", "down"):
        layers = (nn.NVFP4Linear.from_linear(layer) for layer in getattr(dense, name))
        setattr(quantised, name, torch.nn.ModuleList(layers))
    x = torch.randn(n, 4096, dtype=torch.bfloat16, device="cuda")
    return compare(
        f"4 feed-forward layers 4096 x 14336, NVFP4 | bf16, batch {n}", n, lambda: quantised(x), lambda: dense(x)
    )


@torch.no_grad()
def relative_attention(b: int, context: int, h: int, d: int) -> dict[str, object]:
    block, options = 16, {"dtype": torch.bfloat16, "device": "cuda"}
    width = context // block
    k_cache, v_cache = torch.randn(2, b * width, block, h, d, **options).unbind(0)
    tables = torch.randperm(b * width, device="cuda").view(b, width).int()
    lengths = torch.full((b,), context, dtype=torch.int32, device="cuda")
    q, u, w = torch.randn(b, h, d, **options), torch.randn(h, d, **options), torch.randn(h, d, **options)
    r, index = torch.randn(h, context, d, **options), tables.long()

    def ours() -> Tensor:
        return hopwell.paged_attention(q, k_cache, v_cache, tables, lengths, d**-0.5, pos_bias_u=u, pos_bias_v=w, r=r)[
            0
        ]

    def theirs() -> Tensor:
        """Gathers the pages, then adds Dai et al.'s two terms. All contexts are full, so that no mask is needed."""
        k, v = (cache[index].flatten(1, 2) for cache in (k_cache, v_cache))
        content = torch.einsum("bhd,bjhd->bhj", q + u, k)
        position = torch.einsum("bhd,hed->bhe", q + w, r).flip(-1)
        return torch.einsum("bhj,bjhd->bhd", ((content + position) * d**-0.5).softmax(-1), v)

    error = (ours().double() - theirs().double()).norm() / theirs().double().norm()
    if not error < 2e-2:  # PyTorch rounds more often
        raise SystemExit(f"paged_attention differs from PyTorch by {error:.1e}")
    return compare(f"relative attention, {b} x {context} tokens, {h} heads of {d}", b, ours, theirs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a record to FILE")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("decode.py: PyTorch sees no GPU")
    torch.manual_seed(0)
    print(f"{'':58} {'tokens/s':>12} {'PyTorch':>12} {'times':>8}")
    results = [quantised_layers(n) for n in (1, 8, 16, 32, 64, 128)]
    results += [relative_attention(*shape) for shape in ((1, 4096, 16, 64), (32, 4096, 16, 64), (16, 4096, 32, 128))]
    record.write(options.json, results)


if __name__ == "__main__":
    main()
