"""`gather_attn` with the signature and the conventions of attention-gym: window keys and selected keys in one softmax.

    from hopwell.compat.attn_gym import AuxRequest, gather_attn    # instead of: from attn_gym.sparse.gather_attn ...

It follows `attn_gym/sparse/gather_attn/api.py` of github.com/meta-pytorch/attention-gym and its PyTorch reference, in
the version with cu_seqlens. Earlier versions have `doc_ids` in its place, and up to 7fdb85d the name
`selected_attention`; these are not taken. Keys are values too. lse contains the sink, and is −inf for a row without any
key or sink. Selected entries are counted in the query's document, and entries outside it are ignored. With cu_seqlens,
`out` and gradients of the rows after the last document are 0.

Tensors may have any strides. A tensor is copied if its last dimension is not contiguous, and on GPUs if its rows are
not aligned to 16 bytes. With a sliding_window_size of 0 local_kv gets a gradient of zeros.

Differences: `impl` and `kernel_options` are checked and choose nothing, because Hopwell chooses its own backend; CPU
tensors work with each. lse carries no gradient, also with impl="reference". query is bfloat16, on the CPU float32 too.
GPUs take a head_dim of 512. Heads with keys of their own are one call a head. The gradients have the same bits every
time where PyTorch is told to be deterministic. A NaN in a key reaches only the queries that attend it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hopwell.torch import key_ranges, ops

from .._checks import INTEGERS, integer, require, require_one_device, require_sizes
from ._index_scores import as_int32
from ._tensors import in_rows, with_zero_gradients

__all__ = ["AuxRequest", "GatherAttnAux", "gather_attn"]

_NAME = "gather_attn"
_OPTIONS: tuple[Mapping[str, str], ...] = ({}, {"backend": "cute"}, {"backend": "triton"})


@dataclass(frozen=True, slots=True)
class AuxRequest:
    """What `gather_attn` returns beside its output."""

    lse: bool = False


@dataclass(frozen=True, slots=True)
class GatherAttnAux:
    """lse: float32 [batch, heads, sequence_length] with the sink in it, or None if it was not requested."""

    lse: Tensor | None = None


def gather_attn(
    query: Tensor,
    local_kv: Tensor,
    sparse_kv: Tensor,
    kv_indices: Tensor,
    attention_sink: Tensor | None = None,
    *,
    sliding_window_size: int = 512,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    impl: Any = "fused",
    kernel_options: Mapping[str, str] | None = None,
    scale: float | None = None,
    return_aux: Any = None,
) -> Tensor | tuple[Tensor, GatherAttnAux]:
    """Attention of every query over the last tokens of its document and the entries that it selects.

    Args:
        query: [batch, heads, sequence_length, head_dim].
        local_kv: [batch, 1 or heads, sequence_length, head_dim], the keys of the window.
        sparse_kv: [batch, 1 or heads, entries, head_dim], what kv_indices select from.
        kv_indices: int32 or int64 [batch, sequence_length, topk], the same for all heads. With cu_seqlens they count
            from the first entry of the query's document. Other entries are ignored; one that occurs twice counts twice.
        attention_sink: [heads] in query's dtype or float32, a logit without a value.
        sliding_window_size: the most window keys that a query sees, its own among them; 0: none.
        cu_seqlens: int32 [documents + 1], packed documents of query and local_kv (batch 1). cu_seqlens_k: likewise
            of sparse_kv. Both or neither.
        impl: "fused" or "reference".
        kernel_options: None, {} or {"backend": "cute" or "triton"}.
        scale: factor of the logits, but not of the sink's; None: head_dim^−½.
        return_aux: an AuxRequest, or None for the output alone.

    Returns:
        out like query, differentiable in query, local_kv, sparse_kv and attention_sink; with return_aux (out,
        GatherAttnAux).

    Raises:
        ValueError: an argument has the wrong value, dtype, shape or device.
    """
    window = integer(_NAME, "sliding_window_size", sliding_window_size)
    require(window >= 0, _NAME, "sliding_window_size", "at least 0", window)
    chosen = getattr(impl, "value", impl)
    require(chosen in ("fused", "reference"), _NAME, "impl", "'fused' or 'reference'", impl)
    require(
        kernel_options is None or kernel_options in _OPTIONS, _NAME, "kernel_options", str(_OPTIONS), kernel_options
    )
    without = "none with impl='reference'"
    require(chosen == "fused" or not kernel_options, _NAME, "kernel_options", without, kernel_options)
    require(scale is None or scale > 0, _NAME, "scale", "above 0", scale)
    _check(query, local_kv, sparse_kv, kv_indices, attention_sink)
    query, local_kv, sparse_kv = in_rows(query), in_rows(local_kv), in_rows(sparse_kv)
    batch, heads, s, d = query.shape
    ranges, indices = _documents(query, sparse_kv, kv_indices, cu_seqlens, cu_seqlens_k)
    factor = d**-0.5 if scale is None else float(scale)
    sink = None if attention_sink is None else in_rows(attention_sink.float())

    def attend(i: int, own: slice) -> tuple[Tensor, Tensor]:
        """The attention of sequence i for the heads `own`, which share keys: [s, heads, d] and lse [s, heads]."""
        head = 0 if sparse_kv.shape[1] == 1 else own.start
        windowed: dict[str, Any] = {"window_kv": local_kv[i, head], "window": min(window, s), **ranges}
        out, _, lse = ops.sparse_mla(
            *(query[i, own].transpose(0, 1), sparse_kv[i, head], indices[i], factor, d),
            attn_sink=None if sink is None else sink[own],
            **(windowed if window else {}),
        )
        return out, lse

    own_heads = [slice(0, heads)] if sparse_kv.shape[1] == 1 else [slice(h, h + 1) for h in range(heads)]
    results = [[attend(i, own) for own in own_heads] for i in range(batch)]
    out, lse = (_stacked([[result[part] for result in of_heads] for of_heads in results]) for part in (0, 1))
    if window == 0:
        out = with_zero_gradients(out, local_kv)
    if return_aux is None:
        return out
    return out, GatherAttnAux(_with_sink(lse, sink) if return_aux.lse else None)


def _check(
    query: Tensor, local_kv: Tensor, sparse_kv: Tensor, kv_indices: Tensor, attention_sink: Tensor | None
) -> None:
    fits = query.ndim == 4 and 0 not in query.shape
    require(fits, _NAME, "query", "[batch, heads, sequence_length, head_dim], each at least 1", query)
    dtypes = (torch.bfloat16, torch.float32) if query.device.type == "cpu" else (torch.bfloat16,)
    require(query.dtype in dtypes, _NAME, "query", " or ".join(map(str, dtypes)), query)
    require_one_device(
        _NAME, query=query, local_kv=local_kv, sparse_kv=sparse_kv, kv_indices=kv_indices, attention_sink=attention_sink
    )
    batch, heads, s, d = query.shape
    fits = sparse_kv.ndim == 4 and sparse_kv.shape[1] in (1, heads)
    fits = fits and (sparse_kv.shape[0], sparse_kv.shape[3]) == (batch, d)
    require(fits, _NAME, "sparse_kv", lambda: f"[{batch}, 1 or {heads}, entries, {d}]", sparse_kv)
    require_sizes(_NAME, "local_kv", local_kv, (batch, sparse_kv.shape[1], s, d))
    for name, keys in (("local_kv", local_kv), ("sparse_kv", sparse_kv)):
        require(keys.dtype == query.dtype, _NAME, name, f"{query.dtype} like query", keys)
    fits = kv_indices.ndim == 3 and kv_indices.shape[:2] == (batch, s) and kv_indices.dtype in INTEGERS
    require(fits, _NAME, "kv_indices", lambda: f"int32 or int64 [{batch}, {s}, topk]", kv_indices)
    if attention_sink is not None:
        fits = attention_sink.shape == (heads,) and attention_sink.dtype in (query.dtype, torch.float32)
        require(fits, _NAME, "attention_sink", f"{query.dtype} or float32 [{heads}]", attention_sink)


def _documents(
    query: Tensor, sparse_kv: Tensor, kv_indices: Tensor, cu_seqlens: Tensor | None, cu_seqlens_k: Tensor | None
) -> tuple[dict[str, Tensor], Tensor]:
    """The range of window keys of each query, and entries int32 [batch, s, topk] counted in the whole of sparse_kv."""
    entries = sparse_kv.shape[2]
    if cu_seqlens is None and cu_seqlens_k is None:
        indices = as_int32(kv_indices, entries)
        return {}, indices if entries else indices[..., :0]
    s = query.shape[2]
    require(query.shape[0] == 1, _NAME, "query", "[1, heads, sequence_length, head_dim] with cu_seqlens", query)
    for name, offsets in (("cu_seqlens", cu_seqlens), ("cu_seqlens_k", cu_seqlens_k)):
        fits = isinstance(offsets, Tensor) and offsets.dtype == torch.int32
        fits = fits and offsets.ndim == 1 and offsets.shape[0] >= 2  # type: ignore[union-attr]
        require(fits, _NAME, name, "int32 [documents + 1], as the other offsets are", offsets)
    assert cu_seqlens is not None and cu_seqlens_k is not None
    require_one_device(_NAME, query=query, cu_seqlens=cu_seqlens, cu_seqlens_k=cu_seqlens_k)
    require_sizes(_NAME, "cu_seqlens_k", cu_seqlens_k, cu_seqlens.shape)
    w_start, w_end = key_ranges(cu_seqlens, s_q=s)
    k_start, k_end = key_ranges(cu_seqlens, cu_seqlens_k, causal=False, s_q=s)
    own = (kv_indices >= 0) & (kv_indices < (k_end - k_start)[:, None])
    indices = torch.where(own, kv_indices + k_start[:, None], -1)
    return {"w_start": w_start, "w_end": w_end}, as_int32(indices if entries else indices[..., :0], entries)


def _stacked(results: list[list[Tensor]]) -> Tensor:
    """Results [s, heads, …] of groups of heads of sequences → [batch, heads, s, …]."""
    of_sequences = [of_heads[0] if len(of_heads) == 1 else torch.cat(of_heads, 1) for of_heads in results]
    one = of_sequences[0][None] if len(of_sequences) == 1 else torch.stack(of_sequences)
    return one.transpose(1, 2)


def _with_sink(lse: Tensor, sink: Tensor | None) -> Tensor:
    """attention-gym's lse: the sink is in it, and a row without a key has no other term."""
    lse = lse.detach()
    lse = lse.masked_fill(lse == torch.inf, -torch.inf)
    return lse if sink is None else torch.logaddexp(lse, sink.detach()[:, None])
