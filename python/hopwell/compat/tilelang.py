"""What the GLM-5 and DeepSeek-V4 plug-ins of slime and Miles call of TileLang's kernels.

    from hopwell.compat.tilelang import SparseMLA, lighting_indexer    # instead of: from .ops.sparse_mla import …
    from hopwell.compat.tilelang import sparse_attn_tilelang           # DeepSeek-V4

`SparseMLA` and `lighting_indexer` are GLM-5's.

After `slime_plugins/models/glm5` of github.com/THUDM/slime at 08a9dcd (`ops/sparse_mla.py`, `ops/indexer.py`, whose
kernels are those of TileLang's `examples/deepseek_v32`). What holds here as there: packed tokens without a batch
dimension, entries of −1 are none, lse to base 2, V is the first 512 columns, the gradient of kv has kv's dtype, keys
outside cu_seqlen_ks … cu_seqlen_ke − 1 and keys of score −inf are not selected.

What differs: indices come in ascending order and not by score (each with its own score); entries outside the keys are
none either; a query without keys gets out 0 and lse +inf instead of NaN; any number of heads and of entries, any d_qk,
host tensors and fp32. Scores of `topk_indices` that are given are made by PyTorch, some queries at a time, from
gathered keys: more memory traffic than a selection, and no kernel of Hopwell's.

`sparse_attn_tilelang` is DeepSeek-V4's, after `miles_plugins/models/deepseek_v4/ops/kernel/tilelang_sparse_mla.py` of
github.com/radixark/miles at 31f1ca9 (the model's own `inference/kernel.py` calls its `sparse_attn` with the same
arguments): keys are values too, a logit a head without a value, −1 for no entry. Beyond it: any heads, entries and d
(512 on GPUs), host tensors and fp32; entries outside the keys are none; the same bits every time on the CPU, and with
`torch.use_deterministic_algorithms` on GPUs.
"""

import math
from typing import Any

import torch
from torch import Tensor

from hopwell.torch import ops
from hopwell.torch._packing import key_ranges

from ._checks import require_shape


def sparse_attn_tilelang(
    q: Tensor, kv: Tensor, attn_sink: Tensor, topk_idxs: Tensor, sm_scale: float | None = None
) -> Tensor:
    """Sparse attention with sinks, differentiable in q, kv and attn_sink.

    q [b, s, heads, d], kv [b, s_kv, d], attn_sink float32 [heads], topk_idxs int32 [b, s, topk]; sm_scale 1/√d where
    None. Returns out [b, s, heads, d] in q's dtype.
    """
    function = "sparse_attn_tilelang"
    require_shape(function, "q", q, b=None, s=None, heads=None, d=None)
    b, s, heads, d = q.shape
    require_shape(function, "kv", kv, b=b, s_kv=None, d=d)
    require_shape(function, "attn_sink", attn_sink, heads=heads)
    require_shape(function, "topk_idxs", topk_idxs, b=b, s=s, topk=None)
    scale = d**-0.5 if sm_scale is None else sm_scale
    sequences = [ops.sparse_mla(q[i], kv[i], topk_idxs[i], scale, d, attn_sink=attn_sink)[0] for i in range(b)]
    if b == 1:
        return sequences[0][None]
    return torch.stack(sequences) if b else q.clone()


class SparseMLA:
    """Sparse attention in the multi-query form of MLA, differentiable in q and kv."""

    @staticmethod
    def apply(q: Tensor, kv: Tensor, indices: Tensor, scaling: float, d_v: int = 512) -> tuple[Tensor, Tensor]:
        """q [s_q, heads, d_qk], kv [s_kv, kv_group, d_qk], indices int32 [s_q, kv_group, topk].

        Returns (out [s_q, heads, d_v] in q's dtype, lse float32 [s_q, heads], to base 2 and without a gradient). The
        heads of a group are neighbours.
        """
        if q.ndim != 3 or kv.ndim != 3 or indices.ndim != 3:
            got = f"{list(q.shape)}, {list(kv.shape)}, {list(indices.shape)}"
            raise ValueError(
                "SparseMLA.apply: q must be [s_q, heads, d_qk], kv [s_kv, kv_group, d_qk] and indices"
                f" [s_q, kv_group, topk]; got {got}"
            )
        groups = kv.shape[1]
        if groups == 0 or q.shape[1] % groups or indices.shape[1] != groups:
            raise ValueError(
                "SparseMLA.apply: kv_group must divide the heads of q and be the same in kv and indices;"
                f" got {q.shape[1]} heads, {groups} groups of keys, {indices.shape[1]} of indices"
            )
        results = [
            ops.sparse_mla(heads, kv[:, group], indices[:, group], scaling, d_v)
            for group, heads in enumerate(q.chunk(groups, dim=1))
        ]
        out, lse = (torch.cat([result[i] for result in results], dim=1) for i in (0, 2))
        return out, lse.detach() / math.log(2)


def score_entries(q: Tensor, k: Tensor, weights: Tensor, indices: Tensor, start: Tensor, end: Tensor) -> Tensor:
    """Index scores of given entries, float32 [s_q, topk]: −inf where an entry is none or outside its query's keys."""
    s_q, topk = indices.shape
    at_a_time = max(1, (1 << 26) // max(topk * (k.shape[1] + q.shape[1]), 1))  # 256 MiB of float32
    scores = torch.full((s_q, topk), -torch.inf, device=q.device)
    counts = (indices >= start[:, None]) & (indices < end[:, None]) & (indices >= 0) & (indices < len(k))
    for first in range(0, s_q if len(k) else 0, at_a_time):
        rows = slice(first, first + at_a_time)
        keys = k[indices[rows].clamp(0, len(k) - 1).long()].float()
        dots = torch.einsum("sjd,sid->sji", q[rows].float(), keys).relu_()
        scores[rows] = torch.einsum("sji,sj->si", dots, weights[rows].float())
    return scores.masked_fill_(~counts, -torch.inf)


class _GivenScores(torch.autograd.Function):
    """The scores of entries that were chosen before."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, weights: Tensor, indices: Tensor, start: Tensor, end: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, weights, indices, start, end)
        return score_entries(q, k, weights, indices, start, end)

    @staticmethod
    def backward(ctx: Any, *d_scores: Tensor) -> tuple[Tensor | None, ...]:
        q, k, weights, indices, start, end = ctx.saved_tensors
        _, d_q, d_k, d_weights, _ = ops.lightning_indexer_backward(
            None, q, k, weights, indices, start, end, d_scores=d_scores[0].float()
        )
        return d_q, d_k.to(k.dtype), d_weights, None, None, None


def lighting_indexer(
    index_q: Tensor,
    index_k: Tensor,
    weights: Tensor,
    cu_seqlen_ks: Tensor,
    cu_seqlen_ke: Tensor,
    topk: int,
    topk_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The keys of largest index score Σ_j weights·relu(index_q·index_k), and these scores.

    index_q [s_q, h_index, d_index], index_k [s_kv, d_index], weights [s_q, h_index] or [s_q, h_index, 1]; each query
    sees the keys cu_seqlen_ks … cu_seqlen_ke − 1 (int32 [s_q]). With topk_indices int32 [s_q, topk] those are scored
    instead of chosen.

    Returns (scores float32 [s_q, topk], indices int32 [s_q, topk]): −inf and −1 where a query sees fewer keys. The
    scores are differentiable in index_q, index_k and weights.
    """
    weights = weights.squeeze(-1) if weights.ndim == 3 else weights
    start, end = cu_seqlen_ks.int(), cu_seqlen_ke.int()
    if topk_indices is not None:
        inputs = index_q, index_k, weights, topk_indices, start, end
        scores: Tensor = _GivenScores.apply(*inputs)  # type: ignore[no-untyped-call]
        return scores, topk_indices
    indices, scores = ops.lightning_indexer(index_q, index_k, weights, topk, k_start=start, k_end=end)
    return scores, indices.masked_fill(scores.detach() == -torch.inf, -1)


def generate_varlen_mask_params(cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """The keys that each token of a causal pack sees, from and up to: int32 [cu_seqlens[-1]] each."""
    return key_ranges(cu_seqlens)
