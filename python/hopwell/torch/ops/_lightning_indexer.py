"""The lightning indexer and its loss."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import hopwell
from hopwell._arrays import check_size

from ._register import Named, NamedGradients, contiguous_rows, differentiable, exporting, operator, scaled

_indexer, _backward = exporting(hopwell.lightning_indexer), exporting(hopwell.lightning_indexer_backward)


def _lightning_indexer_fake(q_index: Tensor, topk: int, **_: Any) -> tuple[Tensor, Tensor]:
    if isinstance(topk, int):  # not a symbolic size
        check_size("lightning_indexer", "topk", topk)
    shape = (q_index.shape[0], topk)
    return q_index.new_empty(shape, dtype=torch.int32), q_index.new_empty(shape, dtype=torch.float32)


@operator("lightning_indexer", _lightning_indexer_fake)
def lightning_indexer(
    q_index: Tensor,
    k_index: Tensor,
    weights: Tensor,
    topk: int,
    q_positions: Tensor | None = None,
    q_start: int | None = None,
    kv_stride: int = 1,
    k_start: Tensor | None = None,
    k_end: Tensor | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    relu: bool = True,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Selects the topk keys with the largest index score for every query. The scores are differentiable in q_index,
    k_index and weights; the selection is not.

    q_index [s_q, h_index, d_index], k_index [s_kv, d_index], weights [s_q, h_index]; positions and key ranges as in
    `sparse_mla`. q_index and k_index may be float8_e4m3fn, with q_scale [s_q, h_index] and k_scale [s_kv], float32, as
    in `hopwell.lightning_indexer`; then there are no derivatives. `relu` = False omits the ReLU in the scores. Returns
    indices int32 [s_q, topk] in ascending order, padded with −1, and their scores float32 [s_q, topk], −inf if the
    index is −1.
    """
    return _indexer(**locals())


def _lightning_indexer_backward_fake(
    q_index: Tensor, k_index: Tensor, weights: Tensor, **_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return (
        q_index.new_empty((), dtype=torch.float32),
        q_index.new_empty(q_index.shape),
        k_index.new_empty(k_index.shape, dtype=torch.float32),
        weights.new_empty(weights.shape),
        q_index.new_empty(q_index.shape[:1], dtype=torch.float32),
    )


@operator("lightning_indexer_backward", _lightning_indexer_backward_fake)
def lightning_indexer_backward(
    target: Tensor | None,
    q_index: Tensor,
    k_index: Tensor,
    weights: Tensor,
    indices: Tensor,
    k_start: Tensor | None = None,
    k_end: Tensor | None = None,
    d_scores: Tensor | None = None,
    row_weights: Tensor | None = None,
    relu: bool = True,
    d_loss: float = 1.0,
    deterministic: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The loss Σ_s row_weights·KL(target ‖ softmax of the selected index scores) and its gradients, in one pass.
    `d_loss` scales the gradients. With `d_scores` it computes the gradients of another loss of these scores instead.

    target float32 [s_q, topk] (`attention_distribution` with normalize="l1"), None if d_scores float32 [s_q, topk] is
    given; indices int32 [s_q, topk]; key ranges as in `sparse_mla`; row_weights float32 [s_q], 1 if absent. Returns the
    loss (float32, 0-d), d_q_index and d_weights in their inputs' dtypes, d_k_index in float32, and each row's loss
    before its weight, float32 [s_q]; with d_scores both losses are zeros.
    """
    row_loss = None if target is None else target.new_empty(target.shape[:1], dtype=torch.float32)
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    loss, d_q_index, d_k_index, d_weights = _backward(**locals())
    if loss is None or row_loss is None:
        loss, row_loss = (q_index.new_zeros(shape, dtype=torch.float32) for shape in ((), q_index.shape[:1]))
    return loss.reshape(()), d_q_index, d_k_index, d_weights, row_loss


def _save_scores(given: Named, results: tuple[Tensor, Tensor]) -> Named:
    names = "q_index", "k_index", "weights", "relu", "backend"
    return {name: given[name] for name in names} | {"indices": results[0]}


def _differentiate_scores(given: Named, _: set[str], _d_indices: Tensor, d_scores: Tensor) -> NamedGradients:
    return index_gradients(None, d_scores=contiguous_rows(d_scores), **given)


def index_gradients(*args: Any, **kwargs: Any) -> NamedGradients:
    """The gradients of `lightning_indexer_backward`, each in its input's dtype."""
    _, d_q_index, d_k_index, d_weights, _ = lightning_indexer_backward(*args, **kwargs)
    return {"q_index": d_q_index, "k_index": d_k_index.to(d_q_index.dtype), "weights": d_weights}


differentiable("lightning_indexer", _differentiate_scores, _save_scores, constants=(0,))


def save_loss(given: Named, results: tuple[Tensor, ...]) -> Named:
    """The forward has already computed the loss's gradients; the backward only scales them."""
    if given["d_loss"] != 1.0:
        return given | {"d_loss": 1.0}
    _, d_q_index, d_k_index, d_weights, _ = results
    k_dtype = given["k_index"].dtype
    return {"q_index": d_q_index, "k_index": d_k_index, "weights": d_weights, "k_dtype": k_dtype}


def scaled_gradients(op: Callable[..., tuple[Tensor, ...]], kept: Named, d_loss: Tensor) -> NamedGradients:
    """The gradients of a loss's op, for what `save_loss` kept."""
    k_dtype = kept.pop("k_dtype", None)
    if k_dtype is None:
        k_dtype = kept["k_index"].dtype
        kept = dict(zip(("q_index", "k_index", "weights"), op(**kept)[1:4], strict=True))
    gradients = {name: scaled(gradient, d_loss) for name, gradient in kept.items()}
    return {**gradients, "k_index": gradients["k_index"].to(k_dtype)}


def _differentiate_indexer_loss(kept: Named, _: set[str], d_loss: Tensor, *_constants: Tensor) -> NamedGradients:
    return scaled_gradients(lightning_indexer_backward, kept, d_loss)


differentiable("lightning_indexer_backward", _differentiate_indexer_loss, save_loss, constants=(1, 2, 3, 4))


def indexer_loss(
    q_index: Tensor,
    k_index: Tensor,
    weights: Tensor,
    indices: Tensor,
    target: Tensor,
    *,
    k_start: Tensor | None = None,
    k_end: Tensor | None = None,
    row_weights: Tensor | None = None,
    relu: bool = True,
    deterministic: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Σ_s row_weights·KL(target ‖ softmax over the selected entries of the index scores), a float32 scalar.

    Differentiable in q_index, k_index and weights. No gradient reaches the target and row_weights (float32 [s_q]: a
    mask, or 1 / the number of valid rows; a row of weight 0 adds nothing, whatever it contains). Shapes as in
    `lightning_indexer_backward`, which also returns each row's loss. For any other loss of these scores, write it in
    PyTorch over the scores that `lightning_indexer` returns.
    """
    arguments = target, q_index, k_index, weights, indices, k_start, k_end, None, row_weights
    return lightning_indexer_backward(*arguments, relu, 1.0, deterministic, backend)[0]
