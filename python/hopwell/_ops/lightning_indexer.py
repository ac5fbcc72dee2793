"""The indexer's selection, and its losses with their gradients."""

from typing import Any

from .. import _hopwell
from .._arrays import Array, Outputs, check_topk, dims


def lightning_indexer(
    q_index: Array,
    k_index: Array,
    weights: Array,
    topk: int,
    *,
    q_scale: Array | None = None,
    k_scale: Array | None = None,
    q_positions: Array | None = None,
    q_start: int | None = None,
    kv_stride: int = 1,
    k_start: Array | None = None,
    k_end: Array | None = None,
    relu: bool = True,
    backend: str | None = None,
    stream: Any = None,
) -> tuple[Array, Array]:
    """The topk visible keys of largest index score (DeepSeek Sparse Attention), in ascending order of key.

        score[s,t] = k_scale[t]·Σ_j weights[s,j]·q_scale[s,j]·relu(q_index[s,j,:]·k_index[t,:])

    The scores of all keys are never stored. Of equal scores the smaller keys are taken; a NaN score counts as −inf,
    and a key of score −inf is taken only where nothing better is left.

    Args:
        q_index: bf16, fp32 or float8_e4m3fn [s_q, h_index, d_index].
        k_index: like q_index, [s_kv, d_index].
        weights: fp32 or bf16 [s_q, h_index], any sign.
        topk: keys a query, 0 … 2³¹ − 1.
        q_scale, k_scale: fp32 [s_q, h_index] and [s_kv], of float8_e4m3fn only; 1 where None. Any values: the relu is
            that of the codes' product, so that a negative scale turns a head's or a key's sign.
        q_positions, q_start, kv_stride, k_start, k_end: causal masking and key ranges, as in `sparse_mla_forward`.
        relu: False for score[s,t] = k_scale·Σ_j weights·q_scale·(q·k), the scores of a loss without the relu.
        backend, stream: as in `sparse_mla_forward`.

    Returns:
        (indices int32 [s_q, topk], scores fp32 [s_q, topk]); −1 and −inf at the end of rows that see fewer keys.
    """
    name = "lightning_indexer"
    outputs = Outputs(name, "q_index", q_index)
    shape = (dims(q_index, 3)[0], check_topk(name, topk))
    indices, scores = outputs.new(shape, "int32"), outputs.new(shape, "float32")
    _hopwell.lightning_indexer(
        q_index, k_index, weights, q_scale, k_scale, q_positions, q_start, kv_stride, k_start, k_end, relu, indices,
        scores, backend, stream,
    )  # fmt: skip
    return outputs.native(indices, scores)


def _gradients(outputs: Outputs, q_index: Array, k_index: Array, weights: Array) -> tuple[Array, Array, Array]:
    """New d_q_index, d_k_index and d_weights."""
    return (
        outputs.new(dims(q_index, 3), getattr(q_index, "dtype", "float32")),
        outputs.new(dims(k_index, 2), "float32"),
        outputs.new(dims(weights, 2), getattr(weights, "dtype", "float32")),
    )


def lightning_indexer_backward(
    target: Array | None,
    q_index: Array,
    k_index: Array,
    weights: Array,
    indices: Array,
    *,
    d_scores: Array | None = None,
    k_start: Array | None = None,
    k_end: Array | None = None,
    row_weights: Array | None = None,
    relu: bool = True,
    d_loss: float | Array = 1.0,
    row_loss: Array | None = None,
    deterministic: bool = False,
    backend: str | None = None,
    stream: Any = None,
) -> tuple[Array | None, Array, Array, Array]:
    """The indexer's loss against the attention distribution, and its gradients; or the gradients of any other loss.

        row_loss = KL(target[s,:] ‖ softmax over the selected entries of score[s,:]);  loss = Σ_s row_weights·row_loss
        g        = d_loss·row_weights·(softmax − target), or d_loss·row_weights·d_scores; NaN beyond fp32's range
        d_weights = Σ_i g·relu(q·k);  d_q_index = Σ_i g·w·1[q·k > 0]·k;  d_k_index[t] += Σ g·w·1[q·k > 0]·q

    Args:
        target: fp32 [s_q, topk], what `attention_distribution(..., normalize="l1")` returns for these indices; None
            where d_scores is given.
        q_index, k_index, weights: as in `lightning_indexer`, but not float8_e4m3fn.
        indices: int32 [s_q, topk]; entries outside [0, s_kv) are invalid, those that occur twice count twice.
        d_scores: fp32 [s_q, topk] in place of the target: the gradient of a loss of your own with respect to the
            entries' scores. Those of entries without a score are ignored; infinities count as NaN.
        k_start, k_end: int32 [s_q], given together: entries outside k_start[s] … k_end[s] − 1 are invalid, too.
        row_weights: fp32 [s_q], factors of each row's loss and gradient. A row of weight 0 adds nothing, whatever is in
            it.
        relu: False for score[s,t] = Σ_j weights·(q·k), whose gradients have neither relu nor 1[q·k > 0].
        d_loss: scales the gradients, not the loss. A number, or an fp32 array of one element on the device of the
            others, for which nobody waits.
        row_loss: fp32 [s_q], is written: each row's loss before row_weights.
        deterministic: the same bits every time, also where the fastest way would not give them.
        backend, stream: as in `sparse_mla_forward`.

    Returns:
        (loss fp32 0-d, None with d_scores; d_q_index like q_index, d_k_index fp32 [s_kv, d_index], d_weights like
        weights). A row whose target is all zero adds neither loss nor gradient.
    """
    outputs = Outputs("lightning_indexer_backward", "q_index", q_index)
    loss = outputs.new((), "float32") if d_scores is None else None
    gradients = _gradients(outputs, q_index, k_index, weights)
    if row_loss is not None:
        outputs.given("row_loss", row_loss)
    _hopwell.lightning_indexer_backward(
        target, q_index, k_index, weights, indices, d_scores, k_start, k_end, row_weights, d_loss, relu, deterministic,
        loss, row_loss, *gradients, backend, stream,
    )  # fmt: skip
    return outputs.native(loss, *gradients)


def indexer_dense_loss(
    q: Array,
    kv: Array,
    lse: Array,
    q_index: Array,
    k_index: Array,
    weights: Array,
    sm_scale: float,
    *,
    k_start: Array | None = None,
    k_end: Array | None = None,
    q_positions: Array | None = None,
    q_start: int | None = None,
    kv_stride: int = 1,
    row_weights: Array | None = None,
    relu: bool = True,
    d_loss: float | Array = 1.0,
    row_loss: Array | None = None,
    deterministic: bool = False,
    attn_sink: Array | None = None,
    normalize: str = "heads",
    backend: str | None = None,
    stream: Any = None,
) -> tuple[Array, Array, Array, Array]:
    """The indexer's loss over every visible key, as its dense warm-up wants it, and its gradients.

        target   = Σ_h exp(score[s,h,t] − lse[s,h]) / h_q        score of the attention, over the visible keys t
        row_loss = KL(target[s,:] ‖ softmax over the visible keys of the index score);  loss = Σ_s row_weights·row_loss

    Nothing of size s_q × s_kv is stored: queries are taken in passes, on a GPU of 256 MiB of scores and targets.

    Args:
        q, kv, sm_scale: as in `sparse_mla_forward`.
        lse: fp32 [s_q, h_q], what `sparse_mla_forward(q, kv, None, ...)` returned, with or without window keys.
        q_index, k_index, weights: as in `lightning_indexer`.
        k_start, k_end, q_positions, q_start, kv_stride: which keys are visible, as in `sparse_mla_forward`.
        row_weights, relu, d_loss, row_loss, deterministic: as in `lightning_indexer_backward`. On a GPU deterministic
            sums have room for targets up to 256; where one is larger, d_k_index of the key is NaN.
        attn_sink: fp32 [h_q]; lse' = log(exp(lse) + exp(attn_sink)) is in lse's place then.
        normalize: "heads", or "l1": every row of the target is divided by its sum over the visible keys instead of h_q,
            as a softmax with window keys or a sink needs.
        backend, stream: as in `sparse_mla_forward`.

    Returns:
        (loss fp32 0-d, d_q_index like q_index, d_k_index fp32 [s_kv, d_index], d_weights like weights). A query without
        a visible key adds neither loss nor gradient, nor does one whose target is all zero.
    """
    outputs = Outputs("indexer_dense_loss", "q", q)
    loss = outputs.new((), "float32")
    gradients = _gradients(outputs, q_index, k_index, weights)
    if row_loss is not None:
        outputs.given("row_loss", row_loss)
    _hopwell.indexer_dense_loss(
        q, kv, lse, q_index, k_index, weights, sm_scale, q_positions, q_start, kv_stride, k_start, k_end, row_weights,
        d_loss, relu, deterministic, attn_sink, normalize, loss, row_loss, *gradients, backend, stream,
    )  # fmt: skip
    return outputs.native(loss, *gradients)
