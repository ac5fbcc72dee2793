"""The attention of each selected key, summed over the heads."""

from typing import Unpack

import numpy as np

from ._arrays import Array, Tensor, as_float64, deliver, require, require_shape
from ._visible import Masks
from .normalize_l1 import normalize_l1
from .sparse_mla import _sink, select


def attention_distribution(
    q: Tensor,
    kv: Tensor,
    indices: Tensor | None,
    lse: Tensor,
    sm_scale: float,
    *,
    normalize: str = "none",
    indices_ascending: bool = False,
    attn_sink: Tensor | None = None,
    out: Array | None = None,
    **masks: Unpack[Masks],
) -> Array:
    """attn[s,i] = Σ_h exp(score[s,h,i] − lse[s,h]), [s_q, topk] in the order of `indices`; [s_q, s_kv] without them.

    Arguments as in `sparse_mla_forward`; lse [s_q, h_q] is its result, with or without window keys. With
    attn_sink [h_q] lse' = log(exp(lse) + exp(attn_sink)) is in lse's place. Invalid entries and empty rows (lse = +inf)
    are 0. `normalize="l1"` divides each row by its sum; rows of zeros stay zero. `indices_ascending` has no effect.
    """
    name = "attention_distribution"
    selection = select(name, q, kv, indices, sm_scale, **masks)
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
