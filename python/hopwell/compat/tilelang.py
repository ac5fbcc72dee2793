"""The TileLang kernels that Megatron-LM and the GLM-5 and DeepSeek-V4 plug-ins of slime and Miles call.

    from hopwell.compat.tilelang import SparseMLA, lighting_indexer    # instead of: from .ops.sparse_mla import …
    from hopwell.compat.tilelang import sparse_attn_tilelang           # DeepSeek-V4

`SparseMLA` and `lighting_indexer` are for GLM-5. They follow `slime_plugins/models/glm5` of github.com/THUDM/slime at
624b824, `miles_plugins/models/glm5` of github.com/radixark/miles at 31f1ca9 (which has `topk_backend`) and
`megatron/core/transformer/experimental_attention_variant/ops` of github.com/NVIDIA/Megatron-LM at d98e8a6 (which has
`use_relu` and a batch dimension of `SparseMLA`): their `ops/sparse_mla.py` and `ops/indexer.py`, whose kernels come
from TileLang's `examples/deepseek_v32`. These are the same as there: tokens are packed, entries of −1 are invalid, lse
is to base 2, V is the first 512 columns, the gradient of kv has kv's dtype, keys outside
cu_seqlen_ks … cu_seqlen_ke − 1 and keys with score −inf are not selected, and −1 and −inf fill the entries beyond the
number of keys.

Differences: `lighting_indexer` returns indices in ascending order and not by score (each index with its score); entries
outside the keys are invalid too; a query without keys gets out 0 and lse +inf instead of NaN; any number of heads and
of entries, any d_qk and strides, host tensors and fp32. If the caller passes `topk_indices`, PyTorch computes their
scores from gathered keys, some queries at a time: this needs more memory traffic than a selection and uses no kernel of
Hopwell.

`sparse_attn_tilelang`, `sparse_mqa_fwd_interface`, `v4_lighting_indexer` and `batched_indexer_fwd` are for DeepSeek-V4.
They follow `miles_plugins/models/deepseek_v4/ops/kernel` of Miles at 31f1ca9 (the model's `inference/kernel.py` calls
its `sparse_attn` with the same arguments) and `veomni/ops/kernels/deepseek_v4` of github.com/ByteDance-Seed/VeOmni,
which has bounds of keys in `v4_lighting_indexer` for packed documents (at 37f5947), `return_lse`, and the target of the
indexer's loss, `sparse_mqa_target_fwd_interface` (at 80ed943). Keys are values too, each head has a sink logit without
a value, and −1 is an invalid entry. In addition, Hopwell supports any number of heads, entries and d (512 on GPUs), any
strides, host tensors and fp32; entries outside the keys are invalid. Results have the same bits every time on the CPU,
and on GPUs with `torch.use_deterministic_algorithms`.
"""

import math
from typing import Any

import torch
from torch import Tensor

from hopwell.torch import ops
from hopwell.torch._packing import key_ranges

from .._checks import require, require_shape
from ._index_scores import as_int32, write_index_scores
from ._tensors import in_rows, with_zero_gradients

__all__ = [
    "SparseMLA",
    "batched_indexer_fwd",
    "generate_varlen_mask_params",
    "lighting_indexer",
    "sparse_attn_tilelang",
    "sparse_mqa_fwd_interface",
    "sparse_mqa_target_fwd_interface",
    "v4_lighting_indexer",
]


def _attend_with_sinks(
    function: str, q: Tensor, kv: Tensor, attn_sink: Tensor, topk_idxs: Tensor, sm_scale: float | None
) -> tuple[Tensor, Tensor]:
    """Returns out [b, s, heads, d], and lse [b, s, heads] without the sinks."""
    require_shape(function, "q", q, b=None, s=None, heads=None, d=None)
    b, s, heads, d = q.shape
    require_shape(function, "kv", kv, b=b, s_kv=None, d=d)
    require_shape(function, "attn_sink", attn_sink, heads=heads)
    require_shape(function, "topk_idxs", topk_idxs, b=b, s=s, topk=None)
    scale = d**-0.5 if sm_scale is None else sm_scale
    q, kv, attn_sink, topk_idxs = in_rows(q), in_rows(kv), in_rows(attn_sink), in_rows(topk_idxs)
    sequences = [ops.sparse_mla(q[i], kv[i], topk_idxs[i], scale, d, attn_sink=attn_sink) for i in range(b)]
    if b == 1:
        return sequences[0][0][None], sequences[0][2][None]
    if b == 0:
        return with_zero_gradients(q.clone(), kv, attn_sink), q.new_empty(q.shape[:3], dtype=torch.float32)
    return torch.stack([out for out, _, _ in sequences]), torch.stack([lse for _, _, lse in sequences])


def _with_sink(lse: Tensor, attn_sink: Tensor) -> Tensor:
    """Adds the sink to the lse of the keys and converts it to base 2."""
    return torch.logaddexp(lse.masked_fill(lse == torch.inf, -torch.inf), attn_sink.detach().float()) / math.log(2)


def sparse_attn_tilelang(
    q: Tensor,
    kv: Tensor,
    attn_sink: Tensor,
    topk_idxs: Tensor,
    sm_scale: float | None = None,
    return_lse: bool = False,
) -> Any:
    """Sparse attention with sinks, differentiable in q, kv and attn_sink.

    q [b, s, heads, d], kv [b, s_kv, d], attn_sink float32 [heads], topk_idxs int32 [b, s, topk]; sm_scale is 1/√d if
    None. Returns out [b, s, heads, d] in q's dtype. With return_lse it returns (out, lse): lse float32 [b, s, heads]
    includes the sink, is to base 2 and has no gradient.
    """
    out, lse = _attend_with_sinks("sparse_attn_tilelang", q, kv, attn_sink, topk_idxs, sm_scale)
    return (out, _with_sink(lse, attn_sink)) if return_lse else out


@torch.no_grad()
def sparse_mqa_fwd_interface(
    q: Tensor,
    kv: Tensor,
    attn_sink: Tensor,
    topk_idxs: Tensor,
    sm_scale: float | None = None,
    block_I: int = 64,  # noqa: N803
    num_stages: int = 2,
    threads: int = 256,
) -> tuple[Tensor, Tensor]:
    """`sparse_attn_tilelang` without gradients: out, and lse float32 [b, s, heads] with the sink, to base 2."""
    out, lse = _attend_with_sinks("sparse_mqa_fwd_interface", q, kv, attn_sink, topk_idxs, sm_scale)
    return out, _with_sink(lse, attn_sink)


@torch.no_grad()
def sparse_mqa_target_fwd_interface(
    q: Tensor,
    kv: Tensor,
    topk_idxs: Tensor,
    lse: Tensor,
    sm_scale: float | None = None,
    block_I: int = 64,  # noqa: N803
    threads: int = 256,
) -> Tensor:
    """Attention of each entry, summed over the heads: float32 [b, s, n], 0 for an invalid entry.

    q, kv and sm_scale as in `sparse_attn_tilelang`; lse is the result of that call. topk_idxs int32 [b, s, n] may be a
    subset of the entries of that call.
    """
    function = "sparse_mqa_target_fwd_interface"
    require_shape(function, "q", q, b=None, s=None, heads=None, d=None)
    b, s, heads, d = q.shape
    require_shape(function, "kv", kv, b=b, s_kv=None, d=d)
    require_shape(function, "topk_idxs", topk_idxs, b=b, s=s, n=None)
    require_shape(function, "lse", lse, b=b, s=s, heads=heads)
    target = q.new_empty(topk_idxs.shape, dtype=torch.float32)
    q, kv, topk_idxs, lse = in_rows(q), in_rows(kv), in_rows(topk_idxs), in_rows(lse * math.log(2))
    for i in range(b):
        scale = d**-0.5 if sm_scale is None else sm_scale
        target[i] = ops.attention_distribution(q[i], kv[i], topk_idxs[i], lse[i], scale)
    return target


class SparseMLA:
    """Sparse attention in the multi-query form of MLA, differentiable in q and kv."""

    @staticmethod
    def apply(q: Tensor, kv: Tensor, indices: Tensor, scaling: float, d_v: int = 512) -> tuple[Tensor, Tensor]:
        """q [s_q, heads, d_qk], kv [s_kv, kv_group, d_qk], indices int32 [s_q, kv_group, topk].

        Returns (out [s_q, heads, d_v] in q's dtype, lse float32 [s_q, heads], to base 2 and without a gradient). The
        heads of a group are adjacent. All tensors may have a batch dimension in front.
        """
        if q.ndim == kv.ndim == indices.ndim == 4 and len(q) == len(kv) == len(indices) == 0:
            out = with_zero_gradients(q.new_empty((*q.shape[:3], d_v)), q, kv)
            return out, q.new_empty(q.shape[:3], dtype=torch.float32)
        if q.ndim == kv.ndim == indices.ndim == 4 and len(q) == len(kv) == len(indices):
            outs, sums = zip(
                *(SparseMLA.apply(*x, scaling, d_v) for x in zip(q, kv, indices, strict=True)), strict=True
            )
            return torch.stack(outs), torch.stack(sums)
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
        q, kv, indices = in_rows(q), in_rows(kv), in_rows(indices)
        results = [
            ops.sparse_mla(heads, kv[:, group], indices[:, group], scaling, d_v)
            for group, heads in enumerate(q.chunk(groups, dim=1))
        ]
        out, lse = (torch.cat([result[i] for result in results], dim=1) for i in (0, 2))
        return out, lse.detach() / math.log(2)


def lighting_indexer(
    index_q: Tensor,
    index_k: Tensor,
    weights: Tensor,
    cu_seqlen_ks: Tensor,
    cu_seqlen_ke: Tensor,
    topk: int,
    topk_indices: Tensor | None = None,
    use_relu: bool = True,
    *,
    topk_backend: str = "torch",
) -> tuple[Tensor, Tensor]:
    """Selects the keys with the largest index score Σ_j weights·relu(index_q·index_k), and returns these scores.

    index_q [s_q, h_index, d_index], index_k [s_kv, d_index], weights [s_q, h_index] or [s_q, h_index, 1]; each query
    sees the keys cu_seqlen_ks … cu_seqlen_ke − 1 (int32 [s_q]). With topk_indices int32 [s_q, topk] it scores these
    keys and selects none. topk_backend "torch" or "flashinfer" chooses an implementation in Miles; here both are the
    same.

    Returns (scores float32 [s_q, topk], indices int32 [s_q, topk]): −inf and −1 if a query sees fewer keys. The
    scores are differentiable in index_q, index_k and weights.
    """
    known = topk_backend in ("torch", "flashinfer")
    require(known, "lighting_indexer", "topk_backend", "torch or flashinfer", topk_backend)
    weights = weights.squeeze(-1) if weights.ndim == 3 else weights
    require_shape("lighting_indexer", "index_q", index_q, s_q=None, h_index=None, d_index=None)
    require_shape("lighting_indexer", "weights", weights, s_q=len(index_q), h_index=index_q.shape[1])
    start, end = (as_int32(bound, len(index_k)) for bound in (cu_seqlen_ks, cu_seqlen_ke))
    index_q, index_k, weights = in_rows(index_q), in_rows(index_k), in_rows(weights)
    if topk_indices is None:
        options: dict[str, Any] = {"k_start": start, "k_end": end, "relu": use_relu}
        indices, scores = ops.lightning_indexer(index_q, index_k, weights, topk, **options)
        return scores, indices.masked_fill(scores.detach() == -torch.inf, -1)
    scores = ops.indexer_scores(index_q, index_k, weights, in_rows(topk_indices), start, end, use_relu)
    return scores, topk_indices


@torch.no_grad()
def batched_indexer_fwd(q: Tensor, k: Tensor, weights: Tensor, cu_seqlen_ks: Tensor, cu_seqlen_ke: Tensor) -> Tensor:
    """Index scores of all keys, float32 [b, s, s_kv], −inf outside cu_seqlen_ks … cu_seqlen_ke − 1 (int32 [s]).

    q [s, b, h_index, d_index], k [s_kv, b, d_index], weights [s, b, h_index].
    """
    function = "batched_indexer_fwd"
    require_shape(function, "q", q, s=None, b=None, h_index=None, d_index=None)
    s, b, heads, d = q.shape
    require_shape(function, "k", k, s_kv=None, b=b, d_index=d)
    require_shape(function, "weights", weights, s=s, b=b, h_index=heads)
    scores = q.new_empty((b, s, len(k)), dtype=torch.float32)
    bounds = [as_int32(bound, len(k)) for bound in (cu_seqlen_ks, cu_seqlen_ke)]
    for i, of_sequence in enumerate(scores):
        write_index_scores(of_sequence, q[:, i], k[:, i], weights[:, i], *bounds)
    return scores


def v4_lighting_indexer(
    index_q: Tensor,
    index_k: Tensor,
    weights: Tensor,
    compress_ratio: int,
    topk: int,
    topk_indices: Tensor | None = None,
    cu_seqlen_ks: Tensor | None = None,
    cu_seqlen_ke: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`lighting_indexer` for sequences whose key t represents compress_ratio tokens. A query sees a key after the last
    of its tokens.

    index_q [s, b, h_index, d_index], index_k [s_kv, b, d_index], weights [s, b, h_index], topk_indices int32
    [b, s, topk]. If cu_seqlen_ks and cu_seqlen_ke int32 [s] are given, as for packed documents, they bound the keys
    that each query sees. Returns (scores float32, indices int32) [b, s, min(topk, s_kv)], the largest score first, of
    equal scores the smaller index first.
    """
    require_shape("v4_lighting_indexer", "index_q", index_q, s=None, b=None, h_index=None, d_index=None)
    s, b = index_q.shape[:2]
    require_shape("v4_lighting_indexer", "index_k", index_k, s_kv=None, b=b, d_index=index_q.shape[3])
    weights = weights.squeeze(-1) if weights.ndim == 4 else weights
    require_shape("v4_lighting_indexer", "weights", weights, s=s, b=b, h_index=index_q.shape[2])
    if topk_indices is not None:
        require_shape("v4_lighting_indexer", "topk_indices", topk_indices, b=b, s=s, topk=None)
    if compress_ratio < 1:
        raise ValueError(f"v4_lighting_indexer: compress_ratio must be at least 1; got {compress_ratio}")
    both = (cu_seqlen_ks is None) == (cu_seqlen_ke is None)
    require(both, "v4_lighting_indexer", "cu_seqlen_ks and cu_seqlen_ke", "given together", "one of them")
    if cu_seqlen_ks is None or cu_seqlen_ke is None:
        cu_seqlen_ke = (torch.arange(1, s + 1, device=index_q.device) // compress_ratio).int()
        cu_seqlen_ks = torch.zeros_like(cu_seqlen_ke)
    count = min(topk, len(index_k))
    if b == 0:
        empty = index_q.new_empty((0, s, count), dtype=torch.float32)
        return with_zero_gradients(empty, index_q, index_k, weights), empty.int()
    sequences = [
        lighting_indexer(
            *(index_q[:, i], index_k[:, i], weights[:, i], cu_seqlen_ks, cu_seqlen_ke, count),
            None if topk_indices is None else topk_indices[i],
        )
        for i in range(b)
    ]
    scores, indices = (torch.stack(of_all) for of_all in zip(*sequences, strict=True))
    if topk_indices is not None:
        return scores, indices
    by_score = scores.detach().argsort(dim=-1, descending=True, stable=True)
    return scores.gather(-1, by_score), indices.gather(-1, by_score)


def generate_varlen_mask_params(cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """The bounds of the keys that each token of a causal pack sees (first, last + 1): int32 [cu_seqlens[-1]] each."""
    return key_ranges(cu_seqlens)
