"""The indexer of decode, over a paged cache of index keys."""

from typing import Any

import torch
from torch import Tensor

import hopwell
from hopwell._arrays import check_size

from ._register import exporting, no_gradient, operator

_hopwell_indexer = exporting(hopwell.paged_lightning_indexer)


def _fake(q_index: Tensor, topk: int, need_scores: bool, **_: Any) -> tuple[Tensor, Tensor]:
    if isinstance(topk, int):  # not a symbolic size
        check_size("paged_lightning_indexer", "topk", topk)
    rows = q_index.shape[:-2]
    scores = q_index.new_empty((*rows, topk) if need_scores else (0,), dtype=torch.float32)
    return q_index.new_empty((*rows, topk), dtype=torch.int32), scores


@operator("paged_lightning_indexer", _fake)
def _indexer(
    q_index: Tensor,
    cache: Tensor,
    weights: Tensor,
    topk: int,
    block_tables: Tensor,
    context_lens: Tensor,
    q_scale: Tensor | None = None,
    relu: bool = True,
    slots: bool = False,
    need_scores: bool = True,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    indices, scores = _hopwell_indexer(
        *(q_index, cache, weights, topk, block_tables, context_lens),
        q_scale=q_scale,
        relu=relu,
        slots=slots,
        scores=None if need_scores else False,
        backend=backend,
    )
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
    need_scores = scores is not False
    options = q_scale, relu, slots, need_scores, backend
    indices, values = _indexer(q_index, cache, weights, topk, block_tables, context_lens, *options)
    return indices, values if need_scores else None
