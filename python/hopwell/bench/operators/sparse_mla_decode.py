"""Decode over paged latents beside the same in eager PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

import hopwell

from ..problem import Call, Problem, randn, torch_peer
from ..scale import DEVICE, cold_copies

D_QK, D_V, BLOCK = 576, 512, 64


def _attend(q: Tensor, cache: Tensor, indices: Tensor) -> list[Tensor]:
    keys = cache.view(-1, D_QK)[indices]  # [b, q_len, topk, d_qk]
    scores = torch.einsum("bihd,bijd->bihj", q.float(), keys.float()) * D_QK**-0.5
    out = torch.einsum("bihj,bijd->bihd", scores.softmax(-1), keys[..., :D_V].float())
    return [out.to(q.dtype), scores.logsumexp(-1)]


def sparse_mla_decode(b: int = 8, q_len: int = 1, h_q: int = 8, topk: int = 2048, context: int = 8192) -> Problem:
    """Selected rows of bf16 for b sequences of `context` tokens each, without splits."""
    size = b * q_len * (topk * (2 * D_QK + 4) + h_q * (2 * D_QK + 2 * D_V + 4))
    copies = cold_copies(size)
    q = randn(copies, b, q_len, h_q, D_QK)
    cache = randn(b * context // BLOCK, BLOCK, D_QK)
    first = context * torch.arange(b, device=DEVICE).view(1, b, 1, 1)
    indices = (first + torch.randint(0, context, (copies, b, q_len, topk), device=DEVICE)).int()

    def read(results: list[Tensor]) -> list[Tensor]:
        return results

    def pytorch() -> Call:
        return lambda i: _attend(q[i], cache, indices[i])

    return Problem(
        lambda i: list(
            hopwell.sparse_mla_decode(q[i], cache, indices[i], D_QK**-0.5, keys_per_split=-(-topk // 64) * 64)
        ),
        read,
        [torch_peer("torch eager", pytorch, read)],
        copies=copies,
        bytes=size,
    )
