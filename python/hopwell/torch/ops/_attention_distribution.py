"""How much attention each selected key gets."""

from typing import Any

import torch
from torch import Tensor

import hopwell

from ._register import exporting, operator, stop_gradient

_distribution = exporting(hopwell.attention_distribution)


def _attention_distribution_fake(q: Tensor, kv: Tensor, indices: Tensor | None, **_: Any) -> Tensor:
    topk = kv.shape[0] if indices is None else indices.shape[-1]
    return q.new_empty((q.shape[0], topk), dtype=torch.float32)


@operator("attention_distribution", _attention_distribution_fake)
def attention_distribution(
    q: Tensor,
    kv: Tensor,
    indices: Tensor | None,
    lse: Tensor,
    sm_scale: float,
    topk_length: Tensor | None = None,
    q_positions: Tensor | None = None,
    q_start: int | None = None,
    kv_stride: int = 1,
    k_start: Tensor | None = None,
    k_end: Tensor | None = None,
    normalize: str = "none",
    backend: str | None = None,
    indices_ascending: bool = False,
    attn_sink: Tensor | None = None,
) -> Tensor:
    """Attention of each selected key, summed over the heads: float32 [s_q, topk]; without indices for all keys, [s_q,
    s_kv]. Carries no gradient.

    q, kv, indices and masks as in `sparse_mla`; lse, float32 [s_q, h_q], is its result, with or without window keys.
    attn_sink, float32 [h_q]: log(exp(lse) + exp(attn_sink)) is in lse's place. normalize "l1" divides each row by its
    sum (rows of zeros stay zero), "none" does not. indices_ascending: a hint, as in `sparse_mla`.
    """
    result: Tensor = _distribution(**locals())
    return result


stop_gradient("attention_distribution")
