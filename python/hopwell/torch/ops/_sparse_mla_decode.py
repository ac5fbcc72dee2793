"""Decode over paged caches of latents."""

from typing import Any

import torch
from torch import Tensor

import hopwell

from ._register import exporting, no_gradient, operator

_hopwell_decode = exporting(hopwell.sparse_mla_decode)


def _decode_fake(q: Tensor, d_v: int, **_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty((*q.shape[:-1], d_v)), q.new_empty(q.shape[:-1], dtype=torch.float32)


# kv_scale is a tensor, or with kv_scale_value a number: an op's argument has one type.
@operator("sparse_mla_decode", _decode_fake)
def _decode(
    q: Tensor,
    cache: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = 512,
    block_tables: Tensor | None = None,
    context_lens: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_cache: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    extra_block_tables: Tensor | None = None,
    attn_sink: Tensor | None = None,
    kv_scale: Tensor | None = None,
    kv_scale_value: float | None = None,
    rope_cache: Tensor | None = None,
    keys_per_split: int = 256,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    return _hopwell_decode(
        *(q, cache, indices, sm_scale, d_v),
        block_tables=block_tables,
        context_lens=context_lens,
        topk_length=topk_length,
        extra_cache=extra_cache,
        extra_indices=extra_indices,
        extra_topk_length=extra_topk_length,
        extra_block_tables=extra_block_tables,
        attn_sink=attn_sink,
        kv_scale=kv_scale_value if kv_scale is None else kv_scale,
        rope_cache=rope_cache,
        keys_per_split=keys_per_split,
        backend=backend,
    )


no_gradient("sparse_mla_decode")


def sparse_mla_decode(
    q: Tensor,
    cache: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = 512,
    *,
    block_tables: Tensor | None = None,
    context_lens: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_cache: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    extra_block_tables: Tensor | None = None,
    attn_sink: Tensor | None = None,
    kv_scale: float | Tensor | None = None,
    rope_cache: Tensor | None = None,
    keys_per_split: int = 256,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of one or a few query tokens a sequence over selected rows of paged caches of latents.

    `hopwell.sparse_mla_decode` has the same arguments. Returns out, with q's dtype and d_v columns, and lse float32
    with q's shape without the last dimension. It has no gradients.
    """
    array, number = (kv_scale, None) if isinstance(kv_scale, Tensor) else (None, kv_scale)
    extra = extra_cache, extra_indices, extra_topk_length, extra_block_tables
    selection = block_tables, context_lens, topk_length
    return _decode(
        *(q, cache, indices, sm_scale, d_v),
        *selection,
        *extra,
        attn_sink,
        array,
        number,
        rope_cache,
        keys_per_split,
        backend,
    )
