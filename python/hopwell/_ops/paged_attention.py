"""Decode attention over a paged KV cache."""

from typing import Any

from .. import _hopwell
from .._arrays import Array, Outputs, shape_of


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
    """Decode attention of one or a few query tokens per sequence over a paged KV cache, with relative positions.

        logit_j = scale·((q + u)·k_j + bias_j);   out = Σ_j softmax(logit)_j·v_j

    Query i of q_len has position = context_len − q_len + i and sees the keys j ≤ position; δ = position − j.

    Args:
        q: fp32, fp16 or bf16 [b, q_len, h_q, d] or [b, h_q, d]; q_len 1 … 16; d a multiple of 8 from 32 to 256.
        k_cache, v_cache: like q. layout "nhd": [blocks, block, h_kv, d]; "hnd": [blocks, h_kv, block, d]; "vllm": K
            [blocks, h_kv, d/x, block, x] with x = 16 bytes, V [blocks, h_kv, d, block]. block 1 … 256.
        block_tables: int32 [b, max_blocks]; entry j // block holds key j. Keys of an invalid entry are masked.
        context_lens: int32 [b], keys of each sequence, query tokens included; clamped to 0 … max_blocks·block.
        scale: factor of the logits. On GPUs below 2.35e38, so that scale·log2(e) is an fp32.
        pos_bias_u: q's dtype or fp32 [h_q, d], added to q before the product with K.
        bias: fp32, fp16 or bf16. bias_kind "key": [b or 1, h_q, q_len, keys]; "distance": [b or 1, h_q, extent] by δ.
        out_of_range: value for keys beyond the last column of bias or r: "zero", "clamp" (the last column) or "-inf".
        pre_scale: True adds the bias before the scale, as in Transformer-XL; False adds it after the scale.
        r, pos_bias_v: the fused form bias_j = (q + v)·r[δ]: r [h_q or 1, extent, d], v [h_q, d]; excludes `bias`.
        alibi_slopes: fp32 [h_q]; adds −slope·δ after the scale.
        window: only keys with δ < window; None or 0: every key.
        out: like q, written in place; lse: fp32 [b, q_len, h_q], or [b, h_q] for a three-dimensional q.
        backend, stream: as in `sparse_mla_forward`.

    Returns:
        (out, lse), lse as natural logarithm. A query without a visible key has out 0 and lse −inf.
    """
    outputs = Outputs("paged_attention", "q", q)
    shape = shape_of(q)
    out = outputs.given_or_new("out", out, shape, q.dtype)
    lse = outputs.given_or_new("lse", lse, shape[:-1], "float32")
    _hopwell.paged_attention(
        q, k_cache, v_cache, block_tables, context_lens, scale, layout, pos_bias_u, bias, bias_kind, out_of_range,
        pre_scale, pos_bias_v, r, alibi_slopes, window, out, lse, backend, stream,
    )  # fmt: skip
    return outputs.native(out, lse)
