"""Index scores of entries that are given."""

from typing import Any

import torch
from torch import Tensor

from hopwell._checks import require, require_one_device, require_shape

from ._lightning_indexer import index_gradients
from ._register import Named, NamedGradients, contiguous_rows, differentiable, operator

_PRODUCTS_AT_A_TIME = 1 << 26  # 256 MiB of float32


def _check(
    q_index: Tensor, k_index: Tensor, weights: Tensor, indices: Tensor, k_start: Tensor | None, k_end: Tensor | None
) -> None:
    """What the gradient's operator takes, said before there is one."""
    name, kinds = "indexer_scores", (torch.bfloat16, torch.float32)
    tensors = {"q_index": q_index, "k_index": k_index, "weights": weights, "indices": indices}
    require_one_device(name, **tensors, k_start=k_start, k_end=k_end)
    require(q_index.dtype in kinds, name, "q_index", "bfloat16 or float32", q_index.dtype)
    require(k_index.dtype == q_index.dtype, name, "k_index", f"{q_index.dtype} as q_index is", k_index.dtype)
    require(weights.dtype in kinds, name, "weights", "bfloat16 or float32", weights.dtype)
    require_shape(name, "q_index", q_index, s_q=None, h_index=None, d_index=None)
    s_q, h_index, d_index = q_index.shape
    require_shape(name, "k_index", k_index, s_kv=None, d_index=d_index)
    require_shape(name, "weights", weights, s_q=s_q, h_index=h_index)
    require(indices.dtype == torch.int32, name, "indices", "int32", indices.dtype)
    require_shape(name, "indices", indices, s_q=s_q, topk=None)
    require((k_start is None) == (k_end is None), name, "k_start and k_end", "given together", "one of them")
    for argument, bound in (("k_start", k_start), ("k_end", k_end)):
        if bound is not None:
            require(bound.dtype == torch.int32, name, argument, "int32", bound.dtype)
            require_shape(name, argument, bound, s_q=s_q)


def _indexer_scores_fake(q_index: Tensor, indices: Tensor, **_: Any) -> Tensor:
    return q_index.new_empty(indices.shape, dtype=torch.float32)


@operator("indexer_scores", _indexer_scores_fake)
def indexer_scores(
    q_index: Tensor,
    k_index: Tensor,
    weights: Tensor,
    indices: Tensor,
    k_start: Tensor | None = None,
    k_end: Tensor | None = None,
    relu: bool = True,
    deterministic: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Σ_j weights[s, j]·relu(q_index[s, j]·k_index[t]) of entries t = indices[s, i] that were chosen before: float32
    [s_q, topk], −inf where an entry is outside the keys or, with k_start and k_end, outside the query's.
    Differentiable in q_index, k_index and weights.

    Shapes and relu as in `lightning_indexer_backward`, whose gradients these scores have (on `backend`, and with
    `deterministic` the same bits every time). The scores themselves are made by PyTorch, some queries at a time, from
    gathered keys: more memory traffic than a selection, whose scores `lightning_indexer` returns.
    """
    _check(q_index, k_index, weights, indices, k_start, k_end)
    s_q, topk = indices.shape
    scores = q_index.new_full((s_q, topk), -torch.inf, dtype=torch.float32)
    counts = (indices >= 0) & (indices < len(k_index))
    if k_start is not None and k_end is not None:
        counts &= (indices >= k_start[:, None]) & (indices < k_end[:, None])
    at_a_time = max(1, _PRODUCTS_AT_A_TIME // max(topk * (k_index.shape[1] + q_index.shape[1]), 1))
    for first in range(0, s_q if len(k_index) else 0, at_a_time):
        rows = slice(first, first + at_a_time)
        keys = k_index[indices[rows].clamp(0, len(k_index) - 1).long()].float()
        dots = torch.einsum("sjd,sid->sji", q_index[rows].float(), keys)
        scores[rows] = torch.einsum("sji,sj->si", dots.relu_() if relu else dots, weights[rows].float())
    return scores.masked_fill_(~counts, -torch.inf)


def _differentiate(given: Named, _: set[str], d_scores: Tensor) -> NamedGradients:
    return index_gradients(None, d_scores=contiguous_rows(d_scores), **given)


differentiable("indexer_scores", _differentiate, lambda given, _: given)
