"""Solutions of FlashInfer-Bench's definitions of DeepSeek Sparse Attention over pages.

    from hopwell.compat.flashinfer_bench import dsa_sparse_attention as run        # the whole main.py of a solution

Such a solution has the language python, the entry point `main.py::run` and destination_passing_style False.

- `dsa_sparse_attention_h16_ckv512_kpe64_topk2048_ps64` is `dsa_sparse_attention`.
- `dsa_topk_indexer_fp8_h64_d128_topk2048_ps64` is `dsa_topk_indexer_fp8`.

Axes, order of the arguments and results follow `docs/op-types/dsa-paged.mdx` of
github.com/flashinfer-ai/flashinfer-bench at 40e6ca7 and `flashinfer/trace/templates/attention.py` of
github.com/flashinfer-ai/flashinfer at fb28d72. lse is to base 2. A token without a valid index gets an output of 0 and
lse −inf. Differences: an index below 0 or beyond the cache is invalid, where the definition's only is −1. Any number of
heads, any page size, any topk of the attention and, on the CPU, any width and fp32 are supported. The two parts of the
queries are put together first, which copies them. The indexer's slots are in ascending order of position, not of score,
and of equal scores the smaller positions are taken; −1 stands at the end of a row.
"""

import math

import torch
from torch import Tensor

from hopwell.torch import ops

from .._checks import require, require_shape
from ._names import named

__all__ = ["dsa_sparse_attention", "dsa_topk_indexer_fp8"]

_TOPK = 2048  # of the definition


@torch.no_grad()
def dsa_sparse_attention(
    q_nope: Tensor, q_pe: Tensor, ckv_cache: Tensor, kpe_cache: Tensor, sparse_indices: Tensor, sm_scale: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Attention of each token over selected slots of a cache in two tensors.

    Args:
        q_nope, q_pe: bf16 [num_tokens, num_qo_heads, head_dim_ckv] and [.., head_dim_kpe].
        ckv_cache, kpe_cache: bf16 [num_pages, page_size, head_dim_ckv] and [.., head_dim_kpe].
        sparse_indices: int32 [num_tokens, topk], slots; −1 for none.
        sm_scale: factor of the logits.

    Returns:
        output like q_nope, and lse float32 [num_tokens, num_qo_heads], to base 2.
    """
    name = "dsa_sparse_attention"
    require_shape(name, "q_nope", q_nope, num_tokens=None, num_qo_heads=None, head_dim_ckv=None)
    tokens, heads, d_v = q_nope.shape
    require_shape(name, "q_pe", q_pe, num_tokens=tokens, num_qo_heads=heads, head_dim_kpe=None)
    require(q_pe.dtype == q_nope.dtype, name, "q_pe", f"{q_nope.dtype} as q_nope is", q_pe)
    require_shape(name, "ckv_cache", ckv_cache, num_pages=None, page_size=None, head_dim_ckv=d_v)
    same = "columns of q_nope and q_pe"
    with named(name, q=same, cache="ckv_cache", rope_cache="kpe_cache", indices="sparse_indices", d_v="head_dim_ckv"):
        out, lse = ops.sparse_mla_decode(
            *(torch.cat([q_nope, q_pe], -1), ckv_cache, sparse_indices, float(sm_scale), d_v), rope_cache=kpe_cache
        )
    return out, lse.masked_fill_(lse == torch.inf, -torch.inf) / math.log(2)


@torch.no_grad()
def dsa_topk_indexer_fp8(
    q_index_fp8: Tensor, k_index_cache_fp8: Tensor, weights: Tensor, seq_lens: Tensor, block_table: Tensor
) -> Tensor:
    """The slots of the 2,048 positions of largest index score of each sequence.

    Args:
        q_index_fp8: float8_e4m3fn [batch_size, num_index_heads, index_head_dim].
        k_index_cache_fp8: int8 [num_pages, page_size, 1, index_head_dim + 4]. In a page, the codes of all rows come
            first, then an fp32 scale a row.
        weights: float32 [batch_size, num_index_heads].
        seq_lens: int32 [batch_size].
        block_table: int32 [batch_size, max_num_pages].

    Returns:
        int32 [batch_size, 2048]; −1 where a sequence has fewer positions.
    """
    name = "dsa_topk_indexer_fp8"
    require_shape(name, "q_index_fp8", q_index_fp8, batch_size=None, num_index_heads=None, index_head_dim=None)
    require(q_index_fp8.dtype == torch.float8_e4m3fn, name, "q_index_fp8", "float8_e4m3fn", q_index_fp8)
    caller = {
        "q_index": "q_index_fp8",
        "cache": "k_index_cache_fp8",
        "context_lens": "seq_lens",
        "block_tables": "block_table",
    }
    with named(name, **caller):
        indices, _ = ops.paged_lightning_indexer(
            *(q_index_fp8, k_index_cache_fp8, weights, _TOPK, block_table, seq_lens), slots=True, scores=False
        )
    return indices
