"""The `DSA` namespace of NVIDIA's cuDNN front end: DeepSeek sparse attention for trainers.

    from hopwell.compat.cudnn import DSA        # instead of: from cudnn import DSA

After `cudnn.deepseek_sparse_attention` of nvidia-cudnn-frontend 1.32.0 (the pip package), whose tests are
`test/python/fe_api/dsa` of github.com/NVIDIA/cudnn-frontend: the seven wrappers that Megatron-LM calls (at d98e8a6),
the two recomputations of index scores, scores and selection in one, the two conversions of entries, the sparse forward,
`sparse_attention` and its recomputation. What holds here as there: names, order, defaults and layouts ([B, S, H, D], or
packed [T, H, D] with cu_seqlens) of the arguments, keys and order of the results (a dict that unpacks like a tuple),
natural logarithms, −1 as an entry that is none, the mask `key < (q_causal_offset + query + 1) // ratio`, −inf at keys
that a query doesn't see in every matrix of scores, `stream` (a handle: 0 and 1 are the default stream), and what is
overwritten: `indexer_backward` leaves its gradient of the scores in attn_score, `dense_indexer_backward` in
index_score.

What differs: any number of heads, entries and keys, d a multiple of 16 up to 576 and d_index up to 128 on GPUs from
Ampere on (the sparse backward and forward there: d 512 or 576 with values of 512), host tensors, float32 on the CPU;
top-k entries come in ascending order, of equal numbers the smaller columns unless tie_break is 2; tuning arguments and
workspaces are taken and not needed. A ValueError: the block-scaled precisions "mxfp8" and "mxfp4" ("fp8" with a scale a
row is taken), several heads of index keys, indexer_topk other than 0, and `stream` 2, which is another stream in each
thread. The wrappers are no part of the autograd graph, `sparse_attention` is. The classes behind the wrappers
(`IndexerForward` and so on), `aligned_hca_backward_wrapper` and the sizes of buffers of candidates are not here.

Earlier versions differ: before 1.32 `indexer_backward_wrapper` had sm_scale, loss_coeff, grad_loss in this order (name
them), and before 1.26 a call without q_causal_offsets let the last query see the last key, where now the first query
sees the first key. Megatron-LM's cuDNN backend counts on that for packed documents in context-parallel shards
(`hopwell.compat.megatron` in its place does not call these wrappers), and so does NeMo Automodel's (`glm_moe_dsa` at
5e787c6): there give q_causal_offsets, the keys of each sequence less its queries.

What it costs: the dense wrappers write matrices of all scores, as there. Hopwell's kernels never store these, so they
are made 64 MiB at a time from selections of all visible keys (`indexer_forward`) or from tables of all keys
(`dense_attn_score_recompute`), and `dense_indexer_backward` makes such a table for the whole call, int32 of the scores'
size, where there are several sequences. `indexer_top_k` and `sparse_indexer_score_recompute` are PyTorch and no kernels
of Hopwell's; `indexer_forward_top_k` is one selection, and with return_lse the scores of all keys once more.
`hopwell.torch`'s own operators do without all of it.
"""

from types import SimpleNamespace

from ._attention import (
    sparse_attention,
    sparse_attention_backward_wrapper,
    sparse_attention_forward_wrapper,
    sparse_attention_score_recompute,
)
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
    "DSA",
    "TupleDict",
    "compactify_wrapper",
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
