"""Sparse attention over one latent KV head, with or without window keys, forward and backward."""

from dataclasses import dataclass
from typing import Unpack

import numpy as np
import numpy.typing as npt

from ._arrays import (
    Array,
    Float64,
    Int64,
    Tensor,
    as_array,
    as_float64,
    as_indices,
    deliver,
    describe,
    log_softmax,
    require,
    require_shape,
)
from ._visible import Masks, Visibility, visible_keys


@dataclass(frozen=True)
class Selection:
    """Checked inputs, and which entries of `indices` are valid."""

    q: Float64  # [s_q, h_q, d_qk]
    kv: Array  # [s_kv, d_qk], in its own dtype: only the selected rows are ever converted
    indices: Int64  # [s_q, topk]
    valid: npt.NDArray[np.bool_]  # [s_q, topk]
    sm_scale: float

    def row(self, s: int) -> tuple[Int64, Int64, Float64, Float64]:
        """What query s attends: (entries [n], keys [n], kv rows [n, d_qk], scores [h_q, n]), valid entries only."""
        entries = np.flatnonzero(self.valid[s])
        keys = self.indices[s, entries]
        kv_rows = self.kv[keys].astype(np.float64)
        return entries, keys, kv_rows, self.sm_scale * (self.q[s] @ kv_rows.T)


def select(
    operator: str,
    q: Tensor,
    kv: Tensor,
    indices: Tensor | None,
    sm_scale: float,
    topk_length: Tensor | None = None,
    **visibility: Unpack[Visibility],
) -> Selection:
    """Checks the inputs that all three operators share and finds the valid entries.

    Entry t = indices[s, 0, i] is valid iff 0 ≤ t < s_kv, i < topk_length[s] and, with key ranges or positions, key t is
    visible. Without indices entry t is key t.
    """
    queries, latent = as_float64(q), as_array(kv)
    require(queries.ndim == 3, operator, "q", "[s_q, h_q, d_qk]", describe(queries))
    s_q, _, d_qk = queries.shape
    if latent.ndim == 3 and latent.shape[1] == 1:
        latent = latent[:, 0]
    require(latent.ndim == 2 and latent.shape[1] == d_qk, operator, "kv", f"[s_kv, 1, {d_qk}]", describe(latent))
    if indices is None:
        require(topk_length is None, operator, "topk_length", "absent where indices are", topk_length)
        keys = np.broadcast_to(np.arange(len(latent)), (s_q, len(latent)))
    else:
        keys = as_indices(operator, "indices", indices)
    if keys.ndim == 3 and keys.shape[1] == 1:
        keys = keys[:, 0]
    require(keys.ndim == 2 and keys.shape[0] == s_q, operator, "indices", f"[{s_q}, 1, topk]", describe(keys))
    require(bool(np.isfinite(sm_scale)), operator, "sm_scale", "finite", sm_scale)

    first, last = visible_keys(operator, s_q, len(latent), **visibility)
    valid = (keys >= first[:, None]) & (keys < last[:, None])
    if topk_length is not None:
        lengths = as_indices(operator, "topk_length", topk_length)
        require_shape(operator, "topk_length", lengths, "[s_q]", (s_q,))
        valid &= np.arange(keys.shape[1]) < lengths[:, None]
    return Selection(queries, latent, keys, valid, float(sm_scale))


@dataclass(frozen=True)
class Window:
    """The window keys that each query attends besides its selected ones: rows first[s] … last[s] − 1 of kv."""

    kv: Array  # [s_w, d_qk], in its own dtype; without a window s_w is 0
    first: Int64  # [s_q]
    last: Int64  # [s_q]

    def row(self, selection: Selection, s: int) -> tuple[Int64, Float64, Float64]:
        """The window keys that query s sees: (rows of kv [n], their values [n, d_qk], scores [h_q, n])."""
        rows = np.arange(self.first[s], self.last[s])
        values = self.kv[rows].astype(np.float64)
        return rows, values, selection.sm_scale * (selection.q[s] @ values.T)


def see_window(
    operator: str,
    selection: Selection,
    window_kv: Tensor | None,
    window: int | None,
    w_start: Tensor | None,
    w_end: Tensor | None,
) -> Window:
    """Checks the window's arguments and finds the rows of window_kv that each query sees.

    Query s sees the rows t with max(lo, hi − window) ≤ t < hi, where lo and hi are w_start[s] and w_end[s], clamped to
    0 … s_w; without them lo = 0 and hi = s_w − s_q + s + 1.
    """
    s_q, _, d_qk = selection.q.shape
    require((w_start is None) == (w_end is None), operator, "w_start", "given together with w_end", "one of the two")
    require((window_kv is None) == (window is None), operator, "window", "given together with window_kv", window)
    if window_kv is None or window is None:
        require(w_start is None, operator, "w_start", "absent where window_kv is", w_start)
        nothing = np.zeros(s_q, np.int64)
        return Window(np.zeros((0, d_qk)), nothing, nothing)
    keys = as_array(window_kv)
    if keys.ndim == 3 and keys.shape[1] == 1:
        keys = keys[:, 0]
    require(keys.ndim == 2 and keys.shape[1] == d_qk, operator, "window_kv", f"[s_w, 1, {d_qk}]", describe(keys))
    require(window >= 1, operator, "window", "at least 1", window)
    s_w = len(keys)
    start, end = np.zeros(s_q, np.int64), s_w - s_q + np.arange(s_q, dtype=np.int64) + 1
    if w_start is not None and w_end is not None:
        start, end = as_indices(operator, "w_start", w_start), as_indices(operator, "w_end", w_end)
        require_shape(operator, "w_start", start, "[s_q]", (s_q,))
        require_shape(operator, "w_end", end, "[s_q]", (s_q,))
    last = np.clip(end, 0, s_w)
    first = np.maximum(np.clip(start, 0, s_w), last - min(window, s_w))
    return Window(keys, first, np.maximum(first, last))


def _sink(operator: str, attn_sink: Tensor | None, h_q: int) -> Float64:
    """The sink's logit per head, [h_q]. No sink is a sink of −inf."""
    if attn_sink is None:
        return np.full(h_q, -np.inf)
    sink = as_float64(attn_sink)
    require_shape(operator, "attn_sink", sink, "[h_q]", (h_q,))
    return sink


def sparse_mla_forward(
    q: Tensor,
    kv: Tensor,
    indices: Tensor | None,
    sm_scale: float,
    d_v: int = 512,
    *,
    attn_sink: Tensor | None = None,
    share_keys: bool = False,
    window_kv: Tensor | None = None,
    window: int | None = None,
    w_start: Tensor | None = None,
    w_end: Tensor | None = None,
    out: Array | None = None,
    max_logits: Array | None = None,
    lse: Array | None = None,
    **masks: Unpack[Masks],
) -> tuple[Array, Array, Array]:
    """Attention of every query to the keys that `indices` names for it.

        score[s,h,i] = sm_scale · Σ_d q[s,h,d]·kv[t,d]        t = indices[s,0,i]
        max_logits   = max_i score;  lse = log Σ_i exp(score);  p = exp(score − lse)
        out[s,h,:]   = Σ_i p·kv[t,:d_v] · 1/(1 + exp(attn_sink[h] − lse))

    q [s_q, h_q, d_qk]; kv [s_kv, 1, d_qk] or [s_kv, d_qk]; indices int32 [s_q, 1, topk] or [s_q, topk], or None: all;
    attn_sink [h_q]; topk_length, q_positions, k_start and k_end int32 [s_q].
    Returns out [s_q, h_q, d_v], max_logits [s_q, h_q], lse [s_q, h_q].

    With `window_kv` [s_w, 1, d_qk] or [s_w, d_qk] the sums and the maximum are also over the window keys that the query
    sees: the rows t with max(lo, hi − window) ≤ t < hi. lo and hi are w_start[s] and w_end[s], int32 [s_q], clamped to
    0 … s_w; without them lo = 0, hi = s_w − s_q + s + 1. Positions, ranges, lengths and indices speak of kv alone.

    A row without a valid entry and window key gives out = 0, max_logits = −inf, lse = +inf, whatever the sink; so does
    a row whose scores are all −inf, since no kernel can tell the two apart. `share_keys` does not matter here.
    """
    name = "sparse_mla_forward"
    selection = select(name, q, kv, indices, sm_scale, **masks)
    s_q, h_q, d_qk = selection.q.shape
    require(1 <= d_v <= d_qk, name, "d_v", f"in 1..{d_qk} (d_qk)", d_v)
    sink = _sink(name, attn_sink, h_q)
    nearby = see_window(name, selection, window_kv, window, w_start, w_end)

    result = np.zeros((s_q, h_q, d_v))
    row_max = np.full((s_q, h_q), -np.inf)
    row_lse = np.full((s_q, h_q), np.inf)
    for s in range(s_q):
        _, _, kv_rows, score = selection.row(s)
        _, window_rows, window_score = nearby.row(selection, s)
        kv_rows, score = np.concatenate([window_rows, kv_rows]), np.concatenate([window_score, score], axis=1)
        row_max[s], log_sum, log_p = log_softmax(score)
        empty = np.isneginf(log_sum)
        with np.errstate(over="ignore", invalid="ignore"):
            row_lse[s] = np.where(empty, np.inf, row_max[s] + log_sum)
            factor = 1.0 / (1.0 + np.exp((sink - row_max[s]) - log_sum))
            result[s] = np.where(empty[:, None], 0.0, (np.exp(log_p) @ kv_rows[:, :d_v]) * factor[:, None])
    return (
        deliver(name, "out", result, out),
        deliver(name, "max_logits", row_max, max_logits),
        deliver(name, "lse", row_lse, lse),
    )


def _forward_results(
    operator: str, selection: Selection, d_v: int, out: Tensor, lse: Tensor, d_out: Tensor
) -> tuple[Float64, Float64, Float64]:
    s_q, h_q, d_qk = selection.q.shape
    require(1 <= d_v <= d_qk, operator, "d_v", f"in 1..{d_qk} (d_qk)", d_v)
    results, row_lse, gradient = as_float64(out), as_float64(lse), as_float64(d_out)
    require_shape(operator, "out", results, "[s_q, h_q, d_v]", (s_q, h_q, d_v))
    require_shape(operator, "lse", row_lse, "[s_q, h_q]", (s_q, h_q))
    require_shape(operator, "d_out", gradient, "[s_q, h_q, d_v]", (s_q, h_q, d_v))
    return results, row_lse, gradient


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
    deterministic: bool = False,
    dkv_dtype: str = "float32",
    dq: Array | None = None,
    dkv: Array | None = None,
    accumulate: bool = False,
    indices_ascending: bool = False,
    share_keys: bool = False,
    window_kv: Tensor | None = None,
    window: int | None = None,
    w_start: Tensor | None = None,
    w_end: Tensor | None = None,
    attn_with_sink: bool = False,
    need_dq: bool = True,
    need_dkv: bool = True,
    need_d_window_kv: bool = True,
    d_window_kv: Array | None = None,
    attn: Array | None = None,
    **masks: Unpack[Masks],
) -> tuple[Array | Float64 | None, ...]:
    """Gradients of `sparse_mla_forward`, from its inputs, its `out` and `lse`, and d_out [s_q, h_q, d_v].

        lse'  = log(exp(lse) + exp(attn_sink));  p = exp(score − lse');  delta = Σ_d out·d_out
        dp    = Σ_d d_out·kv[t,d]   (d < d_v);   ds = p·(dp − delta)·sm_scale
        dq    = Σ_i ds·kv[t,:];  dkv[t,:] += Σ_{s,h} ds·q;  dkv[t,:d_v] += Σ_{s,h} p·d_out
        d_sink = −Σ_s exp(attn_sink − lse')·delta            (0 where the sink is ±inf)

    With `window_kv` Σ_i is over the window keys too, and d_window_kv is to them what dkv is to the keys of kv.

    Returns (dq like q, dkv like kv, d_sink [h_q]), with `window_kv` also d_window_kv like it; None for what is not
    needed, and for d_sink without a sink. `accumulate` adds to the given dkv and d_window_kv. `attn` [s_q, topk] is
    written with Σ_h exp(score − lse), in which the sink has no part, for the entries of kv alone; with
    `attn_with_sink`, which needs a sink, with Σ_h exp(score − lse'). A row without a valid entry and window key adds
    nothing to dq, dkv and attn. A row adds to `d_sink` unless its lse is +inf, whether its valid entries are in this
    call or, where lse and out were merged over shards of the keys, in another: each shard gives the whole d_sink. So a
    row with the forward's lse and no valid entry adds nothing at all, whatever its out and d_out hold.
    `deterministic`, `dkv_dtype`, `indices_ascending` and `share_keys` do not matter here: the order is fixed and
    nothing is rounded.
    """
    name = "sparse_mla_backward"
    selection = select(name, q, kv, indices, sm_scale, **masks)
    s_q, h_q, _ = selection.q.shape
    forward_out, forward_lse, gradient = _forward_results(name, selection, d_v, out, lse, d_out)
    sink = _sink(name, attn_sink, h_q)
    require(dkv_dtype in ("float32", "bfloat16"), name, "dkv_dtype", "float32 or bfloat16", dkv_dtype)
    nearby = see_window(name, selection, window_kv, window, w_start, w_end)
    require(window_kv is not None or d_window_kv is None, name, "d_window_kv", "absent where window_kv is", d_window_kv)
    require(
        not attn_with_sink or (attn is not None and attn_sink is not None),
        name,
        "attn_with_sink",
        "False without attn and attn_sink",
        attn_with_sink,
    )
    if accumulate:
        for argument, given, needed in (
            ("dkv", dkv, need_dkv),
            ("d_window_kv", d_window_kv, need_d_window_kv and window_kv is not None),
        ):
            fits = not needed or (given is not None and given.dtype == np.float32)
            require(fits, name, argument, "a float32 array to accumulate into", given)
        require(dkv is not None or d_window_kv is not None, name, "dkv", "a float32 array to accumulate into", dkv)

    d_window = np.zeros(nearby.kv.shape)
    d_q, d_kv, d_sink = np.zeros(selection.q.shape), np.zeros(selection.kv.shape), np.zeros(h_q)
    distribution = np.zeros(selection.indices.shape)
    for s in range(s_q):
        entries, keys, kv_rows, score = selection.row(s)
        window_keys, window_rows, window_score = nearby.row(selection, s)
        with np.errstate(invalid="ignore"):  # a sink of +inf; its d_sink is set to 0 below
            delta = (forward_out[s] * gradient[s]).sum(axis=1)
            lse_with_sink = np.logaddexp(forward_lse[s], sink)
            sink_share = np.exp(-np.logaddexp(0.0, forward_lse[s] - sink))  # exp(sink − lse'), however large both are
            d_sink -= np.where(np.isposinf(forward_lse[s]), 0.0, sink_share * delta)
        distribution_lse = lse_with_sink if attn_with_sink else forward_lse[s]
        distribution[s, entries] = np.exp(score - distribution_lse[:, None]).sum(axis=0)
        for rows, values, scores, sums in (
            (keys, kv_rows, score, d_kv),
            (window_keys, window_rows, window_score, d_window),
        ):
            if len(rows) == 0:
                continue
            p = np.exp(scores - lse_with_sink[:, None])
            dp = gradient[s] @ values[:, :d_v].T
            ds = p * (dp - delta[:, None]) * selection.sm_scale

            d_q[s] += ds @ values
            np.add.at(sums, rows, ds.T @ selection.q[s])  # unlike sums[rows] +=, counts duplicate keys twice
            np.add.at(sums[:, :d_v], rows, p.T @ gradient[s])

    d_kv = d_kv.reshape(as_array(kv).shape)
    if window_kv is not None:
        d_window = d_window.reshape(as_array(window_kv).shape)
    if accumulate and dkv is not None:
        d_kv = d_kv + dkv
    if accumulate and d_window_kv is not None:
        d_window = d_window + d_window_kv
    if attn is not None:
        deliver(name, "attn", distribution, attn)
    gradients = (
        deliver(name, "dq", d_q, dq) if need_dq else None,
        deliver(name, "dkv", d_kv, dkv) if need_dkv else None,
        np.where(np.isfinite(sink), d_sink, 0.0) if attn_sink is not None else None,
    )
    if window_kv is None:
        return gradients
    return *gradients, deliver(name, "d_window_kv", d_window, d_window_kv) if need_d_window_kv else None
