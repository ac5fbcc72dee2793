"""DeepSeek-V4's compressor: gated pooling of blocks of tokens, and its gradients."""

from typing import Any

from .. import _hopwell
from .._arrays import Array, DType, Outputs, dims, dtype_name, extent, flag


def kv_compress(
    kv: Array,
    gate: Array,
    ratio: int,
    *,
    position_bias: Array | None = None,
    overlap: bool = False,
    cu_seqlens: Array | None = None,
    cu_compressed: Array | None = None,
    out_dtype: DType | None = None,
    out: Array | None = None,
    backend: str | None = None,
    stream: Any = None,
) -> Array:
    """Gated pooling of blocks of tokens into compressed keys (DeepSeek-V4's compressor).

        g[e,c]   = gate[t,o+c] + position_bias[r,o+c]       entry e of a window: token t, column offset o, place r
        w[e,c]   = exp(g[e,c]) / Σ_e' exp(g[e',c])          each column c on its own
        out[j,c] = Σ_e w[e,c]·kv[t,o+c]

    The window of compressed key j is the j-th block of `ratio` tokens of its document, and with `overlap` the block
    before it, if there is one. Tokens after a document's last whole block are in no window. An entry whose g is −inf is
    absent, whatever its value; a column without an entry gives 0. A g of +inf or NaN gives NaN in its column of its
    key. Rows of out that no document makes are 0. All arithmetic is fp32, rounded once.

    Args:
        kv: bf16 or fp32 [s, w], values of the tokens; w is d, or 2·d with `overlap`. Rows may be halves of a wider
            matrix.
        gate: like kv, logits of the pooling.
        ratio: tokens of a block, at least 1.
        position_bias: fp32 [ratio, w], added to the gate of the r-th token of each block.
        overlap: windows of two blocks: columns 0 … d − 1 of the previous block, columns d … 2·d − 1 of the own block.
        cu_seqlens: int32 [documents + 1]: document i has the rows cu_seqlens[i] … cu_seqlens[i+1] − 1, clamped to
            0 … s. Given together with cu_compressed. None: all rows are one document. No values are an error.
        cu_compressed: int32 [documents + 1]: document i writes the rows cu_compressed[i] … cu_compressed[i+1] − 1 of
            out, one for each whole block.
        out_dtype: "bfloat16" or "float32"; None is kv's.
        out: [n, d] of out_dtype, written in place, with any n; None allocates s // ratio rows, enough for any
            documents.
        backend, stream: as in `sparse_mla_forward`.

    Returns:
        out [n, d].
    """
    name = "kv_compress"
    outputs = Outputs(name, "kv", kv)
    s, w = dims(kv, 2)
    overlap = flag(name, "overlap", overlap)
    dtype = getattr(kv, "dtype", "float32")
    if out_dtype is not None:
        dtype = dtype_name(name, "out_dtype", out_dtype, ("bfloat16", "float32"))
    rows = s // max(extent(ratio, s + 1), 1)
    out = outputs.given_or_new("out", out, (rows, w // 2 if overlap else w), dtype)
    _hopwell.kv_compress(
        kv, gate, ratio, position_bias, overlap, cu_seqlens, cu_compressed, out, backend, stream
    )  # fmt: skip
    return outputs.native(out)[0]


def kv_compress_backward(
    d_out: Array,
    kv: Array,
    gate: Array,
    ratio: int,
    *,
    position_bias: Array | None = None,
    overlap: bool = False,
    cu_seqlens: Array | None = None,
    cu_compressed: Array | None = None,
    d_kv: Array | None = None,
    d_gate: Array | None = None,
    backend: str | None = None,
    stream: Any = None,
) -> tuple[Array, Array, Array | None]:
    """Gradients of `kv_compress` with respect to kv, gate and position_bias. The same bits every time.

        d_kv[t,o+c]            = w[e,c]·d_out[j,c]
        d_gate[t,o+c]          = w[e,c]·d_out[j,c]·(kv[t,o+c] − out[j,c])
        d_position_bias[r,o+c] = Σ over all windows of d_gate, not rounded

    Args:
        d_out: gradient of out, bf16 or fp32 [n, d].
        kv, gate, ratio, position_bias, overlap, cu_seqlens, cu_compressed: as in `kv_compress`.
        d_kv, d_gate: like kv, written in place.
        backend, stream: as in `sparse_mla_forward`.

    Returns:
        (d_kv, d_gate, d_position_bias): elements of d_kv and d_gate in no window are 0; d_position_bias is fp32
        [ratio, w], None without a position_bias.
    """
    outputs = Outputs("kv_compress_backward", "d_out", d_out)
    shape, dtype = dims(kv, 2), getattr(kv, "dtype", "float32")
    d_kv = outputs.given_or_new("d_kv", d_kv, shape, dtype)
    d_gate = outputs.given_or_new("d_gate", d_gate, shape, dtype)
    d_position_bias = None if position_bias is None else outputs.new(dims(position_bias, 2), "float32")
    _hopwell.kv_compress_backward(
        d_out, kv, gate, ratio, position_bias, overlap, cu_seqlens, cu_compressed, d_kv, d_gate, d_position_bias,
        backend, stream,
    )  # fmt: skip
    return outputs.native(d_kv, d_gate, d_position_bias)
