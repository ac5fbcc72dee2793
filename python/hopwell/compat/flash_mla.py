"""`flash_mla_sparse_fwd` with the signature and the conventions of DeepSeek's FlashMLA.

    from hopwell.compat.flash_mla import flash_mla_sparse_fwd        # instead of: from flash_mla import ...

It follows the reference of FlashMLA (`tests/ref.py` of github.com/deepseek-ai/FlashMLA at 9241ae3), and for
`indexer_topk` its branch nv_dev at b7643bd. Indices below 0 or from s_kv on are invalid. max_logits and lse are natural
logarithms (versions without `attn_sink` returned logarithms to base 2). A query without a valid key gets out 0,
max_logits −inf and lse +inf. In addition, Hopwell supports any h_q, d_qk and d_v, host tensors, fp32, and NaN in keys
past topk_length; h_kv is 1 in both. It supports any indexer_topk, for any h_q, also beside topk_length; the price is a
second forward over these entries. Like the original it is not part of the autograd graph.
"""

from typing import Any

import torch

from .._checks import integer, require
from .._operators import sparse_mla_forward

__all__ = ["flash_mla_sparse_fwd"]


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

    Returns:
        (out bf16 [s_q, h_q, d_v], max_logits fp32 [s_q, h_q], lse fp32 [s_q, h_q]); with indexer_topk also lse_indexer
        fp32 [s_q, h_q], +inf where none of these entries is valid.

    Raises:
        ValueError: an argument has the wrong value, dtype or shape.
    """
    first = integer("flash_mla_sparse_fwd", "indexer_topk", indexer_topk)
    require(first >= 0, "flash_mla_sparse_fwd", "indexer_topk", "at least 0", first)
    options: dict[str, Any] = {"attn_sink": attn_sink, "topk_length": topk_length}
    results = sparse_mla_forward(q, kv, indices, sm_scale, d_v, **options)
    if first == 0:
        return results
    _, _, lse_indexer = sparse_mla_forward(q, kv, indices[..., :first], sm_scale, d_v, **options)
    return (*results, lse_indexer)
