"""The indexer over a paged cache beside DeepGEMM's logits, and beside the same in eager PyTorch."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

import hopwell

from ..problem import DEEP_GEMM, Call, Peer, Problem, measured, randn, torch_peer
from ..scale import DEVICE, cold_copies
from .lightning_indexer import to_float8

D, BLOCK = 128, 64


def _cache_of(codes: Tensor, scales: Tensor, order: Tensor) -> Tensor:
    """Blocks [n, BLOCK, D + 4]: keys [n * BLOCK, D] of float8 with scales, the blocks in this order."""
    n = len(order)
    rows = codes.view(torch.uint8).view(n, BLOCK * D), scales.float().contiguous().view(torch.uint8).view(n, 4 * BLOCK)
    return torch.cat(rows, 1)[order].view(n, BLOCK, D + 4)


@measured(
    [
        {},
        {"context": 8192},
        {"context": 131072},
        {"context": 1048576},
        {"b": 8},
        {"b": 64, "context": 8192},
        {"b": 64, "context": 8192, "q_len": 2},
        {"fp8": 0},
    ],
    on_cpu=[{"context": 8192}],
    tiny={"b": 2, "q_len": 2, "context": 256, "h_index": 4, "topk": 64},
)
def paged_lightning_indexer(
    b: int = 1, q_len: int = 1, context: int = 65536, h_index: int = 64, topk: int = 2048, fp8: int = 1
) -> Problem:
    """Selects among `context` keys of each of b sequences. `fp8` = 0: queries and keys are bf16."""
    pages = context // BLOCK
    size = b * context * (D + 4 if fp8 else 2 * D)
    copies = cold_copies(size)
    q, keys = randn(b, q_len, h_index, D), randn(copies, b * context, D)
    weights = randn(b, q_len, h_index).float() * (h_index * D) ** -0.5
    order = torch.randperm(b * pages, device=DEVICE)
    tables = torch.argsort(order).int().view(b, pages)
    lens = torch.full((b, q_len), context, dtype=torch.int32, device=DEVICE)
    if fp8:
        q = q.to(torch.float8_e4m3fn)
        rows = [to_float8(k) for k in keys]
        caches = [_cache_of(codes, scales, order) for codes, scales in rows]
        keys = torch.stack([(codes.float() * scales[..., None]).bfloat16() for codes, scales in rows])
    else:
        caches = [k.view(-1, BLOCK, D)[order] for k in keys]

    def read(results: list[Tensor]) -> list[Tensor]:
        """Sorted scores: a package may choose either of two keys with nearly equal scores."""
        return [results[1].float().sort().values]

    def eager(i: int) -> list[Tensor]:
        """With products of bf16, after float8 codes were decoded."""
        dots = torch.einsum("bihd,btd->biht", q.bfloat16(), keys[i].view(b, context, D)).relu_()
        scores = torch.einsum("bih,biht->bit", weights, dots.float())
        best = scores.topk(min(topk, context))
        return [best.indices, best.values]

    def pytorch() -> Call:
        return eager

    def deep_gemm() -> Call:
        module = import_module("deep_gemm")
        schedule = module.get_paged_mqa_logits_metadata(lens, BLOCK, module.get_num_sms())
        if hasattr(module, "fp8_paged_mqa_logits"):
            logits_of = module.fp8_paged_mqa_logits
        else:  # the fork of SGLang
            logits_of = module.fp8_fp4_paged_mqa_logits
        rows_of_weights = weights.view(-1, h_index)

        def logits_and_topk(i: int) -> Any:
            logits = logits_of(q, caches[i][:, :, None], rows_of_weights, lens, tables, schedule, context)
            return logits.topk(min(topk, context), sorted=False)

        return logits_and_topk

    def read_deep_gemm(results: Any) -> list[Tensor]:
        return [results.values.view(b, q_len, -1).sort().values]

    peers = [torch_peer("torch eager", pytorch, read)]
    if fp8:
        note = "stores all logits; torch.topk selects, in no fixed order of ties; the schedule is not timed"
        peers.insert(0, Peer("DeepGEMM + torch.topk", DEEP_GEMM, deep_gemm, read_deep_gemm, note))
    return Problem(
        lambda i: list(hopwell.paged_lightning_indexer(q, caches[i], weights, topk, tables, lens)),
        read,
        peers,
        copies=copies,
        bytes=size + 4 * b * q_len * (2 * topk + h_index) + q.numel() * q.element_size(),
    )
