"""Decode attention over a paged KV cache."""

from typing import Any

import torch
from torch import Tensor

import hopwell

from ._register import exporting, no_gradient, operator

_attention = exporting(hopwell.paged_attention)


def _paged_attention_fake(q: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=torch.float32)


@operator("paged_attention", _paged_attention_fake)
def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    layout: str = "nhd",
    pos_bias_u: Tensor | None = None,
    bias: Tensor | None = None,
    bias_kind: str = "key",
    out_of_range: str = "zero",
    pre_scale: bool = True,
    pos_bias_v: Tensor | None = None,
    r: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    window: int | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of one or a few new tokens per sequence over a paged KV cache, with relative-position bias.

    q float32, float16 or bfloat16 [b, q_len, h_q, d] or [b, h_q, d]; the caches have q's dtype, and their shapes follow
    `layout` ("nhd": [blocks, block, h_kv, d]); block_tables int32 [b, max_blocks], context_lens int32 [b] with the
    query tokens included; the other arguments as in `hopwell.paged_attention`. Returns out like q, and lse float32 with
    q's shape without the last dimension. It has no gradients.
    """
    return _attention(**locals())


no_gradient("paged_attention")
