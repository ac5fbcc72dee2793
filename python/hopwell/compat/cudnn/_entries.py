"""Scores of selected keys."""

from typing import Any

import torch
from torch import Tensor

from hopwell.torch import ops

from ..._checks import require_shape, require_sizes
from ._results import TupleDict, into, on, require_output
from ._rows import entries_of


@torch.no_grad()
def sparse_attn_score_recompute_wrapper(
    q_attn: Tensor,
    k_attn: Tensor,
    lse: Tensor,
    topk_indices: Tensor,
    softmax_scale: float,
    qhead_per_kv_head: int | None = None,
    topk_length: Tensor | None = None,
    topk_indices_global: bool = False,
    out: Tensor | None = None,
    stream: Any = None,
) -> TupleDict:
    """Attention on each entry, summed over the heads, each row divided by its sum: {target float32 [B, S_q, topk]}.

    q_attn [B, S_q, H, D], k_attn [B, S_k, D], lse float32 [B, S_q, H], topk_indices [B, S_q, topk] numbers of keys of
    their own sequence, or b·S_k + key with topk_indices_global; topk_length [B, S_q].
    """
    name = "sparse_attn_score_recompute_wrapper"
    with on(
        name, stream, q_attn=q_attn, k_attn=k_attn, lse=lse, topk_indices=topk_indices, topk_length=topk_length, out=out
    ):
        rows, table = entries_of(name, q_attn, k_attn, topk_indices, topk_length, topk_indices_global)
        require_sizes(name, "lse", lse, q_attn.shape[:-1])
        require_output(name, "out", out, topk_indices.shape, torch.float32)
        target = ops.attention_distribution(
            *(rows.flat(q_attn), rows.flat(k_attn), table, rows.flat(lse), float(softmax_scale)), normalize="l1"
        ).view(topk_indices.shape)
        return TupleDict(target=into(out, target))


@torch.no_grad()
def sparse_indexer_score_recompute_wrapper(
    q_indexer: Tensor,
    k_indexer: Tensor,
    weights: Tensor,
    topk_indices: Tensor,
    qhead_per_kv_head: int | None = None,
    topk_length: Tensor | None = None,
    topk_indices_global: bool = False,
    out: Tensor | None = None,
    stream: Any = None,
) -> TupleDict:
    """The softmax of each row's index scores over its entries: {predict float32 [B, S_q, topk]}, 0 where none is.

    Shapes as in `sparse_attn_score_recompute_wrapper`; weights [B, S_q, H].
    """
    name = "sparse_indexer_score_recompute_wrapper"
    with on(
        name,
        stream,
        q_indexer=q_indexer,
        k_indexer=k_indexer,
        weights=weights,
        topk_indices=topk_indices,
        topk_length=topk_length,
        out=out,
    ):
        rows, table = entries_of(name, q_indexer, k_indexer, topk_indices, topk_length, topk_indices_global)
        require_shape(name, "weights", weights, B=q_indexer.shape[0], S_q=q_indexer.shape[1], H=q_indexer.shape[2])
        require_output(name, "out", out, topk_indices.shape, torch.float32)
        scores = ops.indexer_scores(rows.flat(q_indexer), rows.flat(k_indexer), rows.flat(weights), table)
        predict = scores.softmax(-1).nan_to_num_(0.0).view(topk_indices.shape)  # a row of −inf has no entries
        return TupleDict(predict=into(out, predict))
