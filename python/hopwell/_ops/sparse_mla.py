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
        out: like q [s_q, h_q, d_v], written in place; so are max_logits and lse, fp32 [s_q, h_q].
        backend: a name from `backends()`; None picks the best.
        stream: a CUDA stream; None is the framework's current one.

    Returns:
        (out, max_logits, lse), natural-log. A row without a valid entry: out 0, max_logits −inf, lse +inf.
    """
    outputs = Outputs("sparse_mla_forward", "q", q)
    s_q, h_q, d_qk = dims(q, 3)
    out = outputs.given_or_new("out", out, (s_q, h_q, extent(d_v, d_qk)), q.dtype)
    max_logits = outputs.given_or_new("max_logits", max_logits, (s_q, h_q), "float32")
    lse = outputs.given_or_new("lse", lse, (s_q, h_q), "float32")
    _hopwell.sparse_mla_forward(
        q, kv, indices, sm_scale, d_v, attn_sink, topk_length, q_positions, q_start, kv_stride, k_start, k_end,
        share_keys, out, max_logits, lse, backend, stream,
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
    need_dq: bool = True,
    need_dkv: bool = True,
    attn: Array | None = None,
    backend: str | None = None,
    stream: Any = None,
) -> tuple[Array | None, Array | None, Array | None]:
    """Gradients of `sparse_mla_forward` with respect to q, kv and attn_sink.

    Args:
        d_out: gradient of out, like q [s_q, h_q, d_v].
        q, kv, indices, sm_scale, d_v, attn_sink, topk_length, q_positions, q_start, kv_stride, k_start, k_end: as in
            the forward.
        out, lse: what the forward returned; or, where this call has a shard of the keys, merged over all shards. No
            score may exceed lse by more than 44: GPUs take exp(score − lse) as 2⁶⁴ there.
        deterministic: the same bits every time, also where the fastest way would not give them, and the same dq of a
            query in every call. On a GPU that takes 4·s_q·topk bytes of scratch; without indices topk is s_kv.
        dkv_dtype: "float32" or "bfloat16".
        dq: like q, written in place.
        dkv: of kv's shape and of dkv_dtype, written in place; with `accumulate` (fp32 only) added into.
        indices_ascending: a hint that rows ascend, as the indexer's do, so that no pass needs to order them; rows that
            do not give the same results, later.
        share_keys: a hint that neighbouring queries select mostly the same keys, so that a GPU may take those with up
            to 32 heads together, over the union of their keys, where that is less work. dq may then differ in its last
            bits with the neighbours, and a NaN or infinity in a key reaches all queries that are taken together with
            one that selects it. Without effect with `deterministic` or `attn`.
        need_dq, need_dkv: False leaves that gradient out.
        attn: fp32 [s_q, topk]: also written, with Σ_h exp(score − lse), the attention distribution.
        backend, stream: as in the forward.

    Returns:
        (dq, dkv, d_sink): d_sink fp32 [h_q]; None for what is not needed, and for d_sink without a sink. A row adds to
        d_sink unless its lse is +inf. So with shards of the keys each call gives the whole d_sink: take it from one
        shard; dq is the sum over the shards.
    """
    name = "sparse_mla_backward"
    outputs = Outputs(name, "d_out", d_out)
    dkv_type = dtype_name(name, "dkv_dtype", dkv_dtype, ("float32", "bfloat16"))
    need_dq, need_dkv = flag(name, "need_dq", need_dq), flag(name, "need_dkv", need_dkv)
    accumulate = flag(name, "accumulate", accumulate)
    if accumulate and dkv is None:
        raise ValueError(f"{name}: dkv must be given to accumulate into; got None")
    for argument, needed, array in (("dq", need_dq, dq), ("dkv", need_dkv, dkv), ("attn", True, attn)):
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
    d_sink = None if attn_sink is None else outputs.new((shape[1],), "float32")
    _hopwell.sparse_mla_backward(
        d_out, q, kv, indices, out, lse, sm_scale, d_v, attn_sink, topk_length, q_positions, q_start, kv_stride,
        k_start, k_end, deterministic, accumulate, indices_ascending, share_keys, dq, dkv, d_sink, attn, backend,
        stream,
    )  # fmt: skip
    return outputs.native(dq, dkv, d_sink)


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
        out: fp32 [s_q, topk], written in place.
        backend, stream: as in `sparse_mla_forward`.

    Returns:
        attn fp32 [s_q, topk], in the order of indices; [s_q, s_kv] without them.
    """
    outputs = Outputs("attention_distribution", "q", q)
    out = outputs.given_or_new("out", out, _selection_shape(q, kv, indices), "float32")
    _hopwell.attention_distribution(
        q, kv, indices, lse, sm_scale, topk_length, q_positions, q_start, kv_stride, k_start, k_end, normalize,
        indices_ascending, out, backend, stream,
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
