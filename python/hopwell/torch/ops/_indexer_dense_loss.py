"""The indexer's loss over all visible keys."""

from typing import Any

import torch
from torch import Tensor

import hopwell

from ._register import Gradients, differentiable, exporting, operator, scaled

_dense_loss = exporting(hopwell.indexer_dense_loss)


def _indexer_dense_loss_fake(
    q: Tensor, q_index: Tensor, k_index: Tensor, weights: Tensor, **_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return (
        q.new_empty((), dtype=torch.float32),
        q_index.new_empty(q_index.shape),
        k_index.new_empty(k_index.shape, dtype=torch.float32),
        weights.new_empty(weights.shape),
        q.new_empty(q.shape[:1], dtype=torch.float32),
    )


@operator("indexer_dense_loss", _indexer_dense_loss_fake)
def indexer_dense_loss_and_gradients(
    q: Tensor,
    kv: Tensor,
    lse: Tensor,
    q_index: Tensor,
    k_index: Tensor,
    weights: Tensor,
    sm_scale: float,
    k_start: Tensor | None = None,
    k_end: Tensor | None = None,
    q_positions: Tensor | None = None,
    q_start: int | None = None,
    kv_stride: int = 1,
    row_weights: Tensor | None = None,
    relu: bool = True,
    d_loss: float = 1.0,
    deterministic: bool = False,
    attn_sink: Tensor | None = None,
    normalize: str = "heads",
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The op behind `indexer_dense_loss`. It returns the loss, its gradients scaled by `d_loss` (d_q_index and
    d_k_index in float32, and d_weights), and each row's loss before its weight, float32 [s_q].
    """
    row_loss = q.new_empty(q.shape[:1], dtype=torch.float32)
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    loss, d_q_index, d_k_index, d_weights = _dense_loss(**locals())
    return loss.reshape(()), d_q_index, d_k_index, d_weights, row_loss


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """The forward has already computed the loss's gradients; the backward only scales them."""
    _, *gradients, row_loss = output
    ctx.mark_non_differentiable(*gradients, row_loss)
    ctx.k_dtype, ctx.scaled = inputs[4].dtype, inputs[14] != 1.0
    ctx.rest = inputs[6], *inputs[10:12], inputs[13], 1.0, inputs[15], *inputs[17:]
    ctx.save_for_backward(*((*inputs[:6], *inputs[7:10], inputs[12], inputs[16]) if ctx.scaled else gradients))


def _differentiate(ctx: Any, d_loss: Tensor, *_: Tensor) -> Gradients:
    gradients = ctx.saved_tensors
    if ctx.scaled:
        *operands, k_start, k_end, q_positions, row_weights, attn_sink = gradients
        sm_scale, q_start, kv_stride, *options, normalize, backend = ctx.rest
        masks = k_start, k_end, q_positions, q_start, kv_stride
        arguments = *operands, sm_scale, *masks, row_weights, *options, attn_sink, normalize, backend
        gradients = indexer_dense_loss_and_gradients(*arguments)[1:4]
    d_q_index, d_k_index, d_weights = (scaled(g, d_loss) for g in gradients)
    return None, None, None, d_q_index, d_k_index.to(ctx.k_dtype), d_weights, *(None,) * 13


differentiable("indexer_dense_loss", _differentiate, _save)


def indexer_dense_loss(
    q: Tensor,
    kv: Tensor,
    lse: Tensor,
    q_index: Tensor,
    k_index: Tensor,
    weights: Tensor,
    sm_scale: float,
    *,
    k_start: Tensor | None = None,
    k_end: Tensor | None = None,
    q_positions: Tensor | None = None,
    q_start: int | None = None,
    kv_stride: int = 1,
    row_weights: Tensor | None = None,
    relu: bool = True,
    deterministic: bool = False,
    attn_sink: Tensor | None = None,
    normalize: str = "heads",
    backend: str | None = None,
) -> Tensor:
    """Σ_s row_weights·KL(target ‖ softmax over the visible keys of the index scores), a float32 scalar: the loss of the
    indexer's dense warm-up. target is the mean over the heads of the attention to every visible key; with normalize
    "l1" the sum over the heads, divided by its sum over the keys, as a softmax over window keys too, or with a sink,
    needs.

    q, kv and the masks as in `sparse_mla`; lse is the result of its call without indices, with or without window keys.
    attn_sink, float32 [h_q]: log(exp(lse) + exp(attn_sink)) is in lse's place. q_index, k_index and weights
    as in `lightning_indexer`; row_weights and relu as in `indexer_loss`. No tensor of s_q × s_kv elements is stored.
    Differentiable in q_index, k_index and weights; no gradient reaches q, kv, lse, attn_sink and
    row_weights.
    """
    return indexer_dense_loss_and_gradients(
        q, kv, lse, q_index, k_index, weights, sm_scale, k_start, k_end, q_positions, q_start, kv_stride, row_weights,
        relu, 1.0, deterministic, attn_sink, normalize, backend,
    )[0]  # fmt: skip
