"""The lightning indexer and its loss."""

from typing import Any

import torch
from torch import Tensor

import hopwell
from hopwell._arrays import check_topk

from ._register import Gradients, differentiable, exporting, operator, stop_gradient

_indexer, _backward = exporting(hopwell.lightning_indexer), exporting(hopwell.lightning_indexer_backward)


def _lightning_indexer_fake(
    q_index: Tensor, k_index: Tensor, weights: Tensor, topk: int, *_: Any, **__: Any
) -> tuple[Tensor, Tensor]:
    if isinstance(topk, int):  # and no symbol
        check_topk("lightning_indexer", topk)
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
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """The topk keys of largest index score for every query; carries no gradient.

    q_index [s_q, h_index, d_index], k_index [s_kv, d_index], weights [s_q, h_index]; positions and key ranges as in
    `sparse_mla`. Returns indices int32 [s_q, topk] in ascending order, padded with −1, and their scores float32 [s_q,
    topk], −inf where the index is −1.
    """
    return _indexer(
        *(q_index, k_index, weights, topk),
        q_positions=q_positions,
        q_start=q_start,
        kv_stride=kv_stride,
        k_start=k_start,
        k_end=k_end,
        backend=backend,
    )


stop_gradient("lightning_indexer")


def _lightning_indexer_backward_fake(
    target: Tensor, q_index: Tensor, k_index: Tensor, weights: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        target.new_empty((), dtype=torch.float32),
        q_index.new_empty(q_index.shape),
        k_index.new_empty(k_index.shape, dtype=torch.float32),
        weights.new_empty(weights.shape),
    )


@operator("lightning_indexer_backward", _lightning_indexer_backward_fake)
def lightning_indexer_backward(
    target: Tensor,
    q_index: Tensor,
    k_index: Tensor,
    weights: Tensor,
    indices: Tensor,
    k_start: Tensor | None = None,
    k_end: Tensor | None = None,
    d_loss: float = 1.0,
    deterministic: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Σ_s KL(target ‖ softmax of the selected index scores) and its gradients, which `d_loss` scales, in one pass.

    target float32 [s_q, topk] (`attention_distribution` with normalize="l1"), indices int32 [s_q, topk]; key ranges as
    in `sparse_mla`. Returns the loss (float32, 0-d), d_q_index and d_weights in their inputs' dtypes and d_k_index in
    float32.
    """
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    loss, d_q_index, d_k_index, d_weights = _backward(
        *(target, q_index, k_index, weights, indices),
        k_start=k_start,
        k_end=k_end,
        d_loss=d_loss,
        deterministic=deterministic,
        backend=backend,
    )
    return loss.reshape(()), d_q_index, d_k_index, d_weights


def _save_indexer_loss(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """The forward has the loss's gradients already, unless d_loss scaled them."""
    arguments, (d_loss, ctx.deterministic, ctx.backend) = inputs[:7], inputs[7:]
    _, *gradients = output
    ctx.mark_non_differentiable(*gradients)
    ctx.k_dtype, ctx.scaled = inputs[2].dtype, d_loss != 1.0
    ctx.save_for_backward(*(arguments if ctx.scaled else gradients))


def _differentiate_indexer_loss(ctx: Any, d_loss: Tensor, *_: Tensor) -> Gradients:
    gradients = ctx.saved_tensors
    if ctx.scaled:
        target, q_index, k_index, weights, indices, k_start, k_end = gradients
        gradients = lightning_indexer_backward(
            target, q_index, k_index, weights, indices, k_start, k_end, 1.0, ctx.deterministic, ctx.backend
        )[1:]
    d_q_index, d_k_index, d_weights = (g * d_loss.to(g.dtype) for g in gradients)
    return None, d_q_index, d_k_index.to(ctx.k_dtype), d_weights, *(None,) * 6


differentiable("lightning_indexer_backward", _differentiate_indexer_loss, _save_indexer_loss)


def indexer_loss(
    q_index: Tensor,
    k_index: Tensor,
    weights: Tensor,
    indices: Tensor,
    target: Tensor,
    *,
    k_start: Tensor | None = None,
    k_end: Tensor | None = None,
    deterministic: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Σ_s KL(target ‖ softmax over the selected entries of the index scores), a float32 scalar.

    Differentiable in q_index, k_index and weights; the gradient stops at the target. Shapes:
    `lightning_indexer_backward`.
    """
    arguments = target, q_index, k_index, weights, indices, k_start, k_end
    return lightning_indexer_backward(*arguments, 1.0, deterministic, backend)[0]
