"""FlashMLA's sparse attention, prefill and decode, with its signatures and conventions.

    from hopwell.compat.flash_mla import flash_mla_sparse_fwd        # instead of: from flash_mla import ...
    from hopwell.compat.flash_mla import flash_mla_with_kvcache, get_mla_metadata

`flash_mla_sparse_fwd` follows the reference of FlashMLA (`tests/ref.py` of github.com/deepseek-ai/FlashMLA at 9241ae3),
and for `indexer_topk` its branch nv_dev at b7643bd. Indices below 0 or from s_kv on are invalid. max_logits and lse are
natural logarithms (versions without `attn_sink` returned logarithms to base 2). A query without a valid key gets out 0,
max_logits −inf and lse +inf. In addition, Hopwell supports any h_q, d_qk and d_v, host tensors, fp32, and NaN in keys
past topk_length; h_kv is 1 in both. It supports any indexer_topk, for any h_q, also beside topk_length; the price is a
second forward over these entries.

`flash_mla_with_kvcache` follows `flash_mla/flash_mla_interface.py` and `csrc/api/sparse_decode.h` at 9241ae3, where
`indices` is given. Arguments, their order and defaults, caches of 656 and 584 bytes a token, the second cache, lengths,
the sink and the results are the same: out [b, s_q, h_q, head_dim_v] and lse [b, h_q, s_q]; a query without a valid
entry gets out 0 and lse +inf. Differences:

- Dense decoding, without indices, is a ValueError.
- An index from the number of slots on is invalid, as a negative one is. FlashMLA reads memory there.
- The object of `get_mla_metadata` carries nothing: `tile_scheduler_metadata` and `num_splits`, which vLLM reads, are
  None. So shapes and lengths may change from call to call.
- `out`, which vLLM passes to both functions, is not in 9241ae3. If given, the result is written there.
- Any h_q, topk and head_dim_v, a topk of 0, lengths [b, s_q] and b = 0 are supported. So are V3.2 rows without RoPE (q
  of 512 columns), V4.1 rows of 528 bytes, and with is_fp8_kvcache=False caches of bf16 rows.
- A row of V3.2 has the value bf16(code·scale) for any scale. FlashMLA rounds the scale first, on SM90 to bf16 and on
  SM100 down to a power of two. Where scales are powers of two, all three agree.
- Results of a query have the same bits in any batch, because a row is cut every 256 entries. With 64 and 128 heads this
  is slower than FlashMLA. `hopwell.sparse_mla_decode` with larger `keys_per_split` is faster.
- It runs on the CPU. GPUs support the caches that `hopwell.explain` names for `sparse_mla_decode`.

Like the originals both are not part of the autograd graph.
"""

from typing import Any

import torch

from .._checks import integer, require
from .._operators import sparse_mla_decode, sparse_mla_forward
from ._names import named

__all__ = ["FlashMLASchedMeta", "flash_mla_sparse_fwd", "flash_mla_with_kvcache", "get_mla_metadata"]


@torch.no_grad()
def flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    indexer_topk: int = 0,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Sparse attention in the multi-query form of MLA, for prefill.

    Args:
        q: bf16 [s_q, h_q, d_qk].
        kv: bf16 [s_kv, 1, d_qk]; V is its first d_v columns.
        indices: int32 [s_q, 1, topk].
        sm_scale: factor of the logits.
        d_v: columns of V.
        attn_sink: fp32 [h_q]; multiplies out by exp(lse) / (exp(lse) + exp(attn_sink)), nothing else.
        topk_length: int32 [s_q]; only the first topk_length[s] entries count.
        indexer_topk: above 0, a fourth result is the lse over the first indexer_topk entries of each row alone, those
            that the indexer selected, where the entries of a window follow.
        out: if given, the first result is written there; as vLLM passes it.

    Returns:
        (out bf16 [s_q, h_q, d_v], max_logits fp32 [s_q, h_q], lse fp32 [s_q, h_q]); with indexer_topk also lse_indexer
        fp32 [s_q, h_q], +inf where none of these entries is valid.

    Raises:
        ValueError: an argument has the wrong value, dtype or shape.
    """
    first = integer("flash_mla_sparse_fwd", "indexer_topk", indexer_topk)
    require(first >= 0, "flash_mla_sparse_fwd", "indexer_topk", "at least 0", first)
    options: dict[str, Any] = {"attn_sink": attn_sink, "topk_length": topk_length}
    results = sparse_mla_forward(q, kv, indices, sm_scale, d_v, out=out, **options)
    if first == 0:
        return results
    _, _, lse_indexer = sparse_mla_forward(q, kv, indices[..., :first], sm_scale, d_v, **options)
    return (*results, lse_indexer)


class FlashMLASchedMeta:
    """What `get_mla_metadata` returns: nothing is planned ahead."""

    tile_scheduler_metadata: None = None
    num_splits: None = None


def get_mla_metadata(*args: object, **kwargs: object) -> tuple[FlashMLASchedMeta, None]:
    """Returns an empty object and None. As in FlashMLA, arguments are ignored."""
    return FlashMLASchedMeta(), None


@torch.no_grad()
def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: object,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sparse attention of new tokens over paged caches of latents.

    Args:
        q: bf16 [b, s_q, h_q, d_qk].
        k_cache: [blocks, block, 1, row], with is_fp8_kvcache of bytes: 656 a token for d_qk 576 (V3.2), 584 for d_qk
            512 (V4). Memory between blocks may hold anything.
        block_table, cache_seqlens: of dense decoding; unused, as in FlashMLA where indices are given.
        head_dim_v: columns of V, the first of K.
        tile_scheduler_metadata: the first result of `get_mla_metadata`; unused.
        num_splits: None.
        softmax_scale: factor of the logits; None is d_qk ** -0.5.
        causal: False.
        is_fp8_kvcache: True for caches of bytes.
        indices: int32 [b, s_q, topk], slots of k_cache: page · block + offset in the page.
        attn_sink: fp32 [h_q]; multiplies out by exp(lse) / (exp(lse) + exp(attn_sink)), nothing else.
        extra_k_cache, extra_indices_in_kvcache: a second cache of the same rows, and int32 [b, s_q, extra_topk].
        topk_length, extra_topk_length: int32 [b]; only the first entries of a row count.
        out: if given, the first result is written there; as vLLM passes it.

    Returns:
        (out like q [b, s_q, h_q, head_dim_v], lse fp32 [b, h_q, s_q], a natural logarithm).

    Raises:
        ValueError: an argument has the wrong value, dtype or shape, or belongs to dense decoding.
    """
    name = "flash_mla_with_kvcache"
    require(indices is not None, name, "indices", "int32 [b, s_q, topk] (no dense decoding)", indices)
    assert indices is not None
    require(q.ndim == 4, name, "q", "[b, s_q, h_q, d_qk]", q)
    require(num_splits is None, name, "num_splits", "None", num_splits)
    require(not causal, name, "causal", "False with indices", causal)
    of_bytes = k_cache.element_size() == 1
    rows = "bytes" if is_fp8_kvcache else "bf16 rows"
    require(of_bytes == bool(is_fp8_kvcache), name, "k_cache", f"of {rows}, as is_fp8_kvcache says", k_cache)
    caller = {
        "cache": "k_cache",
        "sm_scale": "softmax_scale",
        "d_v": "head_dim_v",
        "extra_cache": "extra_k_cache",
        "extra_indices": "extra_indices_in_kvcache",
    }
    with named(name, **caller):
        result, lse = sparse_mla_decode(
            *(q, k_cache, indices, q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale, head_dim_v),
            out=out,
            topk_length=topk_length,
            extra_cache=extra_k_cache,
            extra_indices=extra_indices_in_kvcache,
            extra_topk_length=extra_topk_length,
            attn_sink=attn_sink,
        )
    return result, lse.transpose(1, 2)
