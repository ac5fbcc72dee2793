"""The four functions of DeepSeek-V4's attention that Megatron-LM's csa.py calls: see `hopwell.compat.megatron`."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hopwell.torch import key_ranges, ops

from .._checks import INTEGERS, integer, require
from ._index_scores import as_int32
from ._tensors import in_rows

_MOST_VALUE_COLUMNS = 512
_FLOATS = torch.bfloat16, torch.float32


def _check_entries(function: str, argument: str, entries: Tensor, *rows: int) -> None:
    fits = entries.ndim == len(rows) + 1 and entries.shape[:-1] == rows and entries.dtype in INTEGERS
    require(fits, function, argument, f"int32 or int64 [{', '.join(map(str, rows))}, entries]", entries)


def csa_sparse_attn(
    query: Tensor,
    kv: Tensor,
    attn_sink: Tensor,
    topk_idxs: Tensor,
    softmax_scale: float,
    topk_length: Tensor | None = None,
    indexer_topk: int = 0,
    is_thd: bool = False,
) -> Tensor:
    """Attention with a sink over given entries: query [s_q, b, heads, d], kv [s_kv, b, d], topk_idxs int32 [s_q · b,
    entries] into the rows of kv.reshape(s_kv · b, d). With is_thd query [total, heads, d], kv [total_kv, d] and rows of
    theirs. Returns [s_q, b, heads · d_v] or [total, heads · d_v], d_v = min(d, 512), differentiable in query, kv and
    attn_sink. indexer_topk changes nothing: the lse that it asks for is not returned.
    """
    name = "csa_sparse_attn"
    integer(name, "indexer_topk", indexer_topk)
    expected = "[total, heads, d]" if is_thd else "[s_q, b, heads, d]"
    require(query.ndim == (3 if is_thd else 4), name, "query", expected, query)
    rows, d = query.shape[:-2], query.shape[-1]
    fits = kv.ndim == query.ndim - 1 and kv.shape[1:-1] == rows[1:] and kv.shape[-1] == d
    require(fits, name, "kv", "[total_kv, d]" if is_thd else "[s_kv, b, d] like query", kv)
    flat, keys = in_rows(query.flatten(0, -3)), in_rows(kv.flatten(0, -2))
    _check_entries(name, "topk_idxs", topk_idxs, len(flat))
    lengths = None if topk_length is None else as_int32(topk_length, topk_idxs.shape[1])
    out, _, _ = ops.sparse_mla(
        *(flat, keys, as_int32(topk_idxs, len(keys)), softmax_scale, min(d, _MOST_VALUE_COLUMNS)),
        attn_sink=in_rows(attn_sink.float()),
        topk_length=lengths,
    )
    return out.reshape(*rows, -1)


def _check_index(function: str, q: Tensor, k: Tensor, weights: Tensor, packed: bool) -> None:
    dims = "total" if packed else "s_q, b"
    fits = q.ndim == (3 if packed else 4) and q.dtype in _FLOATS
    require(fits, function, "q_indexer", f"bfloat16 or float32 [{dims}, h_index, d_index]", q)
    fits = k.ndim == q.ndim - 1 and k.shape[1:-1] == q.shape[1:-2] and k.shape[-1] == q.shape[-1] and k.dtype == q.dtype
    expected = f"{q.dtype} [{'total_k' if packed else 's_k, b'}, {q.shape[-1]}] like q_indexer"
    require(fits, function, "k_indexer", expected, k)
    require(len(k) > 0, function, "k_indexer", "at least one row", k)
    fits = weights.shape == q.shape[:-1] and weights.dtype in _FLOATS
    require(fits, function, "weights", f"bfloat16 or float32 {list(q.shape[:-1])}", weights)


def _segment_of_rows(cu_seqlens_q: Tensor, total: int) -> Tensor:
    """The segment of each row, int64 [total]. Rows after the last segment count as the last segment's."""
    row = torch.arange(total, device=cu_seqlens_q.device, dtype=cu_seqlens_q.dtype)
    return torch.searchsorted(cu_seqlens_q[1:].contiguous(), row, right=True).clamp(max=len(cu_seqlens_q) - 2)


def _visible(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, ratio: int, total: int, offsets: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The compressed keys that each query of a pack sees. `offsets` are the positions of each segment's first query."""
    first, end = key_ranges(cu_seqlens_q, cu_seqlens_k, causal=False, s_q=total)
    position = torch.arange(total, device=first.device) - key_ranges(cu_seqlens_q, s_q=total)[0]
    if offsets is not None:
        position = position + offsets[_segment_of_rows(cu_seqlens_q, total)]
    seen = (position + 1) // ratio
    return first, torch.minimum(end, first + seen).int()


def _select(q: Tensor, k: Tensor, weights: Tensor, topk: int, k_start: Tensor, k_end: Tensor) -> tuple[Tensor, Tensor]:
    """The selected keys of each query, counted from its k_start, int32 [s_q, topk], and how many there are."""
    most = min(topk, len(k))
    q, k, weights = in_rows(q), in_rows(k), in_rows(weights)
    with torch.no_grad():
        chosen, scores = ops.lightning_indexer(q, k, weights, most, k_start=k_start, k_end=k_end)
        chosen = torch.where((chosen < 0) | (scores == -torch.inf), -1, chosen - k_start[:, None])
        chosen = torch.nn.functional.pad(chosen, (0, topk - most), value=-1)
    return chosen, (chosen >= 0).sum(-1).int()


def _causal(s_q: int, s_k: int, ratio: int, device: torch.device) -> tuple[Tensor, Tensor]:
    end = ((torch.arange(s_q, device=device) + 1) // ratio).clamp(max=s_k).int()
    return torch.zeros_like(end), end


def _scaled(weights: Tensor, scale: float) -> Tensor:
    """float32, rounded to the dtype of `weights` as Megatron-LM does. Its own functions for context parallelism then
    select the same keys.
    """
    return (weights.float() * scale).to(weights.dtype).float()


def indexer_topk(
    q_indexer: Tensor,
    k_indexer: Tensor,
    weights: Tensor,
    topk: int,
    ratio: int = 4,
    indexer_softmax_scale: float = 1.0,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    q_causal_offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The compressed keys of largest index score: q_indexer [s_q, b, h_index, d_index], k_indexer [s_k, b, d_index],
    weights [s_q, b, h_index]; packed without b, with cu_seqlens int32 [B + 1]. A query at position p sees the keys
    below (p + 1) // ratio. Returns entries int32 [b, s_q, topk] or [total, topk], counted in the sequence, ascending,
    then −1, and their number [b, s_q] or [total]. The maxima of lengths aren't needed.
    """
    name, packed = "indexer_topk", cu_seqlens_q is not None
    ratio, topk = integer(name, "ratio", ratio), integer(name, "topk", topk)
    require(ratio >= 1, name, "ratio", "at least 1", ratio)
    require(topk >= 1, name, "topk", "at least 1", topk)
    _check_index(name, q_indexer, k_indexer, weights, packed)
    scaled = _scaled(weights, indexer_softmax_scale)
    if cu_seqlens_q is not None:
        _check_offsets(name, cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv)
        assert cu_seqlens_kv is not None
        ranges = _visible(cu_seqlens_q, cu_seqlens_kv, ratio, len(q_indexer), q_causal_offsets)
        return _select(q_indexer, k_indexer, scaled, topk, *ranges)
    require(q_causal_offsets is None, name, "q_causal_offsets", "None without cu_seqlens_q", q_causal_offsets)
    ranges = _causal(len(q_indexer), len(k_indexer), ratio, q_indexer.device)
    chosen = [_select(q_indexer[:, i], k_indexer[:, i], scaled[:, i], topk, *ranges) for i in range(q_indexer.shape[1])]
    indices, lengths = zip(*chosen, strict=True)
    return torch.stack(indices), torch.stack(lengths)


def _check_offsets(function: str, **offsets: Tensor | None) -> None:
    first = next(iter(offsets.values()))
    assert first is not None
    for name, given in offsets.items():
        fits = given is not None and given.dtype in INTEGERS and given.ndim == 1 and given.shape == first.shape
        require(fits, function, name, f"int32 or int64 {list(first.shape)}", given)


@dataclass
class _Sequence:
    """One sequence, or one pack of segments.

    Attributes:
        entries_of: int32 [s_q, 1], added to selected keys it gives rows of `kv`.
        window: rows of `kv` that each query attends besides; others are none.
        compressed: what the indexer's target is about, [s_k, d].
    """

    query: Tensor
    kv: Tensor
    window: Tensor
    entries_of: Tensor
    compressed: Tensor
    q: Tensor
    k: Tensor
    weights: Tensor
    k_start: Tensor
    k_end: Tensor
    row_weights: Tensor

    def attend(self, sink: Tensor, topk: int, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """out [s_q, heads, d_v], lse, and the selected keys as rows of `k`, int32 [s_q, min(topk, s_k)]."""
        inside, _ = _select(self.q, self.k, self.weights, topk, self.k_start, self.k_end)
        entries = torch.where(inside < 0, -1, inside + self.entries_of)
        table = torch.cat([entries.int(), as_int32(self.window, len(self.kv))], 1)
        d_v = min(self.kv.shape[1], _MOST_VALUE_COLUMNS)
        out, _, lse = ops.sparse_mla(self.query, self.kv, table, scale, d_v, attn_sink=sink)
        return out, lse, torch.where(inside < 0, -1, inside + self.k_start[:, None])[:, : len(self.k)]

    def sparse_loss(self, sink: Tensor, lse: Tensor, chosen: Tensor, scale: float) -> Tensor:
        attention = self.query.detach(), self.compressed.detach(), chosen, lse, scale
        target = ops.attention_distribution(*attention, attn_sink=sink.detach(), normalize="l1")
        return ops.indexer_loss(self.q, self.k, self.weights, chosen, target, row_weights=self.row_weights)

    def dense_loss(self, sink: Tensor, scale: float) -> Tensor:
        """Over every visible key. The lse of window and visible keys together comes from two calls."""
        visible: dict[str, Any] = {"k_start": self.k_start, "k_end": self.k_end}
        query, compressed = self.query.detach(), self.compressed.detach()
        d_v = min(self.kv.shape[1], _MOST_VALUE_COLUMNS)
        with torch.no_grad():
            window = as_int32(self.window, len(self.kv))
            parts = [
                ops.sparse_mla(query, self.kv.detach(), window, scale, d_v)[2],
                ops.sparse_mla(query, compressed, None, scale, d_v, **visible)[2],
            ]
            empty = [part == torch.inf for part in parts]
            lse = torch.logaddexp(*(x.masked_fill(none, -torch.inf) for x, none in zip(parts, empty, strict=True)))
            lse = lse.masked_fill(empty[0] & empty[1], torch.inf)
        options = visible | {"attn_sink": sink.detach(), "normalize": "l1", "row_weights": self.row_weights}
        return ops.indexer_dense_loss(query, compressed, lse, self.q, self.k, self.weights, scale, **options)


class _WithoutLoss(torch.autograd.Function):
    """The output, and a loss of 0. The indexer's inputs get gradients of 0 from both, because data parallelism that
    overlaps its reductions waits for a gradient of each parameter.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        ctx.inputs = [(x.shape, x.dtype) for x in inputs]
        return output.view_as(output), output.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, d_output: Tensor, _d_loss: Tensor) -> tuple[Tensor, ...]:
        zeros = (d_output.new_zeros(shape, dtype=dtype) for shape, dtype in ctx.inputs)
        return d_output, *zeros


def fused_csa_indexer_sparse_attn(
    query: Tensor,
    kv_full: Tensor,
    attn_sink: Tensor,
    window_idxs: Tensor,
    q_indexer: Tensor,
    k_indexer: Tensor,
    weights: Tensor,
    indexer_topk: int,
    ratio: int,
    softmax_scale: float,
    indexer_softmax_scale: float = 1.0,
    loss_coeff: float = 0.0,
    sparse_loss: bool = False,
    kv_offset: int = 0,
    calculate_per_token_loss: bool = False,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
    cu_seqlens_kv_full: Tensor | None = None,
    cu_seqlens_compressed_idx: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_compressed_idx: int | None = None,
    compressed_kv: Tensor | None = None,
    cu_seqlens_q_unpadded: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Selection, attention over window and selected keys with a sink, and the indexer's loss.

    query [s_q, b, heads, d]; kv_full [s_kv, b, d], whose rows from kv_offset on are the compressed keys; window_idxs
    [b, s_q, entries], rows of kv_full, −1 for none; q_indexer, k_indexer, weights as in `indexer_topk`. Packed: without
    b, each segment of kv_full (cu_seqlens_kv_full) has its cu_seqlens_kv tokens and then its compressed keys; entries
    count in the segment; compressed_kv [total_k, d] has the compressed keys alone. Rows beyond the segments of
    cu_seqlens_q_unpadded have no loss and no gradient.

    Returns (output [s_q, b, heads · d_v] or [total, heads · d_v], loss float32 0-d): the output is differentiable in
    query, kv_full and attn_sink, the loss in the indexer's inputs. Without a loss_coeff their gradients are zeros.
    """
    name, packed = "fused_csa_indexer_sparse_attn", cu_seqlens_q is not None
    ratio, topk = integer(name, "ratio", ratio), integer(name, "indexer_topk", indexer_topk)
    require(ratio >= 1, name, "ratio", "at least 1", ratio)
    require(topk >= 1, name, "indexer_topk", "at least 1", topk)
    expected = "[total, heads, d]" if packed else "[s_q, b, heads, d]"
    require(query.ndim == (3 if packed else 4), name, "query", expected, query)
    fits = kv_full.ndim == query.ndim - 1 and kv_full.shape[-1] == query.shape[-1]
    fits = fits and kv_full.shape[1:-1] == query.shape[1:-2]
    require(fits, name, "kv_full", "[total_kv, d]" if packed else "[s_kv, b, d] like query", kv_full)
    _check_index(name, q_indexer, k_indexer, weights, packed)
    fits = q_indexer.shape[:-2] == query.shape[:-2]
    require(fits, name, "q_indexer", f"{list(query.shape[:-2])}, … like query", q_indexer)
    query, kv_full, sink, rows = in_rows(query), in_rows(kv_full), in_rows(attn_sink.float()), query.shape[:-2]
    q_indexer, k_indexer = in_rows(q_indexer), in_rows(k_indexer)
    scaled = in_rows(_scaled(weights, indexer_softmax_scale))
    coefficient = float(loss_coeff) / (1 if calculate_per_token_loss else max(rows.numel(), 1))
    row_weights = torch.full((len(query),), coefficient, dtype=torch.float32, device=query.device)
    padding: Tensor | None = None
    if cu_seqlens_q is not None:
        _check_entries(name, "window_idxs", window_idxs, len(query))
        _check_offsets(
            name,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_kv=cu_seqlens_kv,
            cu_seqlens_kv_full=cu_seqlens_kv_full,
            cu_seqlens_compressed_idx=cu_seqlens_compressed_idx,
        )
        assert cu_seqlens_kv is not None and cu_seqlens_kv_full is not None and cu_seqlens_compressed_idx is not None
        fits = compressed_kv is not None and compressed_kv.shape == (len(k_indexer), query.shape[-1])
        require(fits, name, "compressed_kv", f"[{len(k_indexer)}, {query.shape[-1]}]", compressed_kv)
        assert compressed_kv is not None
        row = torch.arange(len(query), device=query.device)
        segment = _segment_of_rows(cu_seqlens_q, len(query))
        if cu_seqlens_q_unpadded is not None:
            _check_offsets(name, cu_seqlens_q=cu_seqlens_q, cu_seqlens_q_unpadded=cu_seqlens_q_unpadded)
            padding = row - cu_seqlens_q[segment] >= cu_seqlens_q_unpadded.diff()[segment]
            row_weights = row_weights.masked_fill(padding, 0.0)
        base = cu_seqlens_kv_full[segment][:, None]
        window = torch.where(window_idxs < 0, -1, window_idxs + base)
        offset = (base + cu_seqlens_kv.diff()[segment][:, None]).int()
        ranges = _visible(cu_seqlens_q, cu_seqlens_compressed_idx, ratio, len(query))
        attention = query, kv_full, window, offset, in_rows(compressed_kv)
        sequences = [_Sequence(*attention, q_indexer, k_indexer, scaled, *ranges, row_weights)]
    else:
        _check_entries(name, "window_idxs", window_idxs, query.shape[1], len(query))
        offset = torch.full((1, 1), integer(name, "kv_offset", kv_offset), dtype=torch.int32, device=query.device)
        compressed = kv_full[kv_offset:]
        require(len(compressed) == len(k_indexer), name, "kv_offset", f"{len(kv_full) - len(k_indexer)}", kv_offset)
        ranges = _causal(len(query), len(k_indexer), ratio, query.device)
        sequences = [
            _Sequence(
                *(query[:, i], kv_full[:, i], window_idxs[i], offset, compressed[:, i]),
                *(q_indexer[:, i], k_indexer[:, i], scaled[:, i], *ranges, row_weights),
            )
            for i in range(query.shape[1])
        ]
    loss = torch.zeros((), dtype=torch.float32, device=query.device)
    outs = []
    for sequence in sequences:
        out, lse, chosen = sequence.attend(sink, topk, softmax_scale)
        outs.append(out if padding is None else torch.where(padding[:, None, None], out.detach(), out))
        if loss_coeff > 0:
            own = sequence.sparse_loss(sink, lse, chosen, softmax_scale) if sparse_loss else None
            loss = loss + (sequence.dense_loss(sink, softmax_scale) if own is None else own)
    output = (outs[0] if packed else torch.stack(outs, 1)).flatten(-2)
    if loss_coeff > 0:
        return output, loss
    result: tuple[Tensor, Tensor] = _WithoutLoss.apply(output, q_indexer, k_indexer, weights)  # type: ignore[no-untyped-call]
    return result


def maybe_compress_thd_fused(
    kv: Tensor,
    score: Tensor,
    ape: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_comp: Tensor,
    total_comp: int,
    ratio: int,
    head_dim: int,
    coff: int,
    enabled: bool = True,
) -> Tensor | None:
    """The compressor's pooling of packed documents: kv and score [total, 1, coff · head_dim], ape float32 [ratio,
    coff · head_dim], offsets [B + 1] → [total_comp, 1, head_dim], differentiable in kv, score and ape. Rows after the
    last document's keys are 0. The result is None if `enabled` is false, or if `kv_compress` does not take an argument;
    Megatron-LM then keeps its own pooling.
    """
    if not enabled or kv.dtype not in _FLOATS or score.dtype != kv.dtype or ape.dtype != torch.float32:
        return None
    if kv.is_cuda and (torch.cuda.get_device_capability(kv.device) < (8, 0) or head_dim % 8):
        return None
    if kv.ndim != 3 or kv.shape[1:] != (1, coff * head_dim) or score.shape != kv.shape or coff not in (1, 2):
        return None
    if ratio < 1 or ape.shape != (ratio, coff * head_dim) or total_comp <= 0 or len(kv) < ratio:
        return None
    out = ops.kv_compress(
        *(in_rows(kv[:, 0]), in_rows(score[:, 0]), ratio),
        position_bias=in_rows(ape),
        overlap=coff == 2,
        cu_seqlens=in_rows(cu_seqlens.int()),
        cu_compressed=in_rows(cu_seqlens_comp.int()),
    )
    if total_comp > len(out):
        out = torch.nn.functional.pad(out, (0, 0, 0, total_comp - len(out)))
    return out[:total_comp, None]
