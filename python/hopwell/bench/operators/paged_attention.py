"""Decode attention over a paged KV cache."""

from __future__ import annotations

from importlib import import_module

import torch
from torch.nn import functional

import hopwell

from ..problem import Call, Peer, Problem, first, measured, randn, torch_peer
from ..scale import DEVICE, cold_copies


@measured(
    [
        {},
        {"b": 32, "h_q": 16, "h_kv": 16, "d": 64},
        {"context": 8192, "shortest": 128, "h_q": 16, "h_kv": 16, "d": 64},
        {"context": 512, "longest": 65536, "h_q": 16, "h_kv": 16, "d": 64},
        {"context": 512, "longest": 65536},
        {"b": 1, "context": 32768, "h_q": 16, "h_kv": 16, "d": 64},
        {"b": 1, "context": 1000, "h_q": 16, "h_kv": 16, "d": 64},
        {"b": 16, "context": 8192, "h_kv": 8},
    ],
    on_cpu=[{"b": 8, "h_q": 16, "h_kv": 16, "d": 64}],
    tiny={"b": 2, "context": 64, "h_q": 4, "h_kv": 4, "d": 64},
)
def paged_attention(
    b: int = 64, context: int = 4096, h_q: int = 32, h_kv: int = 32, d: int = 128, longest: int = 0, shortest: int = 0
) -> Problem:
    """Attention without a bias. Lengths run from `shortest` to `context`; `longest` is the first sequence's length."""
    block = 16
    lengths = [context] * b
    if shortest:
        lengths = [shortest + (context - shortest) * (i * 37 % b) // max(1, b - 1) for i in range(b)]
    lengths[0] = longest or lengths[0]
    pages = [-(-n // block) for n in lengths]
    total, widest = sum(pages), max(pages)
    copies = cold_copies(4 * total * block * h_kv * d)
    q, caches = randn(b, h_q, d), [randn(2, total, block, h_kv, d).unbind() for _ in range(copies)]
    order = torch.randperm(total, device=DEVICE).int()
    ends = torch.tensor(pages).cumsum(0).tolist()
    rows = [order[end - n : end] for end, n in zip(ends, pages, strict=True)]
    tables = torch.stack([functional.pad(row, (0, widest - len(row))) for row in rows])
    context_lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)

    def flashinfer() -> Call:
        wrapper_class = import_module("flashinfer").BatchDecodeWithPagedKVCacheWrapper
        workspace = torch.zeros(256 << 20, dtype=torch.uint8, device=DEVICE)
        wrapper = wrapper_class(workspace, "NHD", use_tensor_cores=h_q >= 4 * h_kv)
        begins = torch.tensor([0, *ends], dtype=torch.int32)
        last = torch.tensor([(n - 1) % block + 1 for n in lengths], dtype=torch.int32)
        wrapper.plan(
            begins.to(DEVICE), order, last.to(DEVICE), h_q, h_kv, d, block,
            q_data_type=q.dtype, kv_data_type=q.dtype, sm_scale=d**-0.5,
        )  # fmt: skip
        return lambda i: [wrapper.run(q, caches[i])]

    def pytorch() -> Call:
        if len(set(lengths)) > 1:
            raise ValueError("not for sequences of several lengths")
        index, x = tables.long(), q[:, :, None]
        k, v = (
            [pair[j][index].flatten(1, 2)[:, :context].transpose(1, 2).contiguous() for pair in caches] for j in (0, 1)
        )
        sdpa = functional.scaled_dot_product_attention
        return lambda i: [sdpa(x, k[i], v[i], enable_gqa=h_q > h_kv)[:, :, 0]]

    return Problem(
        lambda i: hopwell.paged_attention(q, caches[i][0], caches[i][1], tables, context_lens, d**-0.5),
        first(1),
        [
            Peer("FlashInfer", "flashinfer-python", flashinfer, first(1), "planned beforehand for these lengths"),
            torch_peer("torch SDPA", pytorch, first(1), "contiguous K and V, no pages"),
        ],
        copies=copies,
        bytes=4 * sum(lengths) * h_kv * d,
    )
