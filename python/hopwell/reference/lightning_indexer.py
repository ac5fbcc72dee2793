"""The indexer of DeepSeek Sparse Attention."""

from typing import Unpack

import numpy as np
import numpy.typing as npt

from ._arrays import Float64, Tensor, as_array, as_float64, as_indices, describe, log_softmax, require, require_shape
from ._visible import Visibility, visible_keys


def _checked(operator: str, q_index: Tensor, k_index: Tensor, weights: Tensor) -> tuple[Float64, Float64, Float64]:
    q, k, w = as_float64(q_index), as_float64(k_index), as_float64(weights)
    require(q.ndim == 3, operator, "q_index", "[s_q, h_index, d_index]", describe(q))
    require(k.ndim == 2 and k.shape[1] == q.shape[2], operator, "k_index", f"[s_kv, {q.shape[2]}]", describe(k))
    require_shape(operator, "weights", w, "[s_q, h_index]", q.shape[:2])
    return q, k, w


@np.errstate(invalid="ignore")
def _scores(
    q: Float64, k: Float64, w: Float64, relu: bool = True, of_key: Float64 | float = 1.0
) -> tuple[Float64, Float64]:
    """One query's (index scores [n], dot products q·k [h_index, n]). A NaN score counts as −inf; relu(NaN) is NaN."""
    dot = q @ k.T
    score = w @ (np.maximum(dot, 0.0) if relu else dot)
    return np.where(np.isnan(of_key * score), -np.inf, of_key * score), dot


@np.errstate(invalid="ignore")
def _gradient(factor: float, g: Float64) -> Float64:
    """factor·g, the gradients of scores: numbers of fp32, NaN where they or the factor are not finite in it."""
    largest = np.finfo(np.float32).max
    return np.where((np.abs(factor * g) <= largest) & (abs(factor) <= largest), factor * g, np.nan)


def lightning_indexer(
    q_index: Tensor,
    k_index: Tensor,
    weights: Tensor,
    topk: int,
    *,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    relu: bool = True,
    **visibility: Unpack[Visibility],
) -> tuple[npt.NDArray[np.int32], Float64]:
    """The topk visible keys of largest index score, in ascending order of key.

        score[s,t] = k_scale[t]·Σ_j weights[s,j]·q_scale[s,j]·relu(q_index[s,j,:]·k_index[t,:])

    q_index [s_q, h_index, d_index]; k_index [s_kv, d_index]; weights [s_q, h_index]; q_positions, k_start and k_end
    int32 [s_q]; q_scale [s_q, h_index] and k_scale [s_kv], of float8_e4m3fn only, 1 where absent. Without `relu` the
    scores are k_scale·Σ_j w·q_scale·(q·k).
    Returns indices int32 [s_q, topk] and their scores [s_q, topk]. Of equal scores the smaller keys are taken. A key
    of score −inf (or NaN, which counts as −inf) is visible all the same: it is chosen after all others, and its score
    is −inf. Where fewer than topk keys are visible, the row ends in −1 with score −inf.
    """
    name = "lightning_indexer"
    q, k, w = _checked(name, q_index, k_index, weights)
    require(topk >= 0, name, "topk", "at least 0", topk)
    dtype = as_array(q_index).dtype.name
    for argument, scale in (("q_scale", q_scale), ("k_scale", k_scale)):
        require(scale is None or dtype == "float8_e4m3fn", name, argument, "absent without float8_e4m3fn", dtype)
    of_head = np.ones(w.shape) if q_scale is None else as_float64(q_scale)
    of_key = np.ones(len(k)) if k_scale is None else as_float64(k_scale)
    require_shape(name, "q_scale", of_head, "[s_q, h_index]", w.shape)
    require_shape(name, "k_scale", of_key, "[s_kv]", (len(k),))
    first, last = visible_keys(name, len(q), len(k), **visibility)
    with np.errstate(invalid="ignore"):
        w = w * of_head

    indices = np.full((len(q), topk), -1, dtype=np.int32)
    scores = np.full((len(q), topk), -np.inf)
    for s in range(len(q)):
        seen = slice(first[s], last[s])
        score, _ = _scores(q[s], k[seen], w[s], relu, of_key[seen])
        best_first = np.argsort(-score, kind="stable")  # stable: equal scores stay in ascending order of key
        chosen = np.sort(best_first[:topk])
        indices[s, : len(chosen)] = first[s] + chosen
        scores[s, : len(chosen)] = score[chosen]
    return indices, scores


def lightning_indexer_backward(
    target: Tensor | None,
    q_index: Tensor,
    k_index: Tensor,
    weights: Tensor,
    indices: Tensor,
    *,
    d_scores: Tensor | None = None,
    k_start: Tensor | None = None,
    k_end: Tensor | None = None,
    row_weights: Tensor | None = None,
    relu: bool = True,
    d_loss: float | Tensor = 1.0,
    row_loss: Float64 | None = None,
    deterministic: bool = False,
) -> tuple[np.float64 | None, Float64, Float64, Float64]:
    """KL loss of the indexer against the attention distribution, and its gradients; or those of another loss.

        prob = softmax over the valid entries of a row of score[s, indices[s,i]]
        row_loss[s] = Σ_i target·(log target − log prob)       (0·log 0 = 0)
        loss = Σ_s row_weights·row_loss
        g    = d_loss·row_weights·(prob − target), or d_loss·row_weights·d_scores; NaN beyond fp32's range
        d_weights[s,j]    = Σ_i g·relu(q·k)
        d_q_index[s,j,:]  = Σ_i g·w·1[q·k > 0]·k
        d_k_index[t,:]   += Σ_{s,j} g·w·1[q·k > 0]·q

    target [s_q, topk] as `attention_distribution(normalize="l1")` gives it (it is not normalised again); indices int32
    [s_q, topk] or [s_q, 1, topk]; an entry counts once for each time it occurs. d_scores [s_q, topk], with which target
    is None and there is no loss; row_weights [s_q], 1 where absent: a row of weight 0 adds nothing, whatever is in it.
    Without `relu` the scores are Σ_j w·(q·k), and the relu and 1[q·k > 0] below are absent. row_loss [s_q] is written
    where given. Returns (loss or None, d_q_index, d_k_index, d_weights); d_loss, a number or an array of one, scales
    the gradients, not the loss.

    An entry is valid if 0 ≤ t < s_kv, with key ranges (int32 [s_q]) also k_start[s] ≤ t < k_end[s], and its score is
    not −inf (nor NaN); what target holds for others is ignored.
    A row whose valid targets are all zero adds neither loss nor gradient. relu(q·k) and 1[q·k > 0] are factors like any
    other: where g is NaN (a target is NaN, or a score +inf), so are the loss, every head of the query's d_weights and
    d_q_index, and the key's d_k_index, heads with q·k ≤ 0 among them. A g beyond fp32's range does not change the loss.
    `deterministic` does not matter here.
    """
    name = "lightning_indexer_backward"
    q, k, w = _checked(name, q_index, k_index, weights)
    keys_of = as_indices(name, "indices", indices)
    if keys_of.ndim == 3 and keys_of.shape[1] == 1:
        keys_of = keys_of[:, 0]
    require(keys_of.ndim == 2 and len(keys_of) == len(q), name, "indices", f"[{len(q)}, topk]", describe(keys_of))
    require((target is None) != (d_scores is None), name, "target", "given, or d_scores, and not both", target)
    given_name, given = ("target", target) if target is not None else ("d_scores", d_scores)
    wanted = as_float64(given)  # type: ignore[arg-type]  # one of them is there
    require_shape(name, given_name, wanted, "[s_q, topk]", keys_of.shape)
    first, last = visible_keys(name, len(q), len(k), k_start=k_start, k_end=k_end)
    factor = float(np.asarray(d_loss).reshape(()))
    require(bool(np.isfinite(factor)) or hasattr(d_loss, "__dlpack__"), name, "d_loss", "finite", d_loss)
    of_row = np.ones(len(q)) if row_weights is None else as_float64(row_weights)
    require_shape(name, "row_weights", of_row, "[s_q]", (len(q),))

    losses = np.zeros(len(q))
    d_q, d_k, d_w = np.zeros(q.shape), np.zeros(k.shape), np.zeros(w.shape)
    for s in range(len(q)):
        entries = np.flatnonzero((keys_of[s] >= first[s]) & (keys_of[s] < last[s]))
        score, dot = _scores(q[s], k[keys_of[s, entries]], w[s], relu)
        counted = ~np.isneginf(score)
        entries, score, dot = entries[counted], score[counted], dot[:, counted]
        keys, p = keys_of[s, entries], wanted[s, entries]
        if not p.any():
            continue
        with np.errstate(invalid="ignore"):  # a NaN target; infinities times the gates' zeros
            if d_scores is None:
                log_prob = log_softmax(score)[2]
                some = p != 0.0
                losses[s] = (p[some] * (np.log(p[some]) - log_prob[some])).sum()
                g = np.exp(log_prob) - p  # [n]
            else:
                g = p
            if of_row[s] == 0.0:
                continue
            g = _gradient(factor * of_row[s], g)
            d_w[s] = (np.maximum(dot, 0.0) if relu else dot) @ g
            d_dot = g * w[s][:, None] * ((dot > 0.0) if relu else 1.0)  # [h_index, n]
            d_q[s] = d_dot @ k[keys]
            np.add.at(d_k, keys, d_dot.T @ q[s])
    if row_loss is not None:
        row_loss[:] = losses
    counts = of_row != 0.0
    loss = None if d_scores is not None else np.float64((of_row[counts] * losses[counts]).sum())
    return loss, d_q, d_k, d_w
