"""The indexer of decode, over a paged cache of index keys."""

from typing import Any

import torch
from torch import Tensor

import hopwell
from hopwell._arrays import check_size

from ._register import arguments_of, exporting, no_gradient, operator

_hopwell_indexer = exporting(hopwell.paged_lightning_indexer)


def _fake(q_index: Tensor, topk: int, without_scores: bool, **_: Any) -> tuple[Tensor, Tensor]:
    if isinstance(topk, int):  # not a symbolic size
        check_size("paged_lightning_indexer", "topk", topk)
    rows = q_index.shape[:-2]
    scores = q_index.new_empty((0,) if without_scores else (*rows, topk), dtype=torch.float32)
    return q_index.new_empty((*rows, topk), dtype=torch.int32), scores


@operator("paged_lightning_indexer", _fake)
@arguments_of(hopwell.paged_lightning_indexer, "indices", "scores", "lengths", without_scores=bool)
def _indexer(q_index: Tensor, without_scores: bool, **given: Any) -> tuple[Tensor, Tensor]:
    """An op cannot return None, so scores that were not requested are an empty tensor here."""
    indices, scores = _hopwell_indexer(q_index=q_index, scores=False if without_scores else None, **given)
    return indices, q_index.new_empty((0,), dtype=torch.float32) if scores is None else scores


no_gradient("paged_lightning_indexer")


def paged_lightning_indexer(
    q_index: Tensor,
    cache: Tensor,
    weights: Tensor,
    topk: int,
    block_tables: Tensor,
    context_lens: Tensor,
    *,
    q_scale: Tensor | None = None,
    relu: bool = True,
    slots: bool = False,
    scores: bool | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Selects the topk visible positions of largest index score over a paged cache of index keys.

    `hopwell.paged_lightning_indexer` has the same arguments. Returns indices int32 [b, q_len, topk], scores float32 of
    that shape, or None if `scores` is False; without q_len for a q_index [b, h_index, d_index]. It has no gradients.
    """
    without_scores = scores is False
    options = {"q_scale": q_scale, "relu": relu, "slots": slots, "without_scores": without_scores, "backend": backend}
    indices, values = _indexer(q_index, cache, weights, topk, block_tables, context_lens, **options)
    return indices, None if without_scores else values
