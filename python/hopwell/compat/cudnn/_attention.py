"""Sparse attention and its gradients."""

from typing import Any

import torch
from torch import Tensor

from hopwell.torch import ops

from ..._checks import require, require_shape
from .._tensors import in_rows
from ._results import TupleDict, into, on, require_output


def _scale_of(q: Tensor, softmax_scale: float | None) -> float:
    return float(q.shape[-1] ** -0.5) if softmax_scale is None else float(softmax_scale)


def sparse_attention(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    attn_sink: Tensor | None = None,
    softmax_scale: float | None = None,
    topk_length: Tensor | None = None,
    trusted_compact_metadata: bool = False,
) -> TupleDict:
    """Sparse attention with gradients for q, kv and attn_sink: {out [S_q, H, 512], max_logits, lse float32 [S_q, H]}.

    q [S_q, H, D], kv [S_kv, D], indices int32 [S_q, topk]. trusted_compact_metadata isn't needed.
    """
    out, max_logits, lse = ops.sparse_mla(
        *(in_rows(q), in_rows(kv), in_rows(indices), _scale_of(q, softmax_scale)),
        attn_sink=in_rows(attn_sink),
        topk_length=in_rows(topk_length),
    )
    return TupleDict(out=out, max_logits=max_logits.detach(), lse=lse.detach())


@torch.no_grad()
def sparse_attention_score_recompute(
    q: Tensor,
    kv: Tensor,
    lse: Tensor,
    indices: Tensor,
    softmax_scale: float | None = None,
    topk_length: Tensor | None = None,
) -> TupleDict:
    """How much attention each entry of `sparse_attention` got: {target float32 [S_q, topk], indices int32 [S_q, topk]}.

    The target is summed over the heads, each row divided by its sum; entries that are none are 0, their index −1.
    """
    name = "sparse_attention_score_recompute"
    require_shape(name, "indices", indices, S_q=q.shape[0], topk=None)
    valid = (indices >= 0) & (indices < len(kv))
    if topk_length is not None:
        require(topk_length.dtype == torch.int32, name, "topk_length", "int32", topk_length.dtype)
        require_shape(name, "topk_length", topk_length, S_q=q.shape[0])
        valid &= torch.arange(indices.shape[1], device=q.device) < topk_length[:, None]
    entries = indices.masked_fill(~valid, -1)
    attention = in_rows(q), in_rows(kv), in_rows(entries), in_rows(lse), _scale_of(q, softmax_scale)
    target = ops.attention_distribution(*attention, normalize="l1")
    return TupleDict(target=target, indices=entries)


@torch.no_grad()
def sparse_attention_forward_wrapper(
    q: Tensor,
    kv: Tensor,
    topk_idxs: Tensor,
    *,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    softmax_scale: float | None = None,
    indexer_topk: int = 0,
    stream: Any = None,
) -> TupleDict:
    """{out [S_q, H, 512], max_logits, lse float32 [S_q, H], lse_indexer None}; shapes as in the backward."""
    name = "sparse_attention_forward_wrapper"
    require(indexer_topk == 0, name, "indexer_topk", "0", indexer_topk)
    with on(name, stream, q=q, kv=kv, topk_idxs=topk_idxs, attn_sink=attn_sink, topk_length=topk_length):
        result = sparse_attention(q, kv, topk_idxs, attn_sink, softmax_scale, topk_length)
        return TupleDict(**dict(zip(result.keys(), result, strict=True)), lse_indexer=None)


@torch.no_grad()
def sparse_attention_backward_wrapper(
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
    attn_sink: Tensor,
    topk_idxs: Tensor,
    softmax_scale: float | None = None,
    topk_length: Tensor | None = None,
    dq: Tensor | None = None,
    dkv: Tensor | None = None,
    block_tile: int = 64,
    deterministic: bool = False,
    stream: Any = None,
    workspace: Tensor | None = None,
    q_cluster_mode: str = "off",
) -> TupleDict:
    """Gradients of sparse attention: q [S_q, H, D], kv [S_kv, D], out and dout [S_q, H, D_v], topk_idxs [S_q, topk].

    lse float32 [S_q, H] is that of the keys alone, attn_sink float32 [H] (−inf: none), topk_length int32 [S_q].
    Returns {dq, dkv, d_sink} in their inputs' dtypes; dq and dkv may be given.
    """
    name = "sparse_attention_backward_wrapper"
    require(q_cluster_mode in ("off", "adaptive_pair"), name, "q_cluster_mode", "off or adaptive_pair", q_cluster_mode)
    require_shape(name, "q", q, S_q=None, H=None, D=None)
    require_shape(name, "out", out, S_q=q.shape[0], H=q.shape[1], D_v=None)
    require_output(name, "dq", dq, q.shape, q.dtype)
    require_output(name, "dkv", dkv, kv.shape, kv.dtype, torch.float32)
    with on(
        name,
        stream,
        q=q,
        kv=kv,
        out=out,
        dout=dout,
        lse=lse,
        attn_sink=attn_sink,
        topk_idxs=topk_idxs,
        topk_length=topk_length,
        dq=dq,
        dkv=dkv,
    ):
        dkv_dtype = kv.dtype if dkv is None else dkv.dtype
        gradients = ops.sparse_mla_backward(
            *(in_rows(dout), in_rows(q), in_rows(kv), in_rows(topk_idxs), in_rows(out), in_rows(lse)),
            *(_scale_of(q, softmax_scale), out.shape[2]),
            attn_sink=in_rows(attn_sink),
            topk_length=in_rows(topk_length),
            deterministic=deterministic,
            dkv_dtype=dkv_dtype,
        )
        d_q, d_kv, d_sink = gradients
        assert d_q is not None and d_kv is not None  # both are asked for
        return TupleDict(dq=into(dq, d_q), dkv=into(dkv, d_kv), d_sink=d_sink)
