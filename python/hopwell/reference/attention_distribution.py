"""The attention of each selected key, summed over the heads."""

import numpy as np

from ._arrays import Array, Tensor, as_float64, deliver, require, require_shape
from .normalize_l1 import normalize_l1
from .sparse_mla import _sink, select


def attention_distribution(
    q: Tensor,
    kv: Tensor,
    indices: Tensor | None,
    lse: Tensor,
    sm_scale: float,
    *,
    topk_length: Tensor | None = None,
    q_positions: Tensor | None = None,
    q_start: int | None = None,
    kv_stride: int = 1,
    k_start: Tensor | None = None,
    k_end: Tensor | None = None,
    normalize: str = "none",
    indices_ascending: bool = False,
    attn_sink: Tensor | None = None,
    out: Array | None = None,
) -> Array:
    """attn[s,i] = Σ_h exp(score[s,h,i] − lse[s,h]), [s_q, topk] in the order of `indices`; [s_q, s_kv] without them.

    Arguments as in `sparse_mla_forward`; lse [s_q, h_q] is its result, with or without window keys. With
    attn_sink [h_q] lse' = log(exp(lse) + exp(attn_sink)) is in lse's place. Invalid entries and empty rows (lse = +inf)
    are 0. `normalize="l1"` divides each row by its sum; rows of zeros stay zero. `indices_ascending` has no effect.
    """
    name = "attention_distribution"
    selection = select(name, q, kv, indices, sm_scale, topk_length, q_positions, q_start, kv_stride, k_start, k_end)
    s_q, h_q, _ = selection.q.shape
    row_lse = as_float64(lse)
    require_shape(name, "lse", row_lse, "[s_q, h_q]", (s_q, h_q))
    require(normalize in ("none", "l1"), name, "normalize", "none or l1", normalize)

    with np.errstate(invalid="ignore"):
        row_lse = np.where(np.isposinf(row_lse), np.inf, np.logaddexp(row_lse, _sink(name, attn_sink, h_q)))

    attn = np.zeros(selection.indices.shape)
    for s in range(s_q):
        entries, _, _, score = selection.row(s)
        attn[s, entries] = np.exp(score - row_lse[s][:, None]).sum(axis=0)
    return deliver(name, "out", normalize_l1(attn) if normalize == "l1" else attn, out)
