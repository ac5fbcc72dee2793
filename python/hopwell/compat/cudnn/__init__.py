"""The `DSA` and `CSA` namespaces of NVIDIA's cuDNN front end: sparse attention and its compressor, for trainers.

    from hopwell.compat.cudnn import CSA, DSA        # instead of: from cudnn import CSA, DSA

Follows `cudnn.deepseek_sparse_attention` of nvidia-cudnn-frontend 1.32.0 (the pip package), whose tests are
`test/python/fe_api/dsa` of github.com/NVIDIA/cudnn-frontend. It has the seven wrappers that Megatron-LM calls (at
d98e8a6), the two recomputations of index scores, `indexer_forward_top_k` (scores and selection in one call), the two
conversions of entries, the sparse forward, `sparse_attention` and its recomputation. These are the same as there:
names, order, defaults and layouts ([B, S, H, D], or packed [T, H, D] with cu_seqlens) of the arguments; keys and order
of the results (a dict that unpacks like a tuple); natural logarithms; −1 for an invalid entry; the mask
`key < (q_causal_offset + query + 1) // ratio`; −inf for every key that a query does not see, in every matrix of scores;
`stream` (a handle: 0 and 1 are the default stream). The same arguments are overwritten: `indexer_backward` leaves its
gradient of the scores in attn_score, `dense_indexer_backward` in index_score.

Differences: any number of heads, entries and keys, and any strides, but the scores of `indexer_backward` must be
contiguous. On GPUs from Ampere on, d is a multiple of 16 up to 576 and d_index at most 128 (the sparse backward and
forward need d 512 or 576 with values of 512 there). Tensors may be on the host, and float32 on the CPU. Top-k entries
are in ascending order; of equal scores the smaller columns are selected unless tie_break is 2. Tuning arguments and
workspaces are accepted and ignored. These raise a ValueError: the block-scaled precisions "mxfp8" and "mxfp4" ("fp8"
with a scale per row is supported), several heads of index keys, an indexer_topk other than 0, and `stream` 2, which is
another stream in each thread. The wrappers are not part of the autograd graph; `sparse_attention` is. The classes
behind the wrappers (`IndexerForward` and others), `aligned_hca_backward_wrapper` and the functions for buffer sizes of
candidates are absent.

`CSA` follows `cudnn.csa.compressor` (in front ends with #427): the two wrappers of DeepSeek-V4's compressor, with the
same arguments and results. They are in `hopwell.compat.cudnn.csa.compressor`, too. Differences: any ratio and head_dim,
GPUs from Ampere on, the host, float32, and any strides. The backward has the same bits every time, so it also runs
where PyTorch is told to be deterministic. Rows of `out` after the last document's are 0, where there they are a pooling
of the first tokens. An entry whose score + ape is −inf is absent, and a column without an entry gives 0, where there it
gives NaN. The two classes behind the wrappers and the functions for JAX are absent.

`__version__` is the version of the front end that this module follows.

Earlier versions differ. Before 1.32 `indexer_backward_wrapper` had sm_scale, loss_coeff, grad_loss in this order:
pass them by name. Before 1.26, a call without q_causal_offsets let the last query see the last key; now the first
query sees the first key. Megatron-LM's cuDNN backend relies on the old rule for packed documents in context-parallel
shards (`hopwell.compat.megatron` replaces it and does not call these wrappers). NeMo Automodel's backend does too
(`glm_moe_dsa` at 5e787c6): pass q_causal_offsets there, the number of keys of each sequence minus its queries.

Costs: the dense wrappers write matrices of all scores, as there. Hopwell's kernels never store these matrices. The
wrappers make them 64 MiB at a time from selections of all visible keys (`indexer_forward`) or from index tables of all
keys (`dense_attn_score_recompute`). If there are several sequences, `dense_indexer_backward` makes such a table for the
whole call: int32, as large as the scores. `indexer_top_k` and `sparse_indexer_score_recompute` run in PyTorch and use
no kernels of Hopwell. `indexer_forward_top_k` is one selection; with return_lse it also computes the scores of all
keys. The operators in `hopwell.torch` have none of these costs.
"""

from types import SimpleNamespace

from ._attention import (
    sparse_attention,
    sparse_attention_backward_wrapper,
    sparse_attention_forward_wrapper,
    sparse_attention_score_recompute,
)
from ._compressor import CSA, csa_compressor_backward_wrapper, csa_compressor_forward_wrapper
from ._dense import dense_attn_score_recompute_wrapper, dense_indexer_score_recompute_wrapper, indexer_forward_wrapper
from ._entries import sparse_attn_score_recompute_wrapper, sparse_indexer_score_recompute_wrapper
from ._losses import dense_indexer_backward_wrapper, indexer_backward_wrapper
from ._results import TupleDict
from ._selection import (
    compactify_wrapper,
    indexer_forward_top_k_wrapper,
    indexer_top_k_wrapper,
    local_to_global_wrapper,
)

__all__ = [
    "CSA",
    "DSA",
    "TupleDict",
    "compactify_wrapper",
    "csa_compressor_backward_wrapper",
    "csa_compressor_forward_wrapper",
    "dense_attn_score_recompute_wrapper",
    "dense_indexer_backward_wrapper",
    "dense_indexer_score_recompute_wrapper",
    "indexer_backward_wrapper",
    "indexer_forward_top_k_wrapper",
    "indexer_forward_wrapper",
    "indexer_top_k_wrapper",
    "local_to_global_wrapper",
    "sparse_attention",
    "sparse_attention_backward_wrapper",
    "sparse_attention_forward_wrapper",
    "sparse_attention_score_recompute",
    "sparse_attn_score_recompute_wrapper",
    "sparse_indexer_score_recompute_wrapper",
]

__version__ = "1.32.0"

DSA = SimpleNamespace(
    compactify_wrapper=compactify_wrapper,
    dense_attn_score_recompute_wrapper=dense_attn_score_recompute_wrapper,
    dense_indexer_backward_wrapper=dense_indexer_backward_wrapper,
    dense_indexer_score_recompute_wrapper=dense_indexer_score_recompute_wrapper,
    indexer_backward_wrapper=indexer_backward_wrapper,
    indexer_forward_top_k_wrapper=indexer_forward_top_k_wrapper,
    indexer_forward_wrapper=indexer_forward_wrapper,
    indexer_top_k_wrapper=indexer_top_k_wrapper,
    local_to_global_wrapper=local_to_global_wrapper,
    sparse_attention=sparse_attention,
    sparse_attention_backward_wrapper=sparse_attention_backward_wrapper,
    sparse_attention_forward_wrapper=sparse_attention_forward_wrapper,
    sparse_attention_score_recompute=sparse_attention_score_recompute,
    sparse_attn_score_recompute_wrapper=sparse_attn_score_recompute_wrapper,
    sparse_indexer_score_recompute_wrapper=sparse_indexer_score_recompute_wrapper,
)
