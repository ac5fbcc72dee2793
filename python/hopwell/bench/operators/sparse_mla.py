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
    measured,
    randn,
    torch_peer,
)
from ..scale import DEVICE, cold_copies

KEYS = [8192, 32768, 65536, 131072]
BY_KEYS = [{"h_q": h_q, "s_kv": s_kv} for h_q in (128, 64) for s_kv in KEYS]
# DeepSeek-V4's layers over 32,768 tokens, of 64 and 128 heads: compressed sparse attention, then heavily compressed.
V4 = [
    {"s_q": 32768, "h_q": h_q, "s_kv": 32768 // stride, "topk": topk, "d_qk": 512, "window": 128, "kv_stride": stride}
    for h_q, topk, stride in ((64, 512, 4), (128, 1024, 4), (64, 0, 128), (128, 0, 128))
]
FEW_QUERIES = [{"s_q": 8}]
TINY = {"s_q": 16, "h_q": 16, "s_kv": 256, "topk": 64}


def visible(s_q: int, s_kv: int, kv_stride: int, width: int) -> Tensor:
    """How many of `width` entries a query sees: all, or with kv_stride those that its position lets it see."""
    position = torch.arange(s_kv * kv_stride - s_q, s_kv * kv_stride, device=DEVICE)
    return ((position + 1) // kv_stride).clamp(0, width) if kv_stride else torch.full((s_q,), width, device=DEVICE)


def selected(s_q: int, s_kv: int, topk: int, kv_stride: int) -> Tensor:
    """Distinct keys in random order; with kv_stride distinct visible keys in ascending order, and -1 after them."""
    if not kv_stride:
        return distinct(s_q, s_kv, topk)
    sees = visible(s_q, s_kv, kv_stride, s_kv)[:, None]
    chosen = []
    for i in range(0, s_q, 256):
        rows = sees[i : i + 256]
        order = torch.rand(len(rows), s_kv, device=DEVICE).masked_fill_(torch.arange(s_kv, device=DEVICE) >= rows, 2)
        keys = order.topk(topk, largest=False).indices
        keys = keys.masked_fill(keys >= rows, s_kv).sort(-1).values
        chosen.append(keys.masked_fill(keys == s_kv, -1).int())
    return torch.cat(chosen)


def sparse_inputs(
    s_q: int, h_q: int, s_kv: int, topk: int, d_qk: int, window: int = 0, kv_stride: int = 0, listed: int = 0
) -> SimpleNamespace:
    """Random queries, keys and selections. `kv`, `indices`: of a call; `keys`, `rows`: the same as one table."""
    x = SimpleNamespace(q=randn(s_q, h_q, d_qk), kv=randn(s_kv, 1, d_qk), scale=d_qk**-0.5, options={})
    x.indices = selected(s_q, s_kv, topk, kv_stride) if topk else None
    x.entries = s_q * window + int(visible(s_q, s_kv, kv_stride, topk or s_kv).sum())
    x.keys, x.rows = x.kv, x.indices
    if kv_stride and not topk:
        x.options = {"kv_stride": kv_stride, "q_start": s_kv * kv_stride - s_q}
    if window:
        x.window_kv = randn(s_q + window - 1, 1, d_qk)
        x.options |= {"window_kv": x.window_kv, "window": window}
        if x.rows is None:
            every = torch.arange(s_kv, device=DEVICE).expand(s_q, s_kv)
            x.rows = every.masked_fill(every >= visible(s_q, s_kv, kv_stride, s_kv)[:, None], -1).int()
        own = torch.arange(s_q, device=DEVICE)[:, None] + torch.arange(window, device=DEVICE)
        x.keys, x.rows = torch.cat([x.kv, x.window_kv]), torch.cat([x.rows, (s_kv + own).int()], 1)
    if listed:
        x.kv, x.indices, x.options = x.keys, x.rows, {}
    return x


@measured([*BY_KEYS, {"h_q": 32}, {"h_q": 16}, *V4], on_cpu=FEW_QUERIES, tiny=TINY)
def sparse_mla_forward(
    s_q: int = 4096,
    h_q: int = 128,
    s_kv: int = 8192,
    topk: int = 2048,
    d_qk: int = 576,
    window: int = 0,
    kv_stride: int = 0,
    listed: int = 0,
) -> Problem:
    """Sparse attention over the selected keys, and over window keys. Peers take both from one table of keys.

    kv_stride: the queries are the last of s_kv · kv_stride tokens, and see compressed keys of their past only.
    topk 0: every visible key. listed 1: Hopwell takes the table, too.
    """
    x = sparse_inputs(s_q, h_q, s_kv, topk, d_qk, window, kv_stride, listed)

    def flashmla() -> Call:
        (module, options), indices = flash_mla(), x.rows[:, None]
        return lambda _: module.flash_mla_sparse_fwd(x.q, x.keys, indices, x.scale, 512, **options)

    def pytorch() -> Call:
        def sdpa(_: int) -> list[Tensor]:
            out = torch.empty(s_q, h_q, 512, dtype=x.q.dtype, device=DEVICE)
            for some in chunks(s_q):
                k = x.keys[:, 0][x.rows[some].long()][:, None]
                mask = (x.rows[some] >= 0)[:, None, None] if kv_stride else None
                out[some] = functional.scaled_dot_product_attention(x.q[some, None], k, k[..., :512], mask)[:, 0]
            return [out]

        return sdpa

    return Problem(
        lambda _: hopwell.sparse_mla_forward(x.q, x.kv, x.indices, x.scale, **x.options),
        first(1),
        [
            Peer("FlashMLA", FLASH_MLA, flashmla, first(1)),
            torch_peer("torch gather + SDPA", pytorch, first(1), f"{AT_ONCE} queries at a time"),
        ],
        operations=2 * h_q * x.entries * (d_qk + 512),
    )


@measured([*BY_KEYS, *V4], on_cpu=FEW_QUERIES, tiny=TINY)
def sparse_mla_backward(
    s_q: int = 4096,
    h_q: int = 128,
    s_kv: int = 8192,
    topk: int = 2048,
    d_qk: int = 576,
    window: int = 0,
    kv_stride: int = 0,
    listed: int = 0,
    deterministic: int = 0,
) -> Problem:
    """The gradients of sparse attention. Window keys as in the forward."""
    x = sparse_inputs(s_q, h_q, s_kv, topk, d_qk, window, kv_stride, listed)
    out, _, lse = hopwell.sparse_mla_forward(x.q, x.kv, x.indices, x.scale, **x.options)
    d_out = randn(s_q, h_q, 512)
    ascending = {"indices_ascending": True} if kv_stride and x.options and topk else {}
    options = {**x.options, **ascending, "deterministic": bool(deterministic)}

    def read(results: list[Tensor]) -> list[Tensor]:
        dq, dkv, d_window_kv = results[0], results[1], results[3:]
        return [dq, torch.cat([dkv, *d_window_kv])]

    def cudnn() -> Call:
        dsa = cudnn_dsa()
        kv, sink = x.keys[:, 0], torch.full((h_q,), -1e30, device=DEVICE)
        return lambda _: dsa.sparse_attention_backward_wrapper(
            x.q, kv, out, d_out, lse, sink, x.rows, softmax_scale=x.scale
        )

    def pytorch() -> Call:
        def gradients(_: int) -> list[Tensor]:
            dq, dkv = torch.empty_like(x.q), torch.zeros(len(x.keys), d_qk, device=DEVICE)
            for some in chunks(s_q):
                rows, q, g = x.rows[some].long(), x.q[some], d_out[some]
                k = x.keys[:, 0][rows]
                p = torch.exp(torch.bmm(q, k.mT).float() * x.scale - lse[some, :, None])
                if kv_stride:
                    p = p * (rows >= 0)[:, None]
                delta = (g.float() * out[some].float()).sum(-1, keepdim=True)
                ds = (p * (torch.bmm(g, k[..., :512].mT).float() - delta) * x.scale).to(q.dtype)
                dq[some] = torch.bmm(ds, k)
                dk = torch.bmm(ds.mT, q).float()
                dk[..., :512] += torch.bmm(p.to(q.dtype).mT, g)
                dkv.index_add_(0, rows.flatten() % len(x.keys), dk.flatten(0, 1))
            return [dq, dkv[:, None]]

        return gradients

    return Problem(
        lambda _: hopwell.sparse_mla_backward(d_out, x.q, x.kv, x.indices, out, lse, x.scale, **options),
        read,
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
        operations=2 * h_q * x.entries * (3 * d_qk + 2 * 512),
        tolerance=2e-2,
    )


@measured(BY_KEYS, on_cpu=FEW_QUERIES, tiny=TINY)
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


@measured([{}], on_cpu=[{"rows": 1024}], tiny={"rows": 16, "columns": 64})
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
