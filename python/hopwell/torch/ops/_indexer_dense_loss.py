"""The indexer's loss over all visible keys."""

from typing import Any

import torch
from torch import Tensor

import hopwell

from ._lightning_indexer import save_loss, scaled_gradients
from ._register import Named, NamedGradients, arguments_of, differentiable, exporting, operator

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
@arguments_of(hopwell.indexer_dense_loss, "row_loss", d_loss=float)
def indexer_dense_loss_and_gradients(
    q: Tensor, deterministic: bool, **given: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The op behind `indexer_dense_loss`. It returns the loss, its gradients scaled by `d_loss` (d_q_index and
    d_k_index in float32, and d_weights), and each row's loss before its weight, float32 [s_q].
    """
    row_loss = q.new_empty(q.shape[:1], dtype=torch.float32)
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    result = _dense_loss(q=q, deterministic=deterministic, row_loss=row_loss, **given)
    return result.loss.reshape(()), result.d_q_index, result.d_k_index, result.d_weights, row_loss


def _differentiate(kept: Named, _: set[str], d_loss: Tensor, *_constants: Tensor) -> NamedGradients:
    return scaled_gradients(indexer_dense_loss_and_gradients, kept, d_loss)


differentiable("indexer_dense_loss", _differentiate, save_loss, constants=(1, 2, 3, 4))


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
    return indexer_dense_loss_and_gradients(**locals())[0]
