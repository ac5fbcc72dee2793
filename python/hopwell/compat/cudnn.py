"""The `DSA` namespace of NVIDIA's cuDNN front end: DeepSeek sparse attention for trainers.

    from hopwell.compat.cudnn import DSA        # instead of: from cudnn import DSA

After `cudnn.deepseek_sparse_attention` of nvidia-cudnn-frontend 1.32.0 (the pip package): the seven wrappers that
Megatron-LM calls (at d98e8a6), the two recomputations of index scores, the sparse forward and `sparse_attention`. What
holds here as there: names, order, defaults and layouts ([B, S, H, D], or packed [T, H, D] with cu_seqlens) of the
arguments, keys and order of the results (a dict that unpacks like a tuple), natural logarithms, −1 as an entry that is
none, the mask `key < (q_causal_offset + query + 1) // ratio`, `stream`, and what is overwritten: `indexer_backward`
leaves its gradient of the scores in attn_score, `dense_indexer_backward` in index_score.

What differs: any number of heads, entries and keys, d a multiple of 16 up to 576 and d_index up to 128 on GPUs from
Ampere on (the sparse backward and forward there: d 512 or 576 with values of 512), host tensors, float32 on the CPU;
top-k entries come in ascending order, of equal numbers the smaller columns unless tie_break is 2; tuning arguments and
workspaces are taken and not needed. A ValueError: the block-scaled precisions "mxfp8" and "mxfp4" ("fp8" with a scale a
row is taken), several heads of index keys, indexer_topk other than 0. The wrappers are no part of the autograd graph,
`sparse_attention` is. The classes behind the wrappers (`IndexerForward` and so on) are not here. Versions before 1.32
had sm_scale, loss_coeff, grad_loss in this order in `indexer_backward_wrapper`: name them.

What it costs: the dense wrappers write matrices of all scores, as there. Hopwell's kernels never store these, so they
are made 64 MiB at a time from selections of all visible keys (`indexer_forward`) or from tables of all keys
(`dense_attn_score_recompute`), and `dense_indexer_backward` makes such a table for the whole call, int32 of the scores'
size, where there are several sequences. `indexer_top_k` and `sparse_indexer_score_recompute` are PyTorch and no kernels
of Hopwell's. `hopwell.torch`'s own operators do without all of it.
"""

import contextlib
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from hopwell.torch import ops

from ._checks import require, require_shape
from ._index_scores import rows_at_a_time, write_index_scores
from .tilelang import score_entries

_LEAST_PROBABILITY = 3.720075976020836e-44  # exp(−100), where cuDNN cuts logarithms
_LEAST_TARGET_SUM = 1e-10


class TupleDict(dict[str, Any]):
    """Named results that unpack like a tuple, and are found by number too."""

    def __iter__(self) -> Any:
        return iter(self.values())

    def __getitem__(self, key: str | int) -> Any:
        return list(self.values())[key] if isinstance(key, int) else super().__getitem__(key)


def _on(stream: Any) -> Any:
    """Everything within runs on this CUDA stream, a handle; None is the current one."""
    if stream is None:
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.ExternalStream(int(stream)))  # type: ignore[no-untyped-call]


def _into(out: Tensor | None, shape: Any, dtype: torch.dtype, like: Tensor, wrapper: str, argument: str) -> Tensor:
    if out is None:
        return like.new_empty(shape, dtype=dtype)
    require(list(out.shape) == list(shape), wrapper, argument, str(list(shape)), list(out.shape))
    return out


@dataclass
class _Rows:
    """All queries of a call in one row, with the keys that each sees: [B, S, …] is a pack of equal sequences."""

    shape: list[int]  # of the queries: [B, S_q], or [total_q]
    start: Tensor
    end: Tensor
    width: int  # keys of the longest sequence
    one_sequence: bool


def _rows(
    wrapper: str,
    q: Tensor,
    k: Tensor,
    ratio: int,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_k: int | None,
    q_causal_offsets: Tensor | None,
) -> _Rows:
    require(ratio >= 1, wrapper, "ratio", "at least 1", ratio)
    packed = cu_seqlens_q is not None
    require(packed == (cu_seqlens_k is not None), wrapper, "cu_seqlens_k", "given with cu_seqlens_q", cu_seqlens_k)
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        sequences = len(cu_seqlens_q) - 1
        require_shape(wrapper, "q", q, total_q=None, heads=None, d=None)
        for name, offsets in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
            require(offsets.dtype == torch.int32, wrapper, name, "int32", offsets.dtype)
            require_shape(wrapper, name, offsets, offsets=max(sequences, 0) + 1)
        if max_seqlen_k is None:
            lengths = cu_seqlens_k.diff()
            max_seqlen_k = int(lengths.max()) if sequences else 0  # the host waits for it
        query = torch.arange(len(q), device=q.device, dtype=torch.int32)
        sequence = torch.searchsorted(cu_seqlens_q[1:].contiguous(), query, right=True).clamp(max=sequences - 1)
        query = query - cu_seqlens_q[sequence]
        start, keys = cu_seqlens_k[sequence], cu_seqlens_k[sequence + 1] - cu_seqlens_k[sequence]
        keys = keys * (query < cu_seqlens_q[sequence + 1] - cu_seqlens_q[sequence])  # none past the last sequence
        shape, width = [len(q)], max_seqlen_k
    else:
        require_shape(wrapper, "q", q, B=None, S_q=None, heads=None, d=None)
        sequences, s_q = q.shape[:2]
        require(k.ndim >= 3 and k.shape[0] == sequences, wrapper, "k", f"[B={sequences}, S_k, heads, d]", list(k.shape))
        width, shape = k.shape[1], [sequences, s_q]
        row = torch.arange(sequences * s_q, device=q.device, dtype=torch.int32)
        sequence, query = row // max(s_q, 1), row % max(s_q, 1)
        start, keys = (sequence * width).int(), torch.full_like(row, width)
    if q_causal_offsets is not None:
        require(q_causal_offsets.dtype == torch.int32, wrapper, "q_causal_offsets", "int32", q_causal_offsets.dtype)
        require_shape(wrapper, "q_causal_offsets", q_causal_offsets, B=sequences)
        query = query + q_causal_offsets[sequence]
    visible = torch.minimum((query + 1) // ratio, keys).clamp(min=0)
    return _Rows(shape, start, start + visible, width, sequences == 1)


def _flat(x: Tensor, rows: _Rows) -> Tensor:
    return x.flatten(0, 1) if len(rows.shape) == 2 else x


def _all_keys(rows: _Rows, some: slice) -> Tensor:
    """An index table of all keys of the sequence that each of these rows belongs to."""
    column = torch.arange(rows.width, device=rows.start.device, dtype=torch.int32)
    start = rows.start[some]
    if rows.one_sequence and len(rows.shape) == 2:
        return column.expand(len(start), -1)
    return start[:, None] + column


def _one_head(wrapper: str, k: Tensor) -> Tensor:
    require(k.ndim >= 3 and k.shape[-2] == 1, wrapper, "k", "[…, S_k, 1, d]: one head of index keys", list(k.shape))
    return k.squeeze(-2)


def _index_scores(
    wrapper: str,
    q: Tensor,
    k: Tensor,
    w: Tensor,
    rows: _Rows,
    sm_scale: float,
    out: Tensor | None,
    k_scale: Tensor | None = None,
) -> Tensor:
    """Scores of [B, S_q, S_k] or [total_q, max_seqlen_k], −inf where a query doesn't see a key."""
    require(list(w.shape) == list(q.shape[:-1]), wrapper, "w", f"{list(q.shape[:-1])}", list(w.shape))
    keys = _flat(_one_head(wrapper, k), rows)
    scores = _into(out, [*rows.shape, rows.width], torch.float32, q, wrapper, "out")
    made = scores if scores.is_contiguous() else torch.empty_like(scores, memory_format=torch.contiguous_format)
    weights = w if sm_scale == 1.0 else w.float() * sm_scale
    scale = None if k_scale is None else _flat(k_scale.squeeze(-1), rows)
    write_index_scores(
        made.view(len(rows.start), rows.width),
        *(_flat(q, rows), keys, _flat(weights, rows), rows.start, rows.end),
        k_scale=scale,
        from_start=True,
    )
    return scores if made is scores else scores.copy_(made)


def _require_bf16(wrapper: str, precision: str, *scales: Tensor | None) -> None:
    require(precision.lower() == "bf16", wrapper, "precision", "bf16 (no block scales)", precision)
    require(all(s is None for s in scales), wrapper, "q_scale and k_scale", "None with precision bf16", "a tensor")


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
            got = None if scale is None else list(scale.shape)
            require(got == list(dims), name, argument, f"float32 {list(dims)} with precision fp8", got)
    else:
        _require_bf16(name, precision, q_scale, k_scale, cu_seqlens_q_scale_padded, cu_seqlens_k_scale_padded)
    require(
        qhead_per_kv_head in (None, q.shape[-2]), name, "qhead_per_kv_head", f"{q.shape[-2]} or None", qhead_per_kv_head
    )
    with _on(stream):
        rows = _rows(name, q, k, ratio, cu_seqlens_q, cu_seqlens_k, max_seqlen_k, q_causal_offsets)
        if fp8 and q_scale is not None:
            scaled = w.dtype == torch.float32
            w, sm_scale = (w, 1.0) if scaled else (w.float() * q_scale, sm_scale)
        scores = _index_scores(name, q, k, w, rows, sm_scale, out, k_scale)
        if not return_lse and lse_out is None:
            return TupleDict(scores=scores)
        lse = _into(lse_out, rows.shape, torch.float32, q, name, "lse_out")
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
    _require_bf16(name, precision, q_scale, k_scale, cu_seqlens_q_scale_padded, cu_seqlens_k_scale_padded)
    with _on(stream):
        rows = _rows(name, q, k, ratio, cu_seqlens_q, cu_seqlens_k, max_seqlen_k, q_causal_offsets)
        scores = _index_scores(name, q, k, weights, rows, sm_scale, out)
        denom = _into(denom_out, rows.shape, torch.float32, q, name, "denom_out")
        return TupleDict(out=scores, denom=denom.copy_(scores.logsumexp(-1)))


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
    with _on(stream):
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


def _entries(
    wrapper: str, q: Tensor, k: Tensor, topk_indices: Tensor, topk_length: Tensor | None, are_global: bool
) -> tuple[_Rows, Tensor]:
    """The rows of [B, S_q, …] and their entries as numbers of keys of the flattened k: −1 where none."""
    require_shape(wrapper, "q", q, B=None, S_q=None, H=None, D=None)
    b, s_q, _, d = q.shape
    require_shape(wrapper, "k", k, B=b, S_k=None, D=d)
    require_shape(wrapper, "topk_indices", topk_indices, B=b, S_q=s_q, topk=None)
    rows = _rows(wrapper, q, k, 1, None, None, None, None)
    table, end = topk_indices.flatten(0, 1), rows.start[:, None] + rows.width
    if not are_global and b > 1:
        table = table.clamp(-1, rows.width) + rows.start[:, None]
    valid = (table >= rows.start[:, None]) & (table < end)
    if topk_length is not None:
        require_shape(wrapper, "topk_length", topk_length, B=b, S_q=s_q)
        valid &= torch.arange(table.shape[1], device=q.device) < topk_length.flatten()[:, None]
    return rows, table.masked_fill(~valid, -1).int()


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
    with _on(stream):
        rows, table = _entries(name, q_attn, k_attn, topk_indices, topk_length, topk_indices_global)
        require(list(lse.shape) == list(q_attn.shape[:-1]), name, "lse", str(list(q_attn.shape[:-1])), list(lse.shape))
        target = ops.attention_distribution(
            *(_flat(q_attn, rows), _flat(k_attn, rows), table, _flat(lse, rows), float(softmax_scale)), normalize="l1"
        ).view(topk_indices.shape)
        return TupleDict(target=target if out is None else out.copy_(target))


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
    with _on(stream):
        rows, table = _entries(name, q_indexer, k_indexer, topk_indices, topk_length, topk_indices_global)
        require_shape(name, "weights", weights, B=q_indexer.shape[0], S_q=q_indexer.shape[1], H=q_indexer.shape[2])
        keys = _flat(k_indexer, rows)
        start = torch.zeros_like(rows.start)
        scores = score_entries(*(_flat(q_indexer, rows), keys, _flat(weights, rows), table, start, start + len(keys)))
        predict = scores.softmax(-1).nan_to_num_(0.0).view(topk_indices.shape)  # a row of −inf has no entries
        return TupleDict(predict=predict if out is None else out.copy_(predict))


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
    """Attention on every key, summed over the heads: Σ_h exp(softmax_scale·q·k − lse), 0 where a query sees none.

    q [B, S_q, H, D], k [B, S_k, H_kv, D] (heads of a group are neighbours), lse float32 [B, S_q, H]; packed as in
    `indexer_forward_wrapper`. Returns {out float32 [B, S_q, S_k], denom float32 [B, S_q]}, denom each row's sum.
    """
    name = "dense_attn_score_recompute_wrapper"
    _require_bf16(name, precision, q_scale, k_scale, cu_seqlens_q_scale_padded, cu_seqlens_k_scale_padded)
    with _on(stream):
        rows = _rows(name, q, k, ratio, cu_seqlens_q, cu_seqlens_k, max_seqlen_k, q_causal_offsets)
        require(k.ndim == q.ndim and k.shape[-1] == q.shape[-1], name, "k", "[…, S_k, H_kv, D]", list(k.shape))
        heads, groups = q.shape[-2], k.shape[-2]
        require(groups > 0 and heads % groups == 0, name, "k", f"of heads that divide {heads}", groups)
        require(
            qhead_per_kv_head in (None, heads // groups),
            *(name, "qhead_per_kv_head", f"{heads // groups} or None", qhead_per_kv_head),
        )
        require(list(lse.shape) == list(q.shape[:-1]), name, "lse", str(list(q.shape[:-1])), list(lse.shape))
        sums = _into(out, [*rows.shape, rows.width], torch.float32, q, name, "out")
        made = sums if sums.is_contiguous() else torch.empty_like(sums, memory_format=torch.contiguous_format)
        flat, queries, keys, logs = (
            made.view(len(rows.start), rows.width),
            _flat(q, rows),
            _flat(k, rows),
            _flat(lse, rows),
        )
        for first in range(0, len(flat), rows_at_a_time(rows.width)):
            some = slice(first, first + rows_at_a_time(rows.width))
            table, start, end = _all_keys(rows, some), rows.start[some], rows.end[some]
            for group in range(groups):
                mine = slice(group * heads // groups, (group + 1) * heads // groups)
                attention = ops.attention_distribution(
                    *(queries[some, mine], keys[:, group], table, logs[some, mine], float(softmax_scale)),
                    k_start=start,
                    k_end=end,
                )
                flat[some] = attention if group == 0 else flat[some] + attention
        denom = _into(denom_out, rows.shape, torch.float32, q, name, "denom_out")
        denom.copy_(made.sum(-1))
        return TupleDict(out=sums if made is sums else sums.copy_(made), denom=denom)


def _score_gradient(predict: Tensor, target: Tensor, scale: Tensor, seen: Tensor) -> Tensor:
    """Of KL(target ‖ predict) by the scores, where predict is their softmax; logarithms are cut at −100 as there."""
    signal = target.clamp(min=_LEAST_PROBABILITY).masked_fill(~seen, 0.0)
    return (predict * signal.sum(-1, keepdim=True) - signal) * scale


def _index_gradients(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    indices: Tensor,
    d_scores: Tensor,
    outputs: tuple[tuple[Tensor, Tensor | None], ...],
    k_start: Tensor | None = None,
    k_end: Tensor | None = None,
    deterministic: bool = False,
) -> TupleDict:
    """d_index_q, d_weights and d_index_k into the tensors given, or into new ones like the inputs."""
    _, d_q, d_k, d_w, _ = ops.lightning_indexer_backward(
        *(None, q, k, weights.float(), indices, k_start, k_end, d_scores), deterministic=deterministic
    )
    results = []
    for gradient, (like, out) in zip((d_q, d_w, d_k), outputs, strict=True):
        gradient = gradient.view(like.shape)
        results.append(gradient.to(like.dtype) if out is None else out.copy_(gradient))
    return TupleDict(zip(("d_index_q", "d_weights", "d_index_k"), results, strict=True))


@torch.no_grad()
def indexer_backward_wrapper(
    index_q: Tensor,
    weights: Tensor,
    index_k: Tensor,
    attn_score: Tensor,
    index_score: Tensor,
    topk_indices: Tensor,
    grad_loss: Tensor | float,
    sm_scale: float = 1.0,
    loss_coeff: float = 1.0,
    block_I: int = 128,  # noqa: N803
    topk_indices_global: bool = False,
    d_index_q: Tensor | None = None,
    d_weights: Tensor | None = None,
    d_index_k: Tensor | None = None,
    stream: Any = None,
    *,
    backend: str = "default",
    workspace: Tensor | None = None,
    deterministic: bool = False,
    deterministic_dk_planes: int = 96,
) -> TupleDict:
    """Gradients of grad_loss·loss_coeff·mean over rows of KL(attn_score ‖ index_score), the softmax of the scores.

    index_q [B, S_q, H, D], weights [B, S_q, H], index_k [B, S_k, D]; attn_score (target) and index_score (predict)
    float32 [B, S_q, topk] in the order of topk_indices. attn_score is overwritten with the gradient of the scores.
    Returns {d_index_q, d_weights, d_index_k} in their inputs' dtypes, or in the tensors given.
    """
    name = "indexer_backward_wrapper"
    require(backend in ("default", "sm100_v2"), name, "backend", "default or sm100_v2", backend)
    with _on(stream):
        rows, table = _entries(name, index_q, index_k, topk_indices, None, topk_indices_global)
        b, s_q, heads, _ = index_q.shape
        require_shape(name, "weights", weights, B=b, S_q=s_q, H=heads)
        for argument, score in (("attn_score", attn_score), ("index_score", index_score)):
            require(score.dtype == torch.float32, name, argument, "float32", score.dtype)
            require_shape(name, argument, score, B=b, S_q=s_q, topk=topk_indices.shape[2])
        scale = torch.as_tensor(grad_loss, device=index_q.device).float().reshape(()) * (loss_coeff / max(b * s_q, 1))
        attn_score.copy_(_score_gradient(index_score, attn_score, scale, index_score >= _LEAST_PROBABILITY))
        return _index_gradients(
            *(_flat(index_q, rows), _flat(index_k, rows), _flat(weights, rows), table),
            _flat(attn_score, rows) * sm_scale,
            ((index_q, d_index_q), (weights, d_weights), (index_k, d_index_k)),
            deterministic=deterministic,
        )


@torch.no_grad()
def dense_indexer_backward_wrapper(
    index_q: Tensor,
    weights: Tensor,
    index_k: Tensor,
    attn_score: Tensor,
    attn_l1norm: Tensor,
    index_score: Tensor,
    index_lse: Tensor,
    grad_loss: Tensor | float,
    sm_scale: float = 1.0,
    loss_coeff: float = 1.0,
    block_I: int = 128,  # noqa: N803
    ratio: int = 1,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    q_causal_offsets: Tensor | None = None,
    d_index_q: Tensor | None = None,
    d_weights: Tensor | None = None,
    d_index_k: Tensor | None = None,
    stream: Any = None,
    workspace: Tensor | None = None,
) -> TupleDict:
    """`indexer_backward_wrapper` over all keys that a query sees, from what the two dense recomputations return.

    The target is attn_score / attn_l1norm, the prediction exp(index_score − index_lse). index_score is overwritten with
    the gradient of the scores.
    """
    name = "dense_indexer_backward_wrapper"
    with _on(stream):
        rows = _rows(name, index_q, index_k, ratio, cu_seqlens_q, cu_seqlens_k, max_seqlen_k, q_causal_offsets)
        require(
            list(weights.shape) == list(index_q.shape[:-1]),
            *(name, "weights", str(list(index_q.shape[:-1])), list(weights.shape)),
        )
        dense, sums = [*rows.shape, rows.width], rows.shape
        for argument, tensor, shape in (
            ("attn_score", attn_score, dense),
            ("attn_l1norm", attn_l1norm, sums),
            ("index_score", index_score, dense),
            ("index_lse", index_lse, sums),
        ):
            require(
                tensor.dtype == torch.float32 and list(tensor.shape) == shape,
                *(name, argument, f"float32 {shape}", f"{tensor.dtype} {list(tensor.shape)}"),
            )
        scale = torch.as_tensor(grad_loss, device=index_q.device).float().reshape(())
        scale = scale * (loss_coeff / max(len(rows.start), 1))
        visible = torch.arange(rows.width, device=index_q.device) < (rows.end - rows.start).view(*rows.shape, 1)
        logs = (index_score - index_lse.unsqueeze(-1)).masked_fill_(~visible, -torch.inf)
        target = attn_score / (attn_l1norm.unsqueeze(-1) + _LEAST_TARGET_SUM)
        index_score.copy_(_score_gradient(logs.exp(), target, scale, logs >= -100.0))
        return _index_gradients(
            *(_flat(index_q, rows), _flat(index_k, rows), _flat(weights, rows), _all_keys(rows, slice(None))),
            _flat(index_score, rows) * sm_scale,
            ((index_q, d_index_q), (weights, d_weights), (index_k, d_index_k)),
            k_start=rows.start,
            k_end=rows.end,
        )


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
    with _on(stream):
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
    with _on(stream):
        dkv_dtype = kv.dtype if dkv is None else dkv.dtype
        gradients = ops.sparse_mla_backward(
            *(dout, q, kv, topk_idxs, out, lse, _scale_of(q, softmax_scale), out.shape[2]),
            attn_sink=attn_sink,
            topk_length=topk_length,
            deterministic=deterministic,
            dkv_dtype=str(dkv_dtype).removeprefix("torch."),
        )
        given = (dq, dkv, None)
        written = [g if o is None or g is None else o.copy_(g) for g, o in zip(gradients, given, strict=True)]
        return TupleDict(zip(("dq", "dkv", "d_sink"), written, strict=True))


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
        q, kv, indices, _scale_of(q, softmax_scale), attn_sink=attn_sink, topk_length=topk_length
    )
    return TupleDict(out=out, max_logits=max_logits, lse=lse)


DSA = SimpleNamespace(
    dense_attn_score_recompute_wrapper=dense_attn_score_recompute_wrapper,
    dense_indexer_backward_wrapper=dense_indexer_backward_wrapper,
    dense_indexer_score_recompute_wrapper=dense_indexer_score_recompute_wrapper,
    indexer_backward_wrapper=indexer_backward_wrapper,
    indexer_forward_wrapper=indexer_forward_wrapper,
    indexer_top_k_wrapper=indexer_top_k_wrapper,
    sparse_attention=sparse_attention,
    sparse_attention_backward_wrapper=sparse_attention_backward_wrapper,
    sparse_attention_forward_wrapper=sparse_attention_forward_wrapper,
    sparse_attn_score_recompute_wrapper=sparse_attn_score_recompute_wrapper,
    sparse_indexer_score_recompute_wrapper=sparse_indexer_score_recompute_wrapper,
)
