"""The selection from scores, and scores of selected keys."""

from typing import Any

import torch
from torch import Tensor

from hopwell.torch import ops

from .._checks import require, require_shape, require_sizes
from .._index_scores import rows_at_a_time
from ..tilelang import score_entries
from ._results import TupleDict, into, on
from ._rows import entries_of


def _best(x: Tensor, lengths: Tensor, top_k: int, larger_columns: bool) -> tuple[Tensor, Tensor]:
    """Columns of the top_k largest numbers of each row among its first `lengths`, ascending, and the numbers."""
    columns = x.shape[1]
    column = torch.arange(columns, device=x.device)
    bits = x.float().view(torch.int32)
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
    with on(stream):
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
    with on(stream):
        rows, table = entries_of(name, q_attn, k_attn, topk_indices, topk_length, topk_indices_global)
        require_sizes(name, "lse", lse, q_attn.shape[:-1])
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
    with on(stream):
        rows, table = entries_of(name, q_indexer, k_indexer, topk_indices, topk_length, topk_indices_global)
        require_shape(name, "weights", weights, B=q_indexer.shape[0], S_q=q_indexer.shape[1], H=q_indexer.shape[2])
        keys = rows.flat(k_indexer)
        start = torch.zeros_like(rows.start)
        scores = score_entries(*(rows.flat(q_indexer), keys, rows.flat(weights), table, start, start + len(keys)))
        predict = scores.softmax(-1).nan_to_num_(0.0).view(topk_indices.shape)  # a row of −inf has no entries
        return TupleDict(predict=into(out, predict))
