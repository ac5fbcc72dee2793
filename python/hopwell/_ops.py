"""The operators as Python functions: they allocate what is not given and call the compiled module."""

from typing import Any

from . import _hopwell
from ._arrays import (
    Array,
    DType,
    check_dtype,
    check_topk,
    dims,
    dtype_name,
    extent,
    flag,
    given,
    native,
    outputs_like,
    printable,
    shape_of,
)


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
        out: like q [s_q, h_q, d_v], written in place; so are max_logits and lse, fp32 [s_q, h_q].
        backend: a name from `backends()`; None picks the best.
        stream: a CUDA stream; None is the framework's current one.

    Returns:
        (out, max_logits, lse), natural-log. A row without a valid entry: out 0, max_logits −inf, lse +inf.
    """
    name = "sparse_mla_forward"
    new = outputs_like(name, "q", q)
    s_q, h_q, d_qk = dims(q, 3)
    written = out, max_logits, lse
    out = new((s_q, h_q, extent(d_v, d_qk)), q.dtype) if out is None else given(name, "out", out)
    max_logits = new((s_q, h_q), "float32") if max_logits is None else given(name, "max_logits", max_logits)
    lse = new((s_q, h_q), "float32") if lse is None else given(name, "lse", lse)
    _hopwell.sparse_mla_forward(
        q, kv, indices, sm_scale, d_v, attn_sink, topk_length, q_positions, q_start, kv_stride, k_start, k_end, out,
        max_logits, lse, backend, stream,
    )  # fmt: skip
    return native(q, (out, max_logits, lse), written)


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
        out, lse: what the forward returned.
        deterministic: the same bits every time, also where the fastest way would not give them. On a GPU that takes
            4·s_q·topk bytes of scratch; without indices topk is s_kv.
        dkv_dtype: "float32" or "bfloat16".
        dq: like q, written in place.
        dkv: of kv's shape and of dkv_dtype, written in place; with `accumulate` (fp32 only) added into.
        indices_ascending: a hint that rows ascend, as the indexer's do, so that no pass needs to order them; rows that
            do not give the same results, later.
        need_dq, need_dkv: False leaves that gradient out.
        attn: fp32 [s_q, topk]: also written, with Σ_h exp(score − lse), the attention distribution.
        backend, stream: as in the forward.

    Returns:
        (dq, dkv, d_sink): d_sink fp32 [h_q]; None for what is not needed, and for d_sink without a sink.
    """
    name = "sparse_mla_backward"
    new = outputs_like(name, "d_out", d_out)
    dkv_type = dtype_name(name, "dkv_dtype", dkv_dtype, ("float32", "bfloat16"))
    need_dq, need_dkv = flag(name, "need_dq", need_dq), flag(name, "need_dkv", need_dkv)
    accumulate = flag(name, "accumulate", accumulate)
    if accumulate and dkv is None:
        raise ValueError(f"{name}: dkv must be given to accumulate into; got None")
    written = dq, dkv, attn
    for argument, needed, array in (("dq", need_dq, dq), ("dkv", need_dkv, dkv), ("attn", True, attn)):
        if array is not None:
            if not needed:
                raise ValueError(f"{name}: {argument} must be None where it is not needed; got an array")
            given(name, argument, array)
    shape = dims(q, 3)
    if need_dq and dq is None:
        dq = new(shape, q.dtype if hasattr(q, "dtype") else "float32")
    if dkv is not None:
        check_dtype(name, "dkv", dkv, dkv_type, "dkv_dtype")
    elif need_dkv:
        dkv = new(shape_of(kv), dkv_type)
    d_sink = None if attn_sink is None else new((shape[1],), "float32")
    _hopwell.sparse_mla_backward(
        d_out, q, kv, indices, out, lse, sm_scale, d_v, attn_sink, topk_length, q_positions, q_start, kv_stride,
        k_start, k_end, deterministic, accumulate, indices_ascending, dq, dkv, d_sink, attn, backend, stream,
    )  # fmt: skip
    return native(d_out, (dq, dkv, d_sink), written)


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
        out: fp32 [s_q, topk], written in place.
        backend, stream: as in `sparse_mla_forward`.

    Returns:
        attn fp32 [s_q, topk], in the order of indices; [s_q, s_kv] without them.
    """
    name = "attention_distribution"
    new = outputs_like(name, "q", q)
    written = (out,)
    if out is None:
        out = new(_selection_shape(q, kv, indices), "float32")
    else:
        given(name, "out", out)
    _hopwell.attention_distribution(
        q, kv, indices, lse, sm_scale, topk_length, q_positions, q_start, kv_stride, k_start, k_end, normalize, out,
        backend, stream,
    )  # fmt: skip
    return native(q, (out,), written)[0]


def paged_attention(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    block_tables: Array,
    context_lens: Array,
    scale: float,
    *,
    layout: str = "nhd",
    pos_bias_u: Array | None = None,
    bias: Array | None = None,
    bias_kind: str = "key",
    out_of_range: str = "zero",
    pre_scale: bool = True,
    pos_bias_v: Array | None = None,
    r: Array | None = None,
    alibi_slopes: Array | None = None,
    window: int | None = None,
    out: Array | None = None,
    lse: Array | None = None,
    backend: str | None = None,
    stream: Any = None,
) -> tuple[Array, Array]:
    """Decode attention of one or a few query tokens a sequence against a paged KV cache, with relative positions.

        logit_j = scale·((q + u)·k_j + bias_j);   out = Σ_j softmax(logit)_j·v_j

    Query i of q_len stands at position = context_len − q_len + i and sees the keys j ≤ position; δ = position − j.

    Args:
        q: fp32, fp16 or bf16 [b, q_len, h_q, d] or [b, h_q, d]; q_len 1 … 16; d a multiple of 8 from 32 to 256.
        k_cache, v_cache: like q. layout "nhd": [blocks, block, h_kv, d]; "hnd": [blocks, h_kv, block, d]; "vllm": K
            [blocks, h_kv, d/x, block, x] with x = 16 bytes, V [blocks, h_kv, d, block]. block 1 … 256.
        block_tables: int32 [b, max_blocks]; entry j // block holds key j. Bad entries within the context are masked.
        context_lens: int32 [b], the query tokens included; clamped to 0 … max_blocks·block.
        scale: factor of the logits.
        pos_bias_u: q's dtype or fp32 [h_q, d], added to q before the product with K.
        bias: fp32, fp16 or bf16. bias_kind "key": [b or 1, h_q, q_len, keys]; "distance": [b or 1, h_q, extent] by δ.
        out_of_range: "zero", "clamp" or "-inf": what lies beyond the last column of bias or r.
        pre_scale: the bias is added before the scale, as in Transformer-XL; False: after it.
        r, pos_bias_v: the fused form bias_j = (q + v)·r[δ]: r [h_q or 1, extent, d], v [h_q, d]; excludes `bias`.
        alibi_slopes: fp32 [h_q]; adds −slope·δ after the scale.
        window: only keys with δ < window.
        out: like q, written in place; lse: fp32 [b, q_len, h_q], or [b, h_q] for a three-dimensional q.
        backend, stream: as in `sparse_mla_forward`.

    Returns:
        (out, lse), natural-log. A query without a visible key: out 0, lse −inf.
    """
    name = "paged_attention"
    new = outputs_like(name, "q", q)
    shape = shape_of(q)
    written = out, lse
    out = new(shape, q.dtype) if out is None else given(name, "out", out)
    lse = new(shape[:-1], "float32") if lse is None else given(name, "lse", lse)
    _hopwell.paged_attention(
        q, k_cache, v_cache, block_tables, context_lens, scale, layout, pos_bias_u, bias, bias_kind, out_of_range,
        pre_scale, pos_bias_v, r, alibi_slopes, window, out, lse, backend, stream,
    )  # fmt: skip
    return native(q, (out, lse), written)


def nvfp4_gemv(
    a: Array,
    b: Array,
    sfa: Array,
    sfb: Array,
    *,
    alpha: float = 1.0,
    out_dtype: DType = "float16",
    scale_layout: str = "plain",
    out: Array | None = None,
    backend: str | None = None,
    stream: Any = None,
) -> Array:
    """c[m,0,l] = alpha·Σ_k a[m,k,l]·b[0,k,l], both sides NVFP4: e2m1 codes (low nibble = even k), e4m3 scales.

    Args:
        a: codes, uint8 or float4_e2m1fn_x2 [M, K/2, L]; K a multiple of 16, fastest in memory, then rows, then L.
        b: codes [1, K/2, L], or [128, K/2, L] of which only the first row counts.
        sfa, sfb: scales, uint8 or float8_e4m3fn. scale_layout "plain": [rows, K/16, L]; "blocked": the 128×4 order of
            cuBLAS and CUTLASS, in any shape of as many bytes, L slowest.
        alpha: factor of the result.
        out_dtype: "float16", "bfloat16" or "float32".
        out: [M, 1, L] of out_dtype, any strides; written in place.
        backend, stream: as in `sparse_mla_forward`.

    Returns:
        c [M, 1, L].
    """
    name = "nvfp4_gemv"
    new = outputs_like(name, "a", a)
    out_type = dtype_name(name, "out_dtype", out_dtype, ("float16", "bfloat16", "float32"))
    m, _, batch = dims(a, 3)
    written = (out,)
    if out is None:
        out = new((m, 1, batch), out_type)
    else:
        check_dtype(name, "out", given(name, "out", out), out_type, "out_dtype")
    _hopwell.nvfp4_gemv(a, b, sfa, sfb, alpha, scale_layout, out, backend, stream)
    return native(a, (out,), written)[0]


def nvfp4_linear(
    x: Array,
    weight: Array,
    weight_scale: Array,
    weight_global: float | Array,
    *,
    bias: Array | None = None,
    scale_layout: str = "plain",
    global_is_reciprocal: bool = False,
    out: Array | None = None,
    backend: str | None = None,
    stream: Any = None,
) -> Array:
    """y[i,n] = weight_global·Σ_k x[i,k]·code[n,k]·scale[n,k/16] + bias[n]: 4-bit weights, 16-bit activations (W4A16).

    Args:
        x: bf16, fp16 or (on the CPU) fp32 [n, K].
        weight: codes, uint8 or float4_e2m1fn_x2 [N, K/2].
        weight_scale: uint8 or float8_e4m3fn; scale_layout "plain": [N, K/16], or "blocked", as in `nvfp4_gemv`.
        weight_global: a number, or a 0-d fp32 array on the device of x.
        bias: like x, [N].
        global_is_reciprocal: the global is 1 / the factor (compressed-tensors).
        out: like x, [n, N]; written in place.
        backend, stream: as in `sparse_mla_forward`.

    Returns:
        y [n, N] in the dtype of x.
    """
    new = outputs_like("nvfp4_linear", "x", x)
    written = (out,)
    out = new((dims(x, 2)[0], dims(weight, 2)[0]), x.dtype) if out is None else given("nvfp4_linear", "out", out)
    _hopwell.nvfp4_linear(
        x, weight, weight_scale, weight_global, bias, scale_layout, global_is_reciprocal, out, backend, stream
    )
    return native(x, (out,), written)[0]


def nvfp4_matmul(
    a: Array,
    b: Array,
    sfa: Array,
    sfb: Array,
    *,
    alpha: float = 1.0,
    bias: Array | None = None,
    out_dtype: DType = "bfloat16",
    scale_layout: str = "plain",
    out: Array | None = None,
    backend: str | None = None,
    stream: Any = None,
) -> Array:
    """c[m,n] = alpha·Σ_k a[m,k]·b[n,k] + bias[n], both sides NVFP4 (W4A4).

    Args:
        a, b: e2m1 codes (low nibble = even k), uint8 or float4_e2m1fn_x2 [M, K/2] and [N, K/2]; K a multiple of 16.
        sfa, sfb: e4m3 scales, uint8 or float8_e4m3fn; scale_layout "plain": [rows, K/16], or "blocked", as in
            `nvfp4_gemv`.
        alpha: factor of the product, such as both sides' global scales.
        bias: [N], of out_dtype.
        out_dtype: "bfloat16", "float16" or "float32".
        out: [M, N] of out_dtype; written in place.
        backend, stream: as in `sparse_mla_forward`.

    Returns:
        c [M, N].
    """
    name = "nvfp4_matmul"
    new = outputs_like(name, "a", a)
    out_type = dtype_name(name, "out_dtype", out_dtype, ("bfloat16", "float16", "float32"))
    written = (out,)
    if out is None:
        out = new((dims(a, 2)[0], dims(b, 2)[0]), out_type)
    else:
        check_dtype(name, "out", given(name, "out", out), out_type, "out_dtype")
    _hopwell.nvfp4_matmul(a, b, sfa, sfb, alpha, bias, scale_layout, out, backend, stream)
    return native(a, (out,), written)[0]


def nvfp4_quantize(
    x: Array,
    *,
    scale_layout: str = "plain",
    global_scale: float | Array | None = None,
    backend: str | None = None,
    stream: Any = None,
) -> tuple[Array, Array, Array]:
    """x to NVFP4: global = amax/2688; scale = e4m3(block amax/(6·global)); codes nearest (ties to even) to the rest.

    Args:
        x: fp32, fp16 or bf16 [rows, K]; K a multiple of 16.
        scale_layout: "plain" or "blocked", as in `nvfp4_gemv`.
        global_scale: use this one, a number or a 0-d fp32 array; scales saturate at 448 where it is too small.
        backend, stream: as in `sparse_mla_forward`.

    Returns:
        (codes uint8 [rows, K/2], scales uint8 [rows, K/16], or blocked [rows up to 128s, K/16 up to 4s], global fp32
        0-d).
    """
    new = outputs_like("nvfp4_quantize", "x", x)
    rows, k = dims(x, 2)
    groups = k // 16
    blocked = scale_layout == "blocked"
    codes = new((rows, k // 2), "uint8")
    scales = new((-(-rows // 128) * 128, -(-groups // 4) * 4) if blocked else (rows, groups), "uint8")
    factor = new((), "float32")
    _hopwell.nvfp4_quantize(x, global_scale, scale_layout, codes, scales, factor, backend, stream)
    return native(x, (codes, scales, factor))


def nvfp4_dequantize(
    codes: Array,
    scales: Array,
    global_scale: float | Array,
    *,
    scale_layout: str = "plain",
    dtype: DType = "float32",
    backend: str | None = None,
    stream: Any = None,
) -> Array:
    """x = code·scale·global.

    Args:
        codes: uint8 or float4_e2m1fn_x2 [rows, K/2].
        scales: uint8 or float8_e4m3fn; scale_layout "plain": [rows, K/16], or "blocked", as in `nvfp4_gemv`.
        global_scale: a number or a 0-d fp32 array.
        dtype: "float32", "float16" or "bfloat16".
        backend, stream: as in `sparse_mla_forward`.

    Returns:
        x [rows, K].
    """
    name = "nvfp4_dequantize"
    new = outputs_like(name, "codes", codes)
    rows, half_k = dims(codes, 2)
    x = new((rows, 2 * half_k), dtype_name(name, "dtype", dtype, ("float32", "float16", "bfloat16")))
    _hopwell.nvfp4_dequantize(codes, scales, global_scale, scale_layout, x, backend, stream)
    return native(codes, (x,))[0]


def lightning_indexer(
    q_index: Array,
    k_index: Array,
    weights: Array,
    topk: int,
    *,
    q_scale: Array | None = None,
    k_scale: Array | None = None,
    q_positions: Array | None = None,
    q_start: int | None = None,
    kv_stride: int = 1,
    k_start: Array | None = None,
    k_end: Array | None = None,
    backend: str | None = None,
    stream: Any = None,
) -> tuple[Array, Array]:
    """The topk visible keys of largest index score (DeepSeek Sparse Attention), in ascending order of key.

        score[s,t] = k_scale[t]·Σ_j weights[s,j]·q_scale[s,j]·relu(q_index[s,j,:]·k_index[t,:])

    The scores of all keys are never stored. Of equal scores the smaller keys are taken; a NaN score counts as −inf,
    and a key of score −inf is taken only where nothing better is left.

    Args:
        q_index: bf16, fp32 or float8_e4m3fn [s_q, h_index, d_index].
        k_index: like q_index, [s_kv, d_index].
        weights: fp32 or bf16 [s_q, h_index], any sign.
        topk: keys a query, 0 … 2³¹ − 1.
        q_scale, k_scale: fp32 [s_q, h_index] and [s_kv], of float8_e4m3fn only; 1 where None. Any values: the relu is
            that of the codes' product, so that a negative scale turns a head's or a key's sign.
        q_positions, q_start, kv_stride, k_start, k_end: causal masking and key ranges, as in `sparse_mla_forward`.
        backend, stream: as in `sparse_mla_forward`.

    Returns:
        (indices int32 [s_q, topk], scores fp32 [s_q, topk]); −1 and −inf at the end of rows that see fewer keys.
    """
    name = "lightning_indexer"
    new = outputs_like(name, "q_index", q_index)
    shape = (dims(q_index, 3)[0], check_topk(name, topk))
    indices, scores = new(shape, "int32"), new(shape, "float32")
    _hopwell.lightning_indexer(
        q_index, k_index, weights, q_scale, k_scale, q_positions, q_start, kv_stride, k_start, k_end, indices, scores,
        backend, stream,
    )  # fmt: skip
    return native(q_index, (indices, scores))


def lightning_indexer_backward(
    target: Array | None,
    q_index: Array,
    k_index: Array,
    weights: Array,
    indices: Array,
    *,
    d_scores: Array | None = None,
    k_start: Array | None = None,
    k_end: Array | None = None,
    row_weights: Array | None = None,
    relu: bool = True,
    d_loss: float | Array = 1.0,
    row_loss: Array | None = None,
    deterministic: bool = False,
    backend: str | None = None,
    stream: Any = None,
) -> tuple[Array | None, Array, Array, Array]:
    """The indexer's loss against the attention distribution, and its gradients; or the gradients of any other loss.

        row_loss = KL(target[s,:] ‖ softmax over the selected entries of score[s,:]);  loss = Σ_s row_weights·row_loss
        g        = d_loss·row_weights·(softmax − target), or d_loss·row_weights·d_scores
        d_weights = Σ_i g·relu(q·k);  d_q_index = Σ_i g·w·1[q·k > 0]·k;  d_k_index[t] += Σ g·w·1[q·k > 0]·q

    Args:
        target: fp32 [s_q, topk], what `attention_distribution(..., normalize="l1")` returns for these indices; None
            where d_scores is given.
        q_index, k_index, weights: as in `lightning_indexer`, but not float8_e4m3fn.
        indices: int32 [s_q, topk]; entries outside [0, s_kv) are invalid, those that occur twice count twice.
        d_scores: fp32 [s_q, topk] in place of the target: the gradient of a loss of your own with respect to the
            entries' scores. Those of entries without a score are ignored; infinities count as NaN.
        k_start, k_end: int32 [s_q], given together: entries outside k_start[s] … k_end[s] − 1 are invalid, too.
        row_weights: fp32 [s_q], factors of each row's loss and gradient. A row of weight 0 adds nothing, whatever is in
            it.
        relu: False for score[s,t] = Σ_j weights·(q·k), whose gradients have neither relu nor 1[q·k > 0].
        d_loss: scales the gradients, not the loss. A number, or an fp32 array of one element on the device of the
            others, for which nobody waits.
        row_loss: fp32 [s_q], is written: each row's loss before row_weights.
        deterministic: the same bits every time, also where the fastest way would not give them.
        backend, stream: as in `sparse_mla_forward`.

    Returns:
        (loss fp32 0-d, None with d_scores; d_q_index like q_index, d_k_index fp32 [s_kv, d_index], d_weights like
        weights). A row whose target is all zero adds neither loss nor gradient.
    """
    new = outputs_like("lightning_indexer_backward", "q_index", q_index)
    loss = new((), "float32") if d_scores is None else None
    d_q_index = new(dims(q_index, 3), getattr(q_index, "dtype", "float32"))
    d_k_index = new(dims(k_index, 2), "float32")
    d_weights = new(dims(weights, 2), getattr(weights, "dtype", "float32"))
    number, array = (1.0, d_loss) if hasattr(d_loss, "__dlpack__") else (d_loss, None)
    _hopwell.lightning_indexer_backward(
        target, d_scores, q_index, k_index, weights, indices, k_start, k_end, row_weights, number, array, relu,
        deterministic, loss, row_loss, d_q_index, d_k_index, d_weights, backend, stream,
    )  # fmt: skip
    gradients = native(q_index, (d_q_index, d_k_index, d_weights), (row_loss,))
    return (None if loss is None else native(q_index, (loss,))[0], *gradients)


def indexer_dense_loss(
    q: Array,
    kv: Array,
    lse: Array,
    q_index: Array,
    k_index: Array,
    weights: Array,
    sm_scale: float,
    *,
    k_start: Array | None = None,
    k_end: Array | None = None,
    q_positions: Array | None = None,
    q_start: int | None = None,
    kv_stride: int = 1,
    row_weights: Array | None = None,
    relu: bool = True,
    d_loss: float | Array = 1.0,
    row_loss: Array | None = None,
    deterministic: bool = False,
    backend: str | None = None,
    stream: Any = None,
) -> tuple[Array, Array, Array, Array]:
    """The indexer's loss over every visible key, as its dense warm-up wants it, and its gradients.

        target   = Σ_h exp(score[s,h,t] − lse[s,h]) / h_q        score of the attention, over the visible keys t
        row_loss = KL(target[s,:] ‖ softmax over the visible keys of the index score);  loss = Σ_s row_weights·row_loss

    Nothing of size s_q × s_kv is stored: queries are taken in passes, on a GPU of 256 MiB of scores and targets.

    Args:
        q, kv, sm_scale: as in `sparse_mla_forward`.
        lse: fp32 [s_q, h_q], what `sparse_mla_forward(q, kv, None, ...)` returned.
        q_index, k_index, weights: as in `lightning_indexer`.
        k_start, k_end, q_positions, q_start, kv_stride: which keys are visible, as in `sparse_mla_forward`.
        row_weights, relu, d_loss, row_loss, deterministic: as in `lightning_indexer_backward`. On a GPU deterministic
            sums have room for targets up to 256; where one is larger, d_k_index of the key is NaN.
        backend, stream: as in `sparse_mla_forward`.

    Returns:
        (loss fp32 0-d, d_q_index like q_index, d_k_index fp32 [s_kv, d_index], d_weights like weights). A query without
        a visible key adds neither loss nor gradient.
    """
    new = outputs_like("indexer_dense_loss", "q", q)
    loss = new((), "float32")
    d_q_index = new(dims(q_index, 3), getattr(q_index, "dtype", "float32"))
    d_k_index = new(dims(k_index, 2), "float32")
    d_weights = new(dims(weights, 2), getattr(weights, "dtype", "float32"))
    number, array = (1.0, d_loss) if hasattr(d_loss, "__dlpack__") else (d_loss, None)
    _hopwell.indexer_dense_loss(
        q, kv, lse, q_index, k_index, weights, sm_scale, q_positions, q_start, kv_stride, k_start, k_end, row_weights,
        number, array, relu, deterministic, loss, row_loss, d_q_index, d_k_index, d_weights, backend, stream,
    )  # fmt: skip
    gradients = native(q, (d_q_index, d_k_index, d_weights), (row_loss,))
    return (native(q, (loss,))[0], *gradients)


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
    name = "normalize_l1"
    new = outputs_like(name, "attn", attn)
    written = (out,)
    out = new(dims(attn, 2), "float32") if out is None else given(name, "out", out)
    _hopwell.normalize_l1(attn, out, backend, stream)
    return native(attn, (out,), written)[0]


_OPERATORS = {
    function.__name__: function
    for function in (
        sparse_mla_forward,
        sparse_mla_backward,
        attention_distribution,
        paged_attention,
        nvfp4_gemv,
        nvfp4_linear,
        nvfp4_matmul,
        nvfp4_quantize,
        nvfp4_dequantize,
        lightning_indexer,
        lightning_indexer_backward,
        indexer_dense_loss,
        normalize_l1,
    )
}


def explain(operator: str, /, **arguments: Any) -> str:
    """Which backend would run a call, and why not the others: one line a backend, such as `cpu: slower than sm90`.

    `operator` is the name of a function here, `arguments` are its own, by name; nothing is run. Bad arguments raise
    what the call itself would raise.
    """
    function = _OPERATORS.get(operator) if isinstance(operator, str) else None
    if function is None:
        raise ValueError(f"explain: operator must be one of {', '.join(_OPERATORS)}; got {printable(operator)}")
    explanation = _hopwell.Explanation()
    function(**{**arguments, "backend": explanation})
    return explanation.text
