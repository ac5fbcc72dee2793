"""Decode over paged caches of latents."""

from typing import Any

import torch
from torch import Tensor

import hopwell

from ._register import arguments_of, exporting, no_gradient, operator, tensor_or_number

_hopwell_decode = exporting(hopwell.sparse_mla_decode)


def _decode_fake(q: Tensor, d_v: int, **_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty((*q.shape[:-1], d_v)), q.new_empty(q.shape[:-1], dtype=torch.float32)


@operator("sparse_mla_decode", _decode_fake)
@arguments_of(hopwell.sparse_mla_decode, "out", "lse", kv_scale=Tensor | None, kv_scale_value=float | None)
def _decode(kv_scale: Tensor | None, kv_scale_value: float | None, **given: Any) -> tuple[Tensor, Tensor]:
    out, lse = _hopwell_decode(kv_scale=kv_scale_value if kv_scale is None else kv_scale, **given)
    return out, lse


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
    return _decode(**tensor_or_number("kv_scale", locals()))
