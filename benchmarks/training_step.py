"""Sparse attention of one layer in a training step, on a GPU: its parts, their lower bounds, and dense attention.

    python benchmarks/training_step.py                         DeepSeek-V3.2's and GLM-5's shapes, s 32 K … 128 K
    python benchmarks/training_step.py --model glm-5 --s 32768 one of them
    python benchmarks/training_step.py --warm-up               the dense warm-up of the indexer instead
    python benchmarks/training_step.py --json FILE             and a record

The step is the part of a layer that is added to a transformer's projections: the indexer's scores and selection, the
forward, the distribution that the indexer learns from, the indexer's gradients, and the attention's gradients. All s
tokens are one causal sequence. In the warm-up every query attends to all keys that it sees, and only the indexer
learns. A part has two lower bounds of its time: its matrix products at the rate of a bf16 product of 8192³, which is
timed in the same rounds, and its inputs and outputs at the rate of a copy. Its floor is the larger bound. Dense
attention is PyTorch's causal attention with separate keys and values for every head (192 and 128 numbers), forward and
backward. If the heads do not all fit into memory, they are processed in several groups.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import hopwell
import torch
from hopwell.bench import record
from hopwell.torch import ops
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

D_QK, D_V, D_INDEX = 576, 512, 128


@dataclass
class Model:
    h_q: int
    h_index: int
    topk: int = 2048


MODELS = {"deepseek-v3.2": Model(128, 64), "glm-5": Model(64, 32)}


@dataclass
class Part:
    name: str
    call: Callable[[], object]
    operations: float
    bytes: float


def size(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def step_parts(model: Model, s: int, device: str) -> list[Part]:
    """Returns the calls of a step in order. Each uses the results of earlier calls."""

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=device)

    h, topk, scale = model.h_q, model.topk, 192**-0.5
    q, kv, d_out = randn(s, h, D_QK).mul_(0.2), randn(s, D_QK), randn(s, h, D_V)
    q_index, k_index = randn(s, model.h_index, D_INDEX), randn(s, D_INDEX)
    weights = torch.randn(s, model.h_index, device=device) * (model.h_index * D_INDEX) ** -0.5
    indices, scores = ops.lightning_indexer(q_index, k_index, weights, topk, q_start=0)
    out, _, lse = ops.sparse_mla(q, kv, indices, scale, D_V, indices_ascending=True)
    target = ops.attention_distribution(q, kv, indices, lse, scale, normalize="l1")
    pairs = int((indices >= 0).sum())  # pairs of a query and a key that it attends to
    scored = s * (s + 1) // 2
    selection = size(indices, scores)
    index_inputs = size(q_index, k_index, weights)
    return [
        Part(
            "indexer, scores and selection",
            lambda: ops.lightning_indexer(q_index, k_index, weights, topk, q_start=0),
            2 * scored * model.h_index * D_INDEX,
            index_inputs + selection,
        ),
        Part(
            "attention, forward",
            lambda: ops.sparse_mla(q, kv, indices, scale, D_V, indices_ascending=True),
            2 * pairs * h * (D_QK + D_V),
            size(q, kv, indices, out, lse),
        ),
        Part(
            "attention distribution",
            lambda: ops.attention_distribution(q, kv, indices, lse, scale, normalize="l1"),
            2 * pairs * h * D_QK,
            size(q, kv, indices, lse, target),
        ),
        Part(
            "indexer, loss and gradients",
            lambda: ops.lightning_indexer_backward(target, q_index, k_index, weights, indices),
            2 * pairs * model.h_index * D_INDEX * 3,
            2 * index_inputs + size(indices, target),
        ),
        Part(
            "attention, backward",
            lambda: hopwell.sparse_mla_backward(d_out, q, kv, indices, out, lse, scale, indices_ascending=True),
            2 * pairs * h * (3 * D_QK + 2 * D_V),
            size(d_out, q, kv, indices, out, lse, q) + 4 * kv.numel(),
        ),
    ]


def warm_up_parts(model: Model, s: int, device: str) -> list[Part]:
    """Returns the calls of a step of the indexer's dense warm-up: attention, then the indexer's loss and gradients."""

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=device)

    h, scale = model.h_q, 192**-0.5
    q, kv = randn(s, h, D_QK).mul_(0.2), randn(s, D_QK)
    q_index, k_index = randn(s, model.h_index, D_INDEX), randn(s, D_INDEX)
    weights = torch.randn(s, model.h_index, device=device) * (model.h_index * D_INDEX) ** -0.5
    out, _, lse = ops.sparse_mla(q, kv, None, scale, D_V, q_start=0)
    pairs = s * (s + 1) // 2
    index_inputs = size(q_index, k_index, weights)
    return [
        Part(
            "attention, forward",
            lambda: ops.sparse_mla(q, kv, None, scale, D_V, q_start=0),
            2 * pairs * h * (D_QK + D_V),
            size(q, kv, out, lse),
        ),
        Part(
            "indexer, dense loss and gradients",
            lambda: ops.indexer_dense_loss(q, kv, lse, q_index, k_index, weights, scale, q_start=0),
            2 * pairs * (h * D_QK + model.h_index * D_INDEX * 3),
            size(q, kv, lse) + 2 * index_inputs,
        ),
    ]


def seconds(call: Callable[[], object], rounds: int) -> float:
    """Returns the median of some calls' times."""
    call()
    times = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3)
    return median(times)


def rates() -> tuple[float, float]:
    """Returns the rates of a product (operations per second) and of a copy (bytes per second)."""
    a, b = torch.randn(2, 8192, 8192, dtype=torch.bfloat16, device="cuda")
    x = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    return 2 * 8192**3 / seconds(lambda: a @ b, 9), 2 * x.numel() / seconds(lambda: y.copy_(x), 9)


def dense_seconds(h: int, s: int, rounds: int, heads_at_once: int = 16) -> tuple[float, str]:
    """Times forward and backward of dense causal attention over h heads, and names the PyTorch kernel that ran."""
    q, k = (
        torch.randn(1, heads_at_once, s, 192, dtype=torch.bfloat16, device="cuda", requires_grad=True) for _ in range(2)
    )
    v = torch.randn(1, heads_at_once, s, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):

        def step(backend: SDPBackend = backend) -> None:
            with sdpa_kernel(backend):
                out = scaled_dot_product_attention(q, k, v, is_causal=True)
            torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

        try:
            return seconds(step, rounds) * h / heads_at_once, backend.name.lower()
        except RuntimeError:
            continue
    raise SystemExit("training_step.py: PyTorch has no attention kernel for heads of 192 and 128 numbers here")


def measure(
    name: str, s: int, rounds: int, dense: bool, make: Callable[[Model, int, str], list[Part]]
) -> dict[str, object]:
    model, (operations_rate, bytes_rate) = MODELS[name], rates()
    parts, results = make(model, s, "cuda"), []
    torch.cuda.synchronize()
    inputs, peaks = torch.cuda.memory_allocated(), []
    for part in parts:
        torch.cuda.reset_peak_memory_stats()
        taken = seconds(part.call, rounds)
        peaks.append(torch.cuda.max_memory_allocated() - inputs)
        by_operations, by_bytes = part.operations / operations_rate, part.bytes / bytes_rate
        floor = max(by_operations, by_bytes)
        results.append(
            {
                "part": part.name,
                "ms": 1e3 * taken,
                "floor_ms": 1e3 * floor,
                "share": floor / taken,
                "peak_bytes_beside_inputs": peaks[-1],
            }
        )
        print(f"{name:14} {s:7} {part.name:32} {1e3 * taken:9.2f} {1e3 * floor:9.2f} {floor / taken:7.3f}", flush=True)
    total = sum(float(str(r["ms"])) for r in results)
    floors = sum(float(str(r["floor_ms"])) for r in results)
    result: dict[str, object] = {
        "model": name,
        "s": s,
        "parts": results,
        "ms": total,
        "share": floors / total,
        "peak_bytes_beside_inputs": max(peaks),
    }
    print(f"{name:14} {s:7} {'the step':32} {total:9.2f} {floors:9.2f} {floors / total:7.3f}", flush=True)
    del parts, part
    torch.cuda.empty_cache()
    if dense:
        taken, kernel = dense_seconds(model.h_q, s, max(1, rounds // 3))
        result |= {"dense_ms": 1e3 * taken, "dense_kernel": kernel, "times_as_fast_as_dense": 1e3 * taken / total}
        print(f"{name:14} {s:7} {'dense, ' + kernel:32} {1e3 * taken:9.2f}           {1e3 * taken / total:7.2f} x")
        torch.cuda.empty_cache()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=MODELS, help="may be repeated")
    parser.add_argument("--s", action="append", type=int, metavar="TOKENS", help="may be repeated")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warm-up", action="store_true", help="the indexer's dense warm-up, not the sparse step")
    parser.add_argument("--no-dense", action="store_true", help="without dense attention")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a record to FILE")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("training_step.py: PyTorch sees no GPU")
    torch.manual_seed(0)
    print(f"{'model':14} {'s':>7} {'part':32} {'ms':>9} {'floor':>9}   share")
    results: list[dict[str, object]] = []
    for name in options.model or MODELS:
        for s in options.s or [32768, 65536, 131072]:
            parts = warm_up_parts if options.warm_up else step_parts
            results.append(measure(name, s, options.rounds, not (options.no_dense or options.warm_up), parts))
            record.write(options.json, results, rounds=options.rounds, stage="warm-up" if options.warm_up else "sparse")


if __name__ == "__main__":
    main()
