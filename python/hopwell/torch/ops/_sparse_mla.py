"""Sparse MLA, forward and backward."""

from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

import hopwell
from hopwell._arrays import dtype_name

from ._register import (
    Named,
    NamedGradients,
    arguments_of,
    contiguous_rows,
    differentiable,
    exporting,
    no_gradient,
    operator,
)

_forward, _backward = exporting(hopwell.sparse_mla_forward), exporting(hopwell.sparse_mla_backward)


def _sparse_mla_forward_fake(q: Tensor, d_v: int, **_: Any) -> tuple[Tensor, Tensor, Tensor]:
    s_q, h_q, d_qk = q.shape
    if isinstance(d_v, int) and isinstance(d_qk, int) and not 1 <= d_v <= d_qk:
        raise ValueError(f"sparse_mla_forward: d_v must be between 1 and d_qk = {d_qk}; got {d_v}")
    row = q.new_empty((s_q, h_q), dtype=torch.float32)
    return q.new_empty((s_q, h_q, d_v)), row, torch.empty_like(row)


@operator("sparse_mla_forward", _sparse_mla_forward_fake)
@arguments_of(hopwell.sparse_mla_forward, "out", "max_logits", "lse", indices_ascending=bool)
def sparse_mla_forward(indices_ascending: bool, **given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The op behind `sparse_mla`, with all arguments positional. Only the backward uses indices_ascending."""
    out, max_logits, lse = _forward(**given)
    return out, max_logits, lse


def _dkv_dtype_name(dtype: str | torch.dtype) -> str:
    return dtype_name("sparse_mla_backward", "dkv_dtype", dtype, ("float32", "bfloat16"))


def _dkv_dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, _dkv_dtype_name(name))
    return dtype


def _sparse_mla_backward_fake(
    q: Tensor,
    kv: Tensor,
    attn_sink: Tensor | None,
    dkv_dtype: str,
    need_dq: bool,
    need_dkv: bool,
    window_kv: Tensor | None,
    need_d_window_kv: bool,
    **_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq = q.new_empty(q.shape if need_dq else (0,))
    dkv = kv.new_empty(kv.shape if need_dkv else (0,), dtype=_dkv_dtype(dkv_dtype))
    d_sink = q.new_empty((q.shape[1] if attn_sink is not None else 0,), dtype=torch.float32)
    of_window = window_kv.shape if window_kv is not None and need_d_window_kv else (0,)
    return dq, dkv, d_sink, kv.new_empty(of_window, dtype=_dkv_dtype(dkv_dtype))


@operator("sparse_mla_backward", _sparse_mla_backward_fake)
@arguments_of(hopwell.sparse_mla_backward, "accumulate", "dq", "dkv", "d_window_kv", "attn", "attn_with_sink")
def _sparse_mla_backward(
    q: Tensor, deterministic: bool, dkv_dtype: str, **given: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """An op cannot return None, so a gradient that was not requested is an empty tensor here."""
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    gradients = _backward(q=q, deterministic=deterministic, dkv_dtype=dkv_dtype, **given)
    of_keys = _dkv_dtype(dkv_dtype)
    dq, dkv, d_sink, d_window_kv = (
        q.new_empty(0, dtype=dtype) if g is None else g
        for g, dtype in zip_longest(gradients, (q.dtype, of_keys, torch.float32, of_keys))
    )
    return dq, dkv, d_sink, d_window_kv


no_gradient("sparse_mla_backward")


def sparse_mla_backward(
    d_out: Tensor,
    q: Tensor,
    kv: Tensor,
    indices: Tensor | None,
    out: Tensor,
    lse: Tensor,
    sm_scale: float,
    d_v: int = 512,
    *,
    attn_sink: Tensor | None = None,
    window_kv: Tensor | None = None,
    need_dq: bool = True,
    need_dkv: bool = True,
    need_d_window_kv: bool = True,
    dkv_dtype: str | torch.dtype = "float32",
    **options: Any,
) -> tuple[Tensor | None, ...]:
    """Gradients of `sparse_mla`: (dq, dkv, d_sink), with window_kv (dq, dkv, d_sink, d_window_kv).

    A gradient is None if it is not needed, d_sink also without a sink. d_out is like out, [s_q, h_q, d_v]; `out` and
    `lse` are the forward's results; q, kv and indices as there. dq has q's dtype, dkv and d_window_kv have `dkv_dtype`,
    float32 or bfloat16, d_sink is float32 [h_q]. Options: the masks of `sparse_mla`, window, w_start, w_end,
    indices_ascending, share_keys, deterministic, backend.
    """
    options |= {"attn_sink": attn_sink, "window_kv": window_kv}
    options |= {"need_dq": need_dq, "need_dkv": need_dkv, "need_d_window_kv": need_d_window_kv}
    options["dkv_dtype"] = _dkv_dtype_name(dkv_dtype)
    dq, dkv, d_sink, d_window_kv = _sparse_mla_backward(d_out, q, kv, indices, out, lse, sm_scale, d_v, **options)
    gradients = dq if need_dq else None, dkv if need_dkv else None, None if attn_sink is None else d_sink
    return gradients if window_kv is None else (*gradients, d_window_kv if need_d_window_kv else None)


def _save_sparse_mla(given: Named, results: tuple[Tensor, Tensor, Tensor]) -> Named:
    out, _, lse = results
    return given | {"out": out, "lse": lse}


def _differentiate_sparse_mla(
    given: Named, needed: set[str], d_out: Tensor, _d_max_logits: Tensor, _d_lse: Tensor
) -> NamedGradients:
    dq, dkv, d_sink, *of_window = sparse_mla_backward(
        d_out=contiguous_rows(d_out),
        dkv_dtype=given["kv"].dtype,
        need_dq="q" in needed,
        need_dkv="kv" in needed,
        need_d_window_kv="window_kv" in needed,
        **given,
    )
    d_sink = d_sink if "attn_sink" in needed else None
    return {"q": dq, "kv": dkv, "attn_sink": d_sink, "window_kv": of_window[0] if of_window else None}


differentiable("sparse_mla_forward", _differentiate_sparse_mla, _save_sparse_mla, constants=(1, 2))


def sparse_mla(
    q: Tensor,
    kv: Tensor,
    indices: Tensor | None,
    sm_scale: float,
    d_v: int = 512,
    *,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    q_positions: Tensor | None = None,
    q_start: int | None = None,
    kv_stride: int = 1,
    k_start: Tensor | None = None,
    k_end: Tensor | None = None,
    indices_ascending: bool = False,
    share_keys: bool = False,
    window_kv: Tensor | None = None,
    window: int | None = None,
    w_start: Tensor | None = None,
    w_end: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of every query over the keys in its row of `indices`: MLA in its multi-query form.

    Args:
        q: [s_q, h_q, d_qk], bfloat16 (on the CPU float32 too).
        kv: [s_kv, d_qk] or [s_kv, 1, d_qk], q's dtype; V is its first d_v columns.
        indices: int32 [s_q, topk] or [s_q, 1, topk]; entries outside 0 … s_kv − 1 are masked. None: every
            visible key.
        attn_sink: float32 [h_q], a logit without a value.
        topk_length: int32 [s_q]; only the first topk_length[s] entries of a row count.
        q_positions: int32 [s_q]; or q_start for q_start + s. Either enables causal masking.
        kv_stride: number of tokens that a key represents.
        k_start, k_end: int32 [s_q], both or neither: query s sees only the keys k_start[s] … k_end[s] − 1, for packed
            documents; `key_ranges` computes them. Causal masking then counts keys from k_start[s].
        indices_ascending: a hint that every row is in ascending order, as the indexer returns it; the backward then
            skips its sort. If a row is not ascending the results are the same, but slower.
        share_keys: a hint that neighbouring queries select mostly the same keys. If there are at most 32 heads, a GPU
            may then process neighbouring queries together, forward and backward, where that is less work. The last bits
            of results and dq may then depend on the neighbouring queries, and a NaN or infinity in a key reaches all
            queries that are processed together with one that selects it. It has no effect with a window.
        window_kv: [s_w, d_qk] or [s_w, 1, d_qk], q's dtype: keys that a query attends besides, in one softmax. Query s
            sees its last `window` rows t with lo ≤ t < hi. Masks and indices speak of kv alone.
        window: the most window keys that a query sees; given together with window_kv.
        w_start, w_end: int32 [s_q], both or neither: lo and hi, clamped to 0 … s_w. For packed documents `key_ranges`
            of their cu_seqlens computes them. Without them lo = 0 and hi = s_w − s_q + s + 1: the queries are the last
            rows.

    Returns:
        out [s_q, h_q, d_v] in q's dtype, max_logits and lse float32 [s_q, h_q]. Differentiable in q, kv, window_kv and
        attn_sink; max_logits and lse carry no gradient.

    Raises:
        ValueError: an argument has the wrong dtype, shape or device.
    """
    return sparse_mla_forward(**locals())
