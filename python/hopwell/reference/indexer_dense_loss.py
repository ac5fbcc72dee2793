"""The indexer's loss over every visible key."""

from typing import Unpack

import numpy as np

from ._arrays import Float64, Tensor, as_float64, log_softmax, require, require_shape
from ._visible import Visibility, visible_keys
from .lightning_indexer import _checked, _gradient, _scores
from .sparse_mla import _sink, select


def indexer_dense_loss(
    q: Tensor,
    kv: Tensor,
    lse: Tensor,
    q_index: Tensor,
    k_index: Tensor,
    weights: Tensor,
    sm_scale: float,
    *,
    row_weights: Tensor | None = None,
    relu: bool = True,
    d_loss: float | Tensor = 1.0,
    row_loss: Float64 | None = None,
    deterministic: bool = False,
    attn_sink: Tensor | None = None,
    normalize: str = "heads",
    **visibility: Unpack[Visibility],
) -> tuple[np.float64, Float64, Float64, Float64]:
    """KL loss of the indexer against the attention of all heads to every visible key, and its gradients.

        target[s,t] = Σ_h exp(score[s,h,t] − lse[s,h]) / h_q        over visible t; score as in `sparse_mla_forward`
        row_loss[s] = Σ_t target·(log target − log softmax of the index scores)          (0·log 0 = 0)
        loss        = Σ_s row_weights·row_loss
        g           = d_loss·row_weights·(softmax − target)

    With attn_sink [h_q] lse' = log(exp(lse) + exp(attn_sink)) is in lse's place. `normalize="l1"` divides each row of
    the target by its sum over the visible keys instead of h_q.

    The gradients are of g, as in `lightning_indexer_backward`, whose rules hold for scores of −inf, all-zero targets,
    rows of weight 0 and NaN. q [s_q, h_q, d_qk]; kv [s_kv, d_qk] or [s_kv, 1, d_qk]; lse [s_q, h_q]; q_index [s_q,
    h_index, d_index]; k_index [s_kv, d_index]; weights [s_q, h_index]. Returns (loss, d_q_index, d_k_index, d_weights).
    """
    name = "indexer_dense_loss"
    attention = select(name, q, kv, None, sm_scale, **visibility)
    s_q, h_q, _ = attention.q.shape
    row_lse = as_float64(lse)
    require_shape(name, "lse", row_lse, "[s_q, h_q]", (s_q, h_q))
    require(normalize in ("heads", "l1"), name, "normalize", "heads or l1", normalize)
    with np.errstate(invalid="ignore"):
        row_lse = np.where(np.isposinf(row_lse), np.inf, np.logaddexp(row_lse, _sink(name, attn_sink, h_q)))
    queries, keys, w = _checked(name, q_index, k_index, weights)
    require(len(queries) == s_q, name, "q_index", f"[{s_q}, h_index, d_index]", list(queries.shape))
    require(len(keys) == len(attention.kv), name, "k_index", f"[{len(attention.kv)}, d_index]", list(keys.shape))
    first, last = visible_keys(name, s_q, len(keys), **visibility)
    factor = float(np.asarray(d_loss).reshape(()))
    require(bool(np.isfinite(factor)) or hasattr(d_loss, "__dlpack__"), name, "d_loss", "finite", d_loss)
    of_row = np.ones(s_q) if row_weights is None else as_float64(row_weights)
    require_shape(name, "row_weights", of_row, "[s_q]", (s_q,))

    losses = np.zeros(s_q)
    d_q, d_k, d_w = np.zeros(queries.shape), np.zeros(keys.shape), np.zeros(w.shape)
    for s in range(s_q):
        _, visible, _, attention_score = attention.row(s)
        target = np.exp(attention_score - row_lse[s][:, None]).sum(axis=0)
        target = target / (h_q if normalize == "heads" else target.sum() or 1.0)
        score, dot = _scores(queries[s], keys[first[s] : max(first[s], last[s])], w[s], relu)
        counted = ~np.isneginf(score)
        visible, target, score, dot = visible[counted], target[counted], score[counted], dot[:, counted]
        if not target.any():
            continue
        with np.errstate(invalid="ignore", divide="ignore"):
            log_prob = log_softmax(score)[2]
            losses[s] = np.where(target == 0.0, 0.0, target * (np.log(target) - log_prob)).sum()
            if of_row[s] == 0.0:
                continue
            g = _gradient(factor * of_row[s], np.exp(log_prob) - target)
            d_w[s] = (np.maximum(dot, 0.0) if relu else dot) @ g
            d_dot = g * w[s][:, None] * ((dot > 0.0) if relu else 1.0)
            d_q[s] = d_dot @ keys[visible]
            d_k[visible] += d_dot.T @ queries[s]
    if row_loss is not None:
        row_loss[:] = losses
    counts = of_row != 0.0
    return np.float64((of_row[counts] * losses[counts]).sum()), d_q, d_k, d_w
