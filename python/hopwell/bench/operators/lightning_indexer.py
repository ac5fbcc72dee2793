"""The lightning indexer: selection, losses and gradients."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import hopwell

from ..problem import (
    AT_ONCE,
    CUDNN,
    DEEP_GEMM,
    Call,
    Peer,
    Problem,
    Read,
    chunks,
    cudnn_dsa,
    distinct,
    first,
    measured,
    randn,
    torch_peer,
)
from ..scale import DEVICE

TINY_INDEX = {"s_q": 16, "s_kv": 256, "h_index": 4, "topk": 64, "d_index": 32}


def index_inputs(s_q: int, s_kv: int, h_index: int, d_index: int) -> SimpleNamespace:
    """Random queries, keys and weights of the indexer."""
    return SimpleNamespace(
        q=randn(s_q, h_index, d_index), k=randn(s_kv, d_index), w=randn(s_q, h_index) * (h_index * d_index) ** -0.5
    )


def selection(q: Tensor, k: Tensor, w: Tensor) -> Callable[[Tensor, Tensor], list[Tensor]]:
    """Returns a function that reads indices and scores [s_q, topk] in an order that is the same for all packages.

    It returns the sorted scores, and the sorted fp32 scores of the chosen keys. A package may choose either of two keys
    with nearly equal scores, therefore the indices themselves are not compared.
    """
    exact: list[Tensor] = []

    def read(indices: Tensor, scores: Tensor) -> list[Tensor]:
        if not exact:
            keys = k.float().T
            for i in range(0, len(q), 16):
                dots = (q[i : i + 16].float() @ keys).relu_()
                exact.append((w[i : i + 16, None].float() @ dots)[:, 0])
        chosen = indices.flatten(0, -2).long().clamp(0, len(k) - 1)
        of_chosen = torch.cat(exact).gather(1, chosen)
        return [scores.flatten(0, -2).float().sort().values, of_chosen.sort().values]

    return read


def to_float8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns float8 codes, and a scale for each row of the last dimension."""
    scale = x.float().abs().amax(-1) / 448
    return (x.float() / scale[..., None]).to(torch.float8_e4m3fn), scale


@measured(
    [
        {},
        {"s_q": 16, "s_kv": 32768},
        {"s_q": 1, "s_kv": 65536},
        {"s_q": 2048, "s_kv": 32768},
        {"s_q": 2048, "s_kv": 32768, "fp8": 1},
    ],
    on_cpu=[{"s_q": 8}],
    tiny=TINY_INDEX,
)
def lightning_indexer(
    s_q: int = 512, s_kv: int = 8192, h_index: int = 64, topk: int = 2048, d_index: int = 128, fp8: int = 0
) -> Problem:
    """Selects the topk best keys by index score. `fp8` = 1: queries and keys are float8_e4m3fn with scales."""
    x = index_inputs(s_q, s_kv, h_index, d_index)
    scales: dict[str, Any] = {}
    codes_q, codes_k = x.q, x.k
    if fp8:
        (codes_q, scales["q_scale"]), (codes_k, scales["k_scale"]) = to_float8(x.q), to_float8(x.k)
        x.w = x.w.float()
        x.q = (codes_q.float() * scales["q_scale"][..., None]).to(x.q.dtype)
        x.k = (codes_k.float() * scales["k_scale"][..., None]).to(x.k.dtype)

    selected = selection(x.q, x.k, x.w)

    def pytorch() -> Call:
        w = x.w.to(x.q.dtype)[:, None]

        def scores_and_topk(_: int) -> Any:
            dots = (x.q.flatten(0, 1) @ x.k.T).view(s_q, h_index, s_kv).relu_()
            return torch.bmm(w, dots)[:, 0].topk(topk, sorted=False)

        return scores_and_topk

    def cudnn() -> Call:
        dsa = cudnn_dsa()
        if fp8:
            raise ValueError("not called with float8 here")
        q, k, w = x.q[None], x.k[None, :, None], x.w[None]
        all_keys = torch.full((1,), s_kv, dtype=torch.int32, device=DEVICE)  # its causal mask hides no key
        lengths = all_keys.expand(s_q).contiguous()

        def scores_and_topk(_: int) -> Any:
            scores = dsa.indexer_forward_wrapper(q, k, w, ratio=1, q_causal_offsets=all_keys)["scores"]
            return dsa.indexer_top_k_wrapper(scores.view(s_q, s_kv), lengths, topk)

        return scores_and_topk

    def deep_gemm() -> Call:
        module = import_module("deep_gemm")
        if not fp8:
            raise ValueError("takes float8 only: fp8=1")
        w, keys = x.w * scales["q_scale"], (codes_k, scales["k_scale"])
        begin, end = (torch.full((s_q,), n, dtype=torch.int32, device=DEVICE) for n in (0, s_kv))

        def scores_and_topk(_: int) -> Any:
            if hasattr(module, "fp8_mqa_logits"):
                logits = module.fp8_mqa_logits(codes_q, keys, w, begin, end)
            else:  # the fork of SGLang
                logits = module.fp8_fp4_mqa_logits(codes_q, keys, w, begin, end, s_kv)
            return logits.topk(topk, sorted=False)

        return scores_and_topk

    peers = [
        torch_peer("torch", pytorch, lambda r: selected(r[1], r[0]), "stores all products, rounded to bf16"),
    ]
    if fp8:
        note = "stores all scores; torch.topk selects"
        peers.insert(0, Peer("DeepGEMM", DEEP_GEMM, deep_gemm, lambda r: selected(r[1], r[0]), note))
    else:
        read: Read = lambda r: selected(r["indices"], r["values"])  # noqa: E731
        peers.insert(0, Peer("cuDNN front end", CUDNN, cudnn, read, "stores all scores"))
    return Problem(
        lambda _: hopwell.lightning_indexer(codes_q, codes_k, x.w, topk, **scales),
        lambda r: selected(*r),
        peers,
        operations=2 * s_q * s_kv * h_index * d_index,
        tolerance=2e-2,
    )


@measured([{}], on_cpu=[{"s_q": 8}], tiny=TINY_INDEX)
def lightning_indexer_backward(
    s_q: int = 512, s_kv: int = 8192, h_index: int = 64, topk: int = 2048, d_index: int = 128
) -> Problem:
    """The indexer's loss over the selected keys, and its gradients."""
    x = index_inputs(s_q, s_kv, h_index, d_index)
    indices, target = distinct(s_q, s_kv, topk), torch.randn(s_q, topk, device=DEVICE).softmax(-1)

    def cudnn() -> Call:
        dsa = cudnn_dsa()
        q, k, w, entries, one = x.q[None], x.k[None], x.w[None], indices[None], torch.ones(1, device=DEVICE)
        signal, d_k = torch.empty_like(target)[None], torch.empty(1, s_kv, d_index, device=DEVICE)

        def predict_and_backward(_: int) -> Any:
            predicted = dsa.sparse_indexer_score_recompute_wrapper(q, k, w, entries, qhead_per_kv_head=h_index)[
                "predict"
            ]
            signal.copy_(target)  # the call overwrites it
            return dsa.indexer_backward_wrapper(
                q, w, k, signal, predicted, entries, one, loss_coeff=float(s_q), d_index_k=d_k
            )

        return predict_and_backward

    def pytorch() -> Call:
        def gradients(_: int) -> list[Tensor]:
            d_q, d_w = torch.empty_like(x.q), torch.empty_like(x.w)
            d_k = torch.zeros(s_kv, d_index, device=DEVICE)
            for some in chunks(s_q):
                rows, q, w = indices[some].long(), x.q[some], x.w[some]
                k = x.k[rows]
                dots = torch.bmm(q, k.mT)
                gated = dots.relu().float()
                prob = (w.float()[:, None] @ gated)[:, 0].softmax(-1)
                g = prob - target[some]
                d_w[some] = (gated @ g[:, :, None])[..., 0].to(w.dtype)
                d_dots = (g[:, None] * w.float()[:, :, None] * (dots > 0)).to(q.dtype)
                d_q[some] = torch.bmm(d_dots, k)
                d_k.index_add_(0, rows.flatten(), torch.bmm(d_dots.mT, q).float().flatten(0, 1))
            return [d_q, d_k, d_w]

        return gradients

    return Problem(
        lambda _: hopwell.lightning_indexer_backward(target, x.q, x.k, x.w, indices),
        lambda r: list(r)[1:],
        [
            Peer(
                "cuDNN front end",
                CUDNN,
                cudnn,
                lambda r: [r[name][0] for name in ("d_index_q", "d_index_k", "d_weights")],
                "recompute of the scores, copy of the target, backward; no loss",
            ),
            torch_peer(
                "torch gather + products", pytorch, first(3), f"{AT_ONCE} queries at a time; written out, no loss"
            ),
        ],
        operations=3 * 2 * s_q * topk * h_index * d_index,
        tolerance=2e-2,
    )


@measured([{}], on_cpu=[{"s": 64}], tiny={"s": 32, "h_q": 4, "h_index": 4, "d_qk": 64, "d_index": 32})
def indexer_dense_loss(
    s: int = 1024, h_q: int = 128, h_index: int = 64, d_qk: int = 576, d_index: int = 128
) -> Problem:
    """The indexer's loss over every visible key of a causal sequence of s tokens, and its gradients."""
    q, kv, scale = randn(s, h_q, d_qk), randn(s, d_qk), d_qk**-0.5
    x = index_inputs(s, s, h_index, d_index)
    lse = hopwell.sparse_mla_forward(q, kv, None, scale, min(512, d_qk), q_start=0)[2]

    def pytorch() -> Call:
        tensors = [t.clone().requires_grad_() for t in (x.q, x.k, x.w)]
        hidden = torch.ones(s, s, dtype=torch.bool, device=DEVICE).triu(1)

        def loss_and_gradients(_: int) -> list[Tensor]:
            scores = (q.flatten(0, 1) @ kv.T).view(s, h_q, s).float() * scale - lse[:, :, None]
            target = scores.exp().mean(1).masked_fill(hidden, 0)
            q_index, k_index, weights = tensors
            dots = (q_index.flatten(0, 1) @ k_index.T).view(s, h_index, s).relu().float()
            index = (weights.float()[:, None] @ dots)[:, 0].masked_fill(hidden, -torch.inf)
            logs = torch.log_softmax(index, -1).masked_fill(hidden, 0)
            loss = (torch.special.xlogy(target, target) - target * logs).sum()
            return [loss.detach(), *torch.autograd.grad(loss, tensors)]

        return loss_and_gradients

    return Problem(
        lambda _: hopwell.indexer_dense_loss(q, kv, lse, x.q, x.k, x.w, scale, q_start=0),
        lambda r: [r[0].reshape(1), *list(r)[1:]],
        [
            torch_peer(
                "torch, autograd", pytorch, lambda r: [r[0].reshape(1), *r[1:]], "stores all scores, hidden ones too"
            )
        ],
        operations=s * (s + 1) / 2 * (2 * h_q * d_qk + 6 * h_index * d_index),
        tolerance=2e-2,
    )
