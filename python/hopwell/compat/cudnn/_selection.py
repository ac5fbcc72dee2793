"""The selection of keys: from scores, or with them in one."""

from typing import Any

import torch
from torch import Tensor

from hopwell.torch import ops

from ..._checks import INTEGERS, require, require_shape, require_sizes
from .._index_scores import rows_at_a_time, write_index_scores
from ._dense import one_head, require_bf16, require_group
from ._results import TupleDict, given_or_new, into, on, require_output
from ._rows import Rows, find_rows, require_index_dtypes, require_offsets


def _best(x: Tensor, lengths: Tensor, top_k: int, larger_columns: bool) -> tuple[Tensor, Tensor]:
    """Columns of the top_k largest numbers of each row among its first `lengths`, ascending, and the numbers."""
    columns = x.shape[1]
    column = torch.arange(columns, device=x.device)
    bits = (x.float() + 0.0).view(torch.int32)  # −0 becomes 0, which is as large
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()  # integers in the order of the numbers
    preferred = column if larger_columns else columns - 1 - column
    least = torch.iinfo(torch.int64).min
    keys = ((order << 32) | preferred).masked_fill_(column >= lengths[:, None], least)  # no two are equal
    best = keys.topk(min(top_k, columns), sorted=False).values
    chosen = best & 0xFFFFFFFF
    chosen = (chosen if larger_columns else columns - 1 - chosen).masked_fill_(best == least, columns).sort(-1).values
    none = chosen == columns
    values = x.gather(1, chosen.clamp(max=columns - 1)).masked_fill_(none, -torch.inf)
    return chosen.masked_fill_(none, -1).int(), values


@torch.no_grad()
def indexer_top_k_wrapper(
    input_values: Tensor,
    seq_lens: Tensor,
    top_k: int,
    next_n: int = 1,
    return_val: bool = True,
    num_copy_bits: int = 256,
    stream: Any = None,
    tie_break: int = 0,
    deterministic: bool = False,
) -> TupleDict:
    """The top_k largest numbers of each row of input_values float32, bf16 or fp16 [n_rows, num_cols].

    seq_lens is int32 [n_rows / next_n]: row r sees the first seq_lens[r // next_n] − next_n + r % next_n + 1 columns.
    Returns {indices int32 [n_rows, top_k], values}: −1 and −inf at the end of shorter rows; values None without
    return_val. The same bits every time.
    """
    name = "indexer_top_k_wrapper"
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    require(input_values.dtype in kinds, name, "input_values", "float32, bfloat16 or float16", input_values.dtype)
    require_shape(name, "input_values", input_values, n_rows=None, num_cols=None)
    require(top_k >= 1, name, "top_k", "at least 1", top_k)
    require(next_n >= 1, name, "next_n", "at least 1", next_n)
    require(tie_break in (0, 1, 2), name, "tie_break", "0, 1 or 2", tie_break)
    n_rows, num_cols = input_values.shape
    require(n_rows % next_n == 0, name, "input_values", f"of a multiple of next_n = {next_n} rows", n_rows)
    require(seq_lens.dtype == torch.int32, name, "seq_lens", "int32", seq_lens.dtype)
    require_shape(name, "seq_lens", seq_lens, n_rows_by_next_n=n_rows // next_n)
    with on(name, stream, input_values=input_values, seq_lens=seq_lens):
        row = torch.arange(n_rows, device=input_values.device)
        lengths = seq_lens[row // next_n] - next_n + row % next_n + 1
        indices = torch.full((n_rows, top_k), -1, dtype=torch.int32, device=input_values.device)
        values = input_values.new_full((n_rows, top_k), -torch.inf) if return_val else None
        for first in range(0, n_rows if num_cols else 0, rows_at_a_time(num_cols)):
            some = slice(first, first + rows_at_a_time(num_cols))
            best, numbers = _best(input_values[some], lengths[some], top_k, tie_break == 2)
            indices[some, : best.shape[1]] = best
            if values is not None:
                values[some, : best.shape[1]] = numbers
        return TupleDict(indices=indices, values=values)


def _log_sums(rows: Rows, q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    """The log-sum-exp of all scores that each query sees, which are not kept."""
    sums = w.new_empty(len(q), dtype=torch.float32)
    for first in range(0, len(q), rows_at_a_time(rows.width)):
        some = slice(first, first + rows_at_a_time(rows.width))
        scores = sums.new_empty(len(sums[some]), rows.width)
        write_index_scores(scores, q[some], k, w[some], rows.start[some], rows.end[some], from_start=True)
        sums[some] = scores.logsumexp(-1)
    return sums


def _require_selection(
    wrapper: str,
    sizes: list[int],
    out_indices: Tensor | None,
    out_logits: Tensor | None,
    softmax_out: Tensor | None,
    lse_out: Tensor | None,
) -> None:
    require_output(wrapper, "out_indices", out_indices, sizes, torch.int32)
    require_output(wrapper, "out_logits", out_logits, sizes, torch.float32)
    require_output(wrapper, "softmax_out", softmax_out, sizes, torch.float32)
    require_output(wrapper, "lse_out", lse_out, sizes[:-1], torch.float32)


@torch.no_grad()
def indexer_forward_top_k_wrapper(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    top_k: int,
    ratio: int = 4,
    qhead_per_kv_head: int | None = None,
    m_block_size: int = 128,
    n_block_size: int = 128,
    q_stage: int = 2,
    kv_stage: int = 4,
    sm_scale: float = 1.0,
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
    return_softmax: bool | None = None,
    softmax_out: Tensor | None = None,
    microbatch_rows: int = -1,
    topk_indices_global: bool = True,
    cand_buffer: Tensor | None = None,
    out_indices: Tensor | None = None,
    out_logits: Tensor | None = None,
    cand_batch_offsets: Tensor | None = None,
    deterministic: bool = False,
) -> TupleDict:
    """The top_k keys of largest score of `indexer_forward_wrapper`, whose scores are not stored.

    Returns {indices int32, logits float32, softmax float32} [B, S_q, top_k] or [total_q, top_k]: keys in ascending
    order, numbers among all keys (b·S_k + key, or of the pack) or with topk_indices_global False those of their own
    sequence, then −1, −inf and 0. No softmax where return_softmax is False; with return_lse {lse} too, that of all
    keys. Of equal scores the smaller keys, always.
    """
    name = "indexer_forward_top_k_wrapper"
    require(top_k >= 1, name, "top_k", "at least 1", top_k)
    require_bf16(name, precision, q_scale, k_scale, cu_seqlens_q_scale_padded, cu_seqlens_k_scale_padded)
    require_group(name, qhead_per_kv_head, q.shape[-2])
    require_sizes(name, "w", w, q.shape[:-1])
    layout = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "q_causal_offsets": q_causal_offsets}
    outputs = {"out_indices": out_indices, "out_logits": out_logits, "softmax_out": softmax_out, "lse_out": lse_out}
    with on(name, stream, q=q, k=k, w=w, **layout, **outputs):
        rows = find_rows(name, q, k, ratio, cu_seqlens_q, cu_seqlens_k, max_seqlen_k, q_causal_offsets)
        require_index_dtypes(name, "q", q, "k", k)
        shape = [*rows.shape, top_k]
        _require_selection(name, shape, out_indices, out_logits, softmax_out, lse_out)
        index = rows.flat(q), rows.flat(one_head(name, k)), rows.flat(w if sm_scale == 1.0 else w.float() * sm_scale)
        indices, logits = ops.lightning_indexer(*index, top_k, k_start=rows.start, k_end=rows.end)
        none = logits == -torch.inf
        if not topk_indices_global:
            indices -= rows.start[:, None]
        indices.masked_fill_(none, -1)
        result = TupleDict(indices=into(out_indices, indices.view(shape)), logits=into(out_logits, logits.view(shape)))
        if return_softmax is not False or softmax_out is not None:
            softmax = logits.softmax(-1).masked_fill_(none, 0.0)
            result["softmax"] = into(softmax_out, softmax.view(shape))
        if return_lse or lse_out is not None:
            lse = given_or_new(lse_out, rows.shape, q, name, "lse_out")
            result["lse"] = lse.copy_(_log_sums(rows, *index).view(rows.shape))
        return result


@torch.no_grad()
def local_to_global_wrapper(
    local_indices: Tensor,
    seqlen_k: int,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    stream: Any = None,
) -> TupleDict:
    """Numbers of keys of their own sequence, [B, S_q, topk] or packed [total_q, topk], as numbers among all keys.

    Returns {indices int32}: b·seqlen_k + key, or cu_seqlens_k[b] + key; −1 where negative.
    """
    name = "local_to_global_wrapper"
    require(local_indices.dtype in INTEGERS, name, "local_indices", "int32 or int64", local_indices.dtype)
    require_offsets(name, cu_seqlens_q, cu_seqlens_k)
    with on(name, stream, local_indices=local_indices, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k):
        if cu_seqlens_q is not None and cu_seqlens_k is not None:
            require_shape(name, "local_indices", local_indices, total_q=None, topk=None)
            row = torch.arange(len(local_indices), device=local_indices.device, dtype=cu_seqlens_q.dtype)
            sequence = torch.searchsorted(cu_seqlens_q[1:].contiguous(), row, right=True)
            first = cu_seqlens_k[sequence.clamp(max=max(len(cu_seqlens_k) - 2, 0))][:, None]
        else:
            require_shape(name, "local_indices", local_indices, B=None, S_q=None, topk=None)
            first = torch.arange(len(local_indices), device=local_indices.device)[:, None, None] * seqlen_k
        return TupleDict(indices=(local_indices + first).masked_fill_(local_indices < 0, -1).int())


@torch.no_grad()
def compactify_wrapper(indices: Tensor, stream: Any = None) -> TupleDict:
    """Each row's entries that are not negative first, in their order, then −1.

    indices int32 [M, topk], or [B, S, topk], which is taken as [B·S, topk]. Returns {indices int32 [M, topk],
    topk_length int32 [M]}.
    """
    name = "compactify_wrapper"
    require(indices.dtype == torch.int32, name, "indices", "int32", indices.dtype)
    require(indices.ndim in (2, 3), name, "indices", "[M, topk] or [B, S, topk]", list(indices.shape))
    with on(name, stream, indices=indices):
        table = indices.flatten(0, -2)
        none = (table < 0).sort(dim=-1, stable=True)
        compact = table.gather(1, none.indices).masked_fill_(none.values, -1)
        return TupleDict(indices=compact, topk_length=(~none.values).sum(-1, dtype=torch.int32))
