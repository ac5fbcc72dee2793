"""Scores of all keys: the index scores, and attention summed over the heads."""

from typing import Any

import torch
from torch import Tensor

from hopwell.torch import ops

from ..._checks import require, require_sizes
from .._index_scores import rows_at_a_time, write_index_scores
from ._results import TupleDict, contiguous, given_or_new, on
from ._rows import Rows, find_rows, require_index_dtypes


def one_head(wrapper: str, k: Tensor) -> Tensor:
    require(k.ndim >= 3 and k.shape[-2] == 1, wrapper, "k", "[…, S_k, 1, d]: one head of index keys", list(k.shape))
    return k.squeeze(-2)


def require_bf16(wrapper: str, precision: str, *scales: Tensor | None) -> None:
    require(precision.lower() == "bf16", wrapper, "precision", "bf16 (no block scales)", precision)
    require(all(s is None for s in scales), wrapper, "q_scale and k_scale", "None with precision bf16", "a tensor")


def require_group(wrapper: str, qhead_per_kv_head: int | None, heads: int) -> None:
    require(qhead_per_kv_head in (None, heads), wrapper, "qhead_per_kv_head", f"{heads} or None", qhead_per_kv_head)


def _index_scores(
    wrapper: str,
    q: Tensor,
    k: Tensor,
    w: Tensor,
    rows: Rows,
    sm_scale: float,
    out: Tensor | None,
    k_scale: Tensor | None = None,
) -> Tensor:
    """Scores of [B, S_q, S_k] or [total_q, max_seqlen_k], −inf where a query doesn't see a key."""
    require_index_dtypes(wrapper, "q", q, "k", k, fp8=k_scale is not None)
    require_sizes(wrapper, "w", w, q.shape[:-1])
    keys = rows.flat(one_head(wrapper, k))
    scores = given_or_new(out, [*rows.shape, rows.width], q, wrapper, "out")
    weights = w if sm_scale == 1.0 else w.float() * sm_scale
    scale = None if k_scale is None else rows.flat(k_scale.squeeze(-1))
    with contiguous(scores) as written:
        write_index_scores(
            written.view(len(rows.start), rows.width),
            *(rows.flat(q), keys, rows.flat(weights), rows.start, rows.end),
            k_scale=scale,
            from_start=True,
        )
    return scores


@torch.no_grad()
def indexer_forward_wrapper(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    ratio: int = 4,
    qhead_per_kv_head: int | None = None,
    m_block_size: int = 128,
    n_block_size: int = 128,
    q_stage: int = 2,
    kv_stage: int = 4,
    sm_scale: float = 1.0,
    out: Tensor | None = None,
    stream: Any = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    q_causal_offsets: Tensor | None = None,
    precision: str = "bf16",
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    cu_seqlens_q_scale_padded: Tensor | None = None,
    cu_seqlens_k_scale_padded: Tensor | None = None,
    sf_vec_size: int = 32,
    return_lse: bool = False,
    lse_out: Tensor | None = None,
) -> TupleDict:
    """sm_scale·Σ_h w·relu(q·k) of all keys: q [B, S_q, H, D], k [B, S_k, 1, D], w [B, S_q, H] bf16 or float32.

    Packed: [total_q, H, D], [total_k, 1, D] and [total_q, H] with cu_seqlens_q, cu_seqlens_k int32 [B + 1]; scores are
    [total_q, max_seqlen_k], each row from its sequence's first key on. precision "fp8": q and k float8_e4m3fn with
    float32 scales q_scale like w and k_scale like k without D; a float32 w has q_scale and sm_scale in it already.

    Returns {scores float32 [B, S_q, S_k]}, −inf at keys that a query doesn't see; with return_lse also {lse}, the
    logarithm of the sum of their exponentials, −inf where it sees none.
    """
    name = "indexer_forward_wrapper"
    fp8 = precision.lower() == "fp8"
    if fp8:
        for argument, scale, dims in (("q_scale", q_scale, q.shape[:-1]), ("k_scale", k_scale, k.shape[:-1])):
            fits = scale is not None and scale.dtype == torch.float32 and scale.shape == dims
            require(fits, name, argument, f"float32 {list(dims)} with precision fp8", scale)
    else:
        require_bf16(name, precision, q_scale, k_scale, cu_seqlens_q_scale_padded, cu_seqlens_k_scale_padded)
    require_group(name, qhead_per_kv_head, q.shape[-2])
    with on(
        name,
        stream,
        q=q,
        k=k,
        w=w,
        out=out,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        q_causal_offsets=q_causal_offsets,
        q_scale=q_scale,
        k_scale=k_scale,
        lse_out=lse_out,
    ):
        rows = find_rows(name, q, k, ratio, cu_seqlens_q, cu_seqlens_k, max_seqlen_k, q_causal_offsets)
        if fp8 and q_scale is not None:
            scaled = w.dtype == torch.float32
            w, sm_scale = (w, 1.0) if scaled else (w.float() * q_scale, sm_scale)
        lse = given_or_new(lse_out, rows.shape, q, name, "lse_out")
        scores = _index_scores(name, q, k, w, rows, sm_scale, out, k_scale)
        if not return_lse and lse_out is None:
            return TupleDict(scores=scores)
        return TupleDict(scores=scores, lse=lse.copy_(scores.logsumexp(-1)))


@torch.no_grad()
def dense_indexer_score_recompute_wrapper(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    qhead_per_kv_head: int | None = None,
    out: Tensor | None = None,
    denom_out: Tensor | None = None,
    sm_scale: float = 1.0,
    ratio: int = 1,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    q_causal_offsets: Tensor | None = None,
    precision: str = "bf16",
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    cu_seqlens_q_scale_padded: Tensor | None = None,
    cu_seqlens_k_scale_padded: Tensor | None = None,
    sf_vec_size: int = 32,
    stream: Any = None,
) -> TupleDict:
    """The scores of `indexer_forward_wrapper` and their log-sum-exp: {out, denom}."""
    name = "dense_indexer_score_recompute_wrapper"
    require_bf16(name, precision, q_scale, k_scale, cu_seqlens_q_scale_padded, cu_seqlens_k_scale_padded)
    with on(
        name,
        stream,
        q=q,
        k=k,
        weights=weights,
        out=out,
        denom_out=denom_out,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        q_causal_offsets=q_causal_offsets,
    ):
        rows = find_rows(name, q, k, ratio, cu_seqlens_q, cu_seqlens_k, max_seqlen_k, q_causal_offsets)
        denom = given_or_new(denom_out, rows.shape, q, name, "denom_out")
        scores = _index_scores(name, q, k, weights, rows, sm_scale, out)
        return TupleDict(out=scores, denom=denom.copy_(scores.logsumexp(-1)))


def _attention_sums(out: Tensor, rows: Rows, q: Tensor, k: Tensor, lse: Tensor, scale: float) -> Tensor:
    """Writes attention on every key, summed over the heads, −inf where it is hidden; returns each row's sum."""
    totals = out.new_empty(len(out))
    heads = q.shape[1] // k.shape[1]
    for first in range(0, len(out), rows_at_a_time(rows.width)):
        some = slice(first, first + rows_at_a_time(rows.width))
        table, start, end = rows.all_keys(some), rows.start[some], rows.end[some]
        for group in range(k.shape[1]):
            mine = slice(group * heads, (group + 1) * heads)
            inputs = q[some, mine], k[:, group], table, lse[some, mine], scale
            sums = ops.attention_distribution(*inputs, k_start=start, k_end=end)
            out[some] = sums if group == 0 else out[some] + sums
        totals[some] = out[some].sum(-1)
        out[some].masked_fill_(rows.hidden(some), -torch.inf)
    return totals


@torch.no_grad()
def dense_attn_score_recompute_wrapper(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    softmax_scale: float,
    qhead_per_kv_head: int | None = None,
    out: Tensor | None = None,
    denom_out: Tensor | None = None,
    ratio: int = 1,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    q_causal_offsets: Tensor | None = None,
    precision: str = "bf16",
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    cu_seqlens_q_scale_padded: Tensor | None = None,
    cu_seqlens_k_scale_padded: Tensor | None = None,
    sf_vec_size: int = 32,
    stream: Any = None,
) -> TupleDict:
    """Attention on every key, summed over the heads: Σ_h exp(softmax_scale·q·k − lse), −inf where a query sees none.

    q [B, S_q, H, D], k [B, S_k, H_kv, D] (heads of a group are neighbours), lse float32 [B, S_q, H]; packed as in
    `indexer_forward_wrapper`. Returns {out float32 [B, S_q, S_k], denom float32 [B, S_q]}, denom the sum over what each
    query sees.
    """
    name = "dense_attn_score_recompute_wrapper"
    require_bf16(name, precision, q_scale, k_scale, cu_seqlens_q_scale_padded, cu_seqlens_k_scale_padded)
    with on(
        name,
        stream,
        q=q,
        k=k,
        lse=lse,
        out=out,
        denom_out=denom_out,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        q_causal_offsets=q_causal_offsets,
    ):
        rows = find_rows(name, q, k, ratio, cu_seqlens_q, cu_seqlens_k, max_seqlen_k, q_causal_offsets)
        require(k.ndim == q.ndim and k.shape[-1] == q.shape[-1], name, "k", "[…, S_k, H_kv, D]", list(k.shape))
        heads, groups = q.shape[-2], k.shape[-2]
        require(groups > 0 and heads % groups == 0, name, "k", f"of heads that divide {heads}", groups)
        require_group(name, qhead_per_kv_head, heads // groups)
        require_sizes(name, "lse", lse, q.shape[:-1])
        sums = given_or_new(out, [*rows.shape, rows.width], q, name, "out")
        denom = given_or_new(denom_out, rows.shape, q, name, "denom_out")
        with contiguous(sums) as written:
            flat = written.view(len(rows.start), rows.width)
            totals = _attention_sums(flat, rows, rows.flat(q), rows.flat(k), rows.flat(lse), float(softmax_scale))
        denom.copy_(totals.view(rows.shape))
        return TupleDict(out=sums, denom=denom)
