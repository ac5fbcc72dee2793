"""Sparse attention, its gradients, and the distribution of attention over the entries."""

from typing import Any

from .. import _hopwell
from .._arrays import Array, DType, Outputs, check_dtype, dims, dtype_name, extent, flag, shape_of


def sparse_mla_forward(
    q: Array,
    kv: Array,
    indices: Array | None,
    sm_scale: float,
    d_v: int = 512,
    *,
    attn_sink: Array | None = None,
    topk_length: Array | None = None,
    q_positions: Array | None = None,
    q_start: int | None = None,
    kv_stride: int = 1,
    k_start: Array | None = None,
    k_end: Array | None = None,
    share_keys: bool = False,
    window_kv: Array | None = None,
    window: int | None = None,
    w_start: Array | None = None,
    w_end: Array | None = None,
    out: Array | None = None,
    max_logits: Array | None = None,
    lse: Array | None = None,
    backend: str | None = None,
    stream: Any = None,
) -> tuple[Array, Array, Array]:
    """Multi-query latent attention (MLA) of every query over the keys that its index row selects.

        score[s,h,i] = sm_scale · Σ_d q[s,h,d]·kv[t,d]        t = indices[s,i]; −inf where the entry is invalid
        out          = softmax(score) · kv[:, :d_v] / (1 + exp(attn_sink − lse))

    Args:
        q: bf16 or fp32 [s_q, h_q, d_qk].
        kv: like q, [s_kv, 1, d_qk] or [s_kv, d_qk]; V is its first d_v columns.
        indices: int32 [s_q, 1, topk] or [s_q, topk]. An entry t counts iff 0 ≤ t < s_kv, it is among the first
            topk_length[s], in the query's key range and not in the future. Entries that occur twice count twice.
            None: every visible key, in order; topk is s_kv then, and there is no topk_length.
        sm_scale: factor of the scores.
        d_v: columns of V, 1 … d_qk.
        attn_sink: fp32 [h_q], may be ±inf.
        topk_length: int32 [s_q].
        q_positions: int32 [s_q]; turns on causal masking: (t + 1)·kv_stride ≤ position + 1.
        q_start: the same with position = q_start + s.
        kv_stride: consecutive tokens that one key stands for.
        k_start, k_end: int32 [s_q], both or neither: query s sees only the keys k_start[s] ≤ t < k_end[s], as documents
            packed one after another need; with k_end[s] ≤ k_start[s], none. Causal masking then counts keys from
            k_start[s]: (t − k_start[s] + 1)·kv_stride ≤ position + 1.
        share_keys: a hint that neighbouring queries select mostly the same keys, so that a GPU may take those with up
            to 32 heads together where that is less work. Results may then differ in their last bits with the
            neighbours, and a NaN or infinity in a key reaches `out` of all queries that are taken together with one
            that selects it.
        window_kv: like kv, [s_w, 1, d_qk] or [s_w, d_qk]: keys that a query attends besides, in one softmax. Query s
            sees the rows t with max(lo, hi − window) ≤ t < hi. Masks and indices speak of kv alone, and
            `share_keys` has no effect.
        window: how many window keys a query sees at most; given with window_kv.
        w_start, w_end: int32 [s_q], both or neither: lo and hi, clamped to 0 … s_w; without them lo = 0 and
            hi = s_w − s_q + s + 1, so that the queries are the last rows.
        out: like q [s_q, h_q, d_v], written in place; so are max_logits and lse, fp32 [s_q, h_q].
        backend: a name from `backends()`; None picks the best.
        stream: a CUDA stream; None is the framework's current one.

    Returns:
        (out, max_logits, lse), natural-log. A row without a valid entry and window key: out 0, max_logits −inf,
        lse +inf.
    """
    outputs = Outputs("sparse_mla_forward", "q", q)
    s_q, h_q, d_qk = dims(q, 3)
    out = outputs.given_or_new("out", out, (s_q, h_q, extent(d_v, d_qk)), q.dtype)
    max_logits = outputs.given_or_new("max_logits", max_logits, (s_q, h_q), "float32")
    lse = outputs.given_or_new("lse", lse, (s_q, h_q), "float32")
    _hopwell.sparse_mla_forward(
        q, kv, indices, sm_scale, d_v, attn_sink, topk_length, q_positions, q_start, kv_stride, k_start, k_end,
        share_keys, window_kv, window, w_start, w_end, out, max_logits, lse, backend, stream,
    )  # fmt: skip
    return outputs.native(out, max_logits, lse)


def sparse_mla_backward(
    d_out: Array,
    q: Array,
    kv: Array,
    indices: Array | None,
    out: Array,
    lse: Array,
    sm_scale: float,
    d_v: int = 512,
    *,
    attn_sink: Array | None = None,
    topk_length: Array | None = None,
    q_positions: Array | None = None,
    q_start: int | None = None,
    kv_stride: int = 1,
    k_start: Array | None = None,
    k_end: Array | None = None,
    deterministic: bool = False,
    dkv_dtype: DType = "float32",
    dq: Array | None = None,
    dkv: Array | None = None,
    accumulate: bool = False,
    indices_ascending: bool = False,
    share_keys: bool = False,
    window_kv: Array | None = None,
    window: int | None = None,
    w_start: Array | None = None,
    w_end: Array | None = None,
    attn_with_sink: bool = False,
    need_dq: bool = True,
    need_dkv: bool = True,
    need_d_window_kv: bool = True,
    d_window_kv: Array | None = None,
    attn: Array | None = None,
    backend: str | None = None,
    stream: Any = None,
) -> tuple[Array | None, ...]:
    """Gradients of `sparse_mla_forward` with respect to q, kv, attn_sink and window_kv.

    Args:
        d_out: gradient of out, like q [s_q, h_q, d_v].
        q, kv, indices, sm_scale, d_v, attn_sink, topk_length, q_positions, q_start, kv_stride, k_start, k_end,
            window_kv, window, w_start, w_end: as in the forward.
        out, lse: what the forward returned; or, where this call has a shard of the keys, merged over all shards. No
            score may exceed lse by more than 44: GPUs take exp(score − lse) as 2⁶⁴ there.
        deterministic: the same bits every time, also where the fastest way would not give them, and the same dq of a
            query in every call. On a GPU that takes 4·s_q·topk bytes of scratch; without indices topk is s_kv.
        dkv_dtype: "float32" or "bfloat16".
        dq: like q, written in place.
        dkv: of kv's shape and of dkv_dtype, written in place; with `accumulate` (fp32 only) added into.
        d_window_kv: the same of window_kv; with `accumulate` both, if they are needed, must be given.
        indices_ascending: a hint that rows ascend, as the indexer's do, so that no pass needs to order them; rows that
            do not give the same results, later.
        share_keys: a hint that neighbouring queries select mostly the same keys, so that a GPU may take those with up
            to 32 heads together, over the union of their keys, where that is less work. dq may then differ in its last
            bits with the neighbours, and a NaN or infinity in a key reaches all queries that are taken together with
            one that selects it. Without effect with `deterministic` or `attn`.
        need_dq, need_dkv, need_d_window_kv: False leaves that gradient out.
        attn: fp32 [s_q, topk]: also written, with Σ_h exp(score − lse), the attention distribution over the
            entries of kv.
        attn_with_sink: attn is Σ_h exp(score − lse') then; needs attn and attn_sink.
        backend, stream: as in the forward.

    Returns:
        (dq, dkv, d_sink), and with window_kv (dq, dkv, d_sink, d_window_kv): d_sink fp32 [h_q]; None for what is not
        needed, and for d_sink without a sink. A row adds to d_sink unless its lse is +inf. So with shards of the keys
        each call gives the whole d_sink: take it from one shard; dq is the sum over the shards.
    """
    name = "sparse_mla_backward"
    outputs = Outputs(name, "d_out", d_out)
    dkv_type = dtype_name(name, "dkv_dtype", dkv_dtype, ("float32", "bfloat16"))
    need_dq, need_dkv = flag(name, "need_dq", need_dq), flag(name, "need_dkv", need_dkv)
    need_d_window_kv = flag(name, "need_d_window_kv", need_d_window_kv) and window_kv is not None
    accumulate = flag(name, "accumulate", accumulate)
    if accumulate:
        wanted = [("dkv", need_dkv or window_kv is None, dkv), ("d_window_kv", need_d_window_kv, d_window_kv)]
        for argument, needed, array in wanted:
            if needed and array is None:
                raise ValueError(f"{name}: {argument} must be given to accumulate into; got None")
    gradients = (("dq", need_dq, dq), ("dkv", need_dkv, dkv), ("d_window_kv", need_d_window_kv, d_window_kv))
    for argument, needed, array in (*gradients, ("attn", True, attn)):
        if array is not None:
            if not needed:
                raise ValueError(f"{name}: {argument} must be None where it is not needed; got an array")
            outputs.given(argument, array)
    shape = dims(q, 3)
    if need_dq and dq is None:
        dq = outputs.new(shape, getattr(q, "dtype", "float32"))
    if dkv is not None:
        check_dtype(name, "dkv", dkv, dkv_type, "dkv_dtype")
    elif need_dkv:
        dkv = outputs.new(shape_of(kv), dkv_type)
    if d_window_kv is not None:
        check_dtype(name, "d_window_kv", d_window_kv, dkv_type, "dkv_dtype")
    elif need_d_window_kv:
        d_window_kv = outputs.new(shape_of(window_kv), dkv_type)
    d_sink = None if attn_sink is None else outputs.new((shape[1],), "float32")
    _hopwell.sparse_mla_backward(
        d_out, q, kv, indices, out, lse, sm_scale, d_v, attn_sink, topk_length, q_positions, q_start, kv_stride,
        k_start, k_end, deterministic, accumulate, indices_ascending, share_keys, window_kv, window, w_start, w_end,
        attn_with_sink, dq, dkv, d_sink, d_window_kv, attn, backend, stream,
    )  # fmt: skip
    return outputs.native(dq, dkv, d_sink, *(() if window_kv is None else (d_window_kv,)))


def _selection_shape(q: Array, kv: Array, indices: Array | None) -> tuple[int, ...]:
    """[s_q, topk]."""
    if indices is None:
        return dims(q, 3)[0], (shape_of(kv) or (0,))[0]
    return dims(indices, 2) if len(shape_of(indices)) == 2 else dims(indices, 3)[::2]


def attention_distribution(
    q: Array,
    kv: Array,
    indices: Array | None,
    lse: Array,
    sm_scale: float,
    *,
    topk_length: Array | None = None,
    q_positions: Array | None = None,
    q_start: int | None = None,
    kv_stride: int = 1,
    k_start: Array | None = None,
    k_end: Array | None = None,
    normalize: str = "none",
    indices_ascending: bool = False,
    attn_sink: Array | None = None,
    out: Array | None = None,
    backend: str | None = None,
    stream: Any = None,
) -> Array:
    """How much attention each selected key gets, summed over all heads given: the target of the indexer's loss.

        attn[s,i] = Σ_h exp(score[s,h,i] − lse[s,h])          0 where the entry is invalid, and for empty rows

    Args:
        q, kv, indices, sm_scale, topk_length, q_positions, q_start, kv_stride, k_start, k_end: as in
            `sparse_mla_forward`.
        lse: the forward's, fp32 [s_q, h_q].
        normalize: "none", or "l1": every row divided by its sum; all-zero rows stay zero.
        indices_ascending: a hint, as in `sparse_mla_backward`.
        attn_sink: fp32 [h_q]; lse' = log(exp(lse) + exp(attn_sink)) is in lse's place then.
        out: fp32 [s_q, topk], written in place.
        backend, stream: as in `sparse_mla_forward`.

    Returns:
        attn fp32 [s_q, topk], in the order of indices; [s_q, s_kv] without them.
    """
    outputs = Outputs("attention_distribution", "q", q)
    out = outputs.given_or_new("out", out, _selection_shape(q, kv, indices), "float32")
    _hopwell.attention_distribution(
        q, kv, indices, lse, sm_scale, topk_length, q_positions, q_start, kv_stride, k_start, k_end, normalize,
        indices_ascending, attn_sink, out, backend, stream,
    )  # fmt: skip
    return outputs.native(out)[0]


def normalize_l1(attn: Array, *, out: Array | None = None, backend: str | None = None, stream: Any = None) -> Array:
    """Rows divided by their sums; all-zero rows stay. So that ranks which hold slices of the heads can add their
    distributions first.

    Args:
        attn: fp32 [rows, columns].
        out: like attn, written in place; it may be attn itself.
        backend, stream: as in `sparse_mla_forward`.

    Returns:
        The rows, fp32 [rows, columns].
    """
    outputs = Outputs("normalize_l1", "attn", attn)
    out = outputs.given_or_new("out", out, dims(attn, 2), "float32")
    _hopwell.normalize_l1(attn, out, backend, stream)
    return outputs.native(out)[0]
