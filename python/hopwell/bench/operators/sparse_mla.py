"""Sparse attention, forward and backward, and the attention distribution."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn import functional

import hopwell

from ..problem import (
    AT_ONCE,
    CUDNN,
    FLASH_MLA,
    Call,
    Peer,
    Problem,
    chunks,
    cudnn_dsa,
    distinct,
    first,
    flash_mla,
    randn,
    torch_peer,
)
from ..scale import DEVICE, cold_copies


def sparse_inputs(s_q: int, h_q: int, s_kv: int, topk: int, d_qk: int) -> SimpleNamespace:
    """Random queries and keys, and for each query distinct keys in random order."""
    q, kv = randn(s_q, h_q, d_qk), randn(s_kv, 1, d_qk)
    return SimpleNamespace(q=q, kv=kv, indices=distinct(s_q, s_kv, topk), scale=d_qk**-0.5)


def sparse_mla_forward(s_q: int = 4096, h_q: int = 128, s_kv: int = 8192, topk: int = 2048, d_qk: int = 576) -> Problem:
    """Sparse attention over the selected keys."""
    x = sparse_inputs(s_q, h_q, s_kv, topk, d_qk)

    def flashmla() -> Call:
        (module, options), indices = flash_mla(), x.indices[:, None]
        return lambda _: module.flash_mla_sparse_fwd(x.q, x.kv, indices, x.scale, 512, **options)

    def pytorch() -> Call:
        def sdpa(_: int) -> list[Tensor]:
            out = torch.empty(s_q, h_q, 512, dtype=x.q.dtype, device=DEVICE)
            for some in chunks(s_q):
                k = x.kv[:, 0][x.indices[some].long()][:, None]
                out[some] = functional.scaled_dot_product_attention(x.q[some, None], k, k[..., :512])[:, 0]
            return [out]

        return sdpa

    return Problem(
        lambda _: hopwell.sparse_mla_forward(x.q, x.kv, x.indices, x.scale),
        first(1),
        [
            Peer("FlashMLA", FLASH_MLA, flashmla, first(1)),
            torch_peer("torch gather + SDPA", pytorch, first(1), f"{AT_ONCE} queries at a time"),
        ],
        operations=2 * s_q * h_q * topk * (d_qk + 512),
    )


def sparse_mla_backward(
    s_q: int = 4096, h_q: int = 128, s_kv: int = 8192, topk: int = 2048, d_qk: int = 576
) -> Problem:
    """The gradients of sparse attention."""
    x = sparse_inputs(s_q, h_q, s_kv, topk, d_qk)
    out, _, lse = hopwell.sparse_mla_forward(x.q, x.kv, x.indices, x.scale)
    d_out = randn(s_q, h_q, 512)

    def cudnn() -> Call:
        dsa = cudnn_dsa()
        kv, sink = x.kv[:, 0], torch.full((h_q,), -1e30, device=DEVICE)
        return lambda _: dsa.sparse_attention_backward_wrapper(
            x.q, kv, out, d_out, lse, sink, x.indices, softmax_scale=x.scale
        )

    def pytorch() -> Call:
        def gradients(_: int) -> list[Tensor]:
            dq, dkv = torch.empty_like(x.q), torch.zeros(s_kv, d_qk, device=DEVICE)
            for some in chunks(s_q):
                rows, q, g = x.indices[some].long(), x.q[some], d_out[some]
                k = x.kv[:, 0][rows]
                p = torch.exp(torch.bmm(q, k.mT).float() * x.scale - lse[some, :, None])
                delta = (g.float() * out[some].float()).sum(-1, keepdim=True)
                ds = (p * (torch.bmm(g, k[..., :512].mT).float() - delta) * x.scale).to(q.dtype)
                dq[some] = torch.bmm(ds, k)
                dk = torch.bmm(ds.mT, q).float()
                dk[..., :512] += torch.bmm(p.to(q.dtype).mT, g)
                dkv.index_add_(0, rows.flatten(), dk.flatten(0, 1))
            return [dq, dkv[:, None]]

        return gradients

    return Problem(
        lambda _: hopwell.sparse_mla_backward(d_out, x.q, x.kv, x.indices, out, lse, x.scale),
        first(2),
        [
            Peer(
                "cuDNN front end",
                CUDNN,
                cudnn,
                lambda r: [r["dq"], r["dkv"][:, None]],
                "writes dKV in bf16, always has a sink",
            ),
            torch_peer(
                "torch gather + products", pytorch, first(2), f"{AT_ONCE} queries at a time; written out, no autograd"
            ),
        ],
        operations=2 * s_q * h_q * topk * (3 * d_qk + 2 * 512),
        tolerance=2e-2,
    )


def attention_distribution(
    s_q: int = 4096, h_q: int = 128, s_kv: int = 8192, topk: int = 2048, d_qk: int = 576
) -> Problem:
    """The attention distribution, normalised: the target of the indexer's loss."""
    x = sparse_inputs(s_q, h_q, s_kv, topk, d_qk)
    lse = hopwell.sparse_mla_forward(x.q, x.kv, x.indices, x.scale)[2]

    def cudnn() -> Call:
        dsa = cudnn_dsa()
        q, kv, lse_, indices = x.q[None], x.kv[:, 0][None], lse[None], x.indices[None]
        return lambda _: dsa.sparse_attn_score_recompute_wrapper(q, kv, lse_, indices, x.scale, qhead_per_kv_head=h_q)

    def pytorch() -> Call:
        def distribution(_: int) -> list[Tensor]:
            attn = torch.empty(s_q, topk, device=DEVICE)
            for some in chunks(s_q):
                scores = torch.bmm(x.q[some], x.kv[:, 0][x.indices[some].long()].mT).float()
                attn[some] = torch.exp(scores * x.scale - lse[some, :, None]).sum(1)
            return [functional.normalize(attn, p=1, dim=-1)]

        return distribution

    return Problem(
        lambda _: [hopwell.attention_distribution(x.q, x.kv, x.indices, lse, x.scale, normalize="l1")],
        first(1),
        [
            Peer("cuDNN front end", CUDNN, cudnn, lambda r: [r["target"][0]]),
            torch_peer("torch gather + product", pytorch, first(1), f"{AT_ONCE} queries at a time"),
        ],
        operations=2 * s_q * h_q * topk * d_qk,
    )


def normalize_l1(rows: int = 4096, columns: int = 2048) -> Problem:
    """Divides rows by their sums."""
    copies = cold_copies(8 * rows * columns)
    attn = torch.rand(copies, rows, columns, device=DEVICE)

    def pytorch() -> Call:
        return lambda i: [functional.normalize(attn[i], p=1, dim=-1)]

    return Problem(
        lambda i: [hopwell.normalize_l1(attn[i])],
        first(1),
        [torch_peer("torch normalize", pytorch, first(1))],
        copies=copies,
        bytes=8 * rows * columns,
        tolerance=1e-5,
    )
