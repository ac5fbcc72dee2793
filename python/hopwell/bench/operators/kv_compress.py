"""DeepSeek-V4's compressor beside the same in eager PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import hopwell

from ..problem import Call, Problem, first, measured, randn, torch_peer
from ..scale import DEVICE, cold_copies

POOLS = [{}, {"d": 128}, {"ratio": 128, "overlap": 0}, {"s": 65536}, {"s": 65536, "ratio": 128, "overlap": 0}]


def _blocks(x: Tensor, ratio: int) -> Tensor:
    """[blocks, ratio, w], without the tokens of no whole block."""
    return x[: len(x) // ratio * ratio].reshape(-1, ratio, x.shape[1])


def _windows(blocks: Tensor, fill: float) -> Tensor:
    """[blocks, 2·ratio, d]: the previous block's first half of the columns, then the block's own second half."""
    before, own = blocks.chunk(2, dim=-1)
    missing = torch.full_like(before[:1], fill)
    return torch.cat([torch.cat([missing, before[:-1]]), own], dim=1)


def _pooled(kv: Tensor, gate: Tensor, bias: Tensor, ratio: int, overlap: bool) -> Tensor:
    """In float32 until the end."""
    values, logits = _blocks(kv.float(), ratio), _blocks(gate.float(), ratio) + bias
    if overlap:
        values, logits = _windows(values, 0.0), _windows(logits, -torch.inf)
    return torch.sum(logits.softmax(1) * values, 1).to(kv.dtype)


@measured(POOLS, on_cpu=[{"s": 1024}], tiny={"s": 64, "d": 32})
def kv_compress(s: int = 8192, d: int = 512, ratio: int = 4, overlap: int = 1) -> Problem:
    """Pools blocks of tokens into compressed keys."""
    w = 2 * d if overlap else d
    size = 2 * (2 * s * w + s // ratio * d)
    copies = cold_copies(size)
    kv, gate, bias = randn(copies, s, w), randn(copies, s, w), torch.randn(ratio, w, device=DEVICE)
    options: dict[str, Any] = {"position_bias": bias, "overlap": bool(overlap)}

    def pytorch() -> Call:
        return lambda i: [_pooled(kv[i], gate[i], bias, ratio, bool(overlap))]

    return Problem(
        lambda i: [hopwell.kv_compress(kv[i], gate[i], ratio, **options)],
        first(1),
        [torch_peer("torch eager", pytorch, first(1))],
        copies=copies,
        bytes=size,
    )


@measured(POOLS, on_cpu=[{"s": 1024}], tiny={"s": 64, "d": 32})
def kv_compress_backward(s: int = 8192, d: int = 512, ratio: int = 4, overlap: int = 1) -> Problem:
    """Gradients of the pooling."""
    w = 2 * d if overlap else d
    size = 2 * (4 * s * w + s // ratio * d)
    copies = cold_copies(size)
    kv, gate, bias = randn(copies, s, w), randn(copies, s, w), torch.randn(ratio, w, device=DEVICE)
    d_out = randn(copies, s // ratio, d)
    options: dict[str, Any] = {"position_bias": bias, "overlap": bool(overlap)}

    def pytorch() -> Call:
        def forward_and_backward(i: int) -> list[Tensor]:
            leaves = [x.detach().requires_grad_() for x in (kv[i], gate[i], bias)]
            out = _pooled(leaves[0], leaves[1], leaves[2], ratio, bool(overlap))
            return list(torch.autograd.grad(out, leaves, d_out[i]))

        return forward_and_backward

    return Problem(
        lambda i: list(hopwell.kv_compress_backward(d_out[i], kv[i], gate[i], ratio, **options)),
        first(3),
        [torch_peer("torch eager", pytorch, first(3), "forward and backward")],
        copies=copies,
        bytes=size,
    )
