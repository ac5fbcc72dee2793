"""Gradients of the indexer's losses."""

from typing import Any

import torch
from torch import Tensor

from hopwell.torch import ops

from ..._checks import require, require_shape, require_sizes
from ._results import TupleDict, on, require_output
from ._rows import Rows, entries_of, find_rows, require_index_dtypes

_LEAST_PROBABILITY = 3.720075976020836e-44  # exp(−100), where cuDNN cuts logarithms
_LEAST_TARGET_SUM = 1e-10


def _score_gradient(predict: Tensor, target: Tensor, scale: Tensor, seen: Tensor) -> Tensor:
    """Of KL(target ‖ predict) by the scores, where predict is their softmax; logarithms are cut at −100 as there."""
    signal = target.clamp(min=_LEAST_PROBABILITY).masked_fill(~seen, 0.0)
    return (predict * signal.sum(-1, keepdim=True) - signal) * scale


def _scale(grad_loss: Tensor | float, loss_coeff: float, rows: Rows) -> Tensor:
    """The factor of each row's gradient: the loss is a mean."""
    grad_loss = torch.as_tensor(grad_loss, dtype=torch.float32, device=rows.start.device).reshape(())
    return grad_loss * (loss_coeff / max(len(rows.start), 1))


Outputs = tuple[Tensor | None, Tensor | None, Tensor | None]


def _require_all(
    wrapper: str, inputs: tuple[Tensor, Tensor, Tensor], outputs: Outputs, in_float32: tuple[str, ...] = ("d_index_k",)
) -> None:
    """Checks the inputs of the gradients' operator before anything is overwritten. An output has its input's shape and
    dtype; outputs named in `in_float32` may be float32.
    """
    index_q, _, index_k = inputs
    require_index_dtypes(wrapper, "index_q", index_q, "index_k", index_k)
    fits = index_k.ndim == index_q.ndim - 1 and index_k.shape[-1] == index_q.shape[-1]
    require(fits, wrapper, "index_k", f"[…, S_k, D={index_q.shape[-1]}]", list(index_k.shape))
    names = "d_index_q", "d_weights", "d_index_k"
    for name, x, out in zip(names, inputs, outputs, strict=True):
        require_output(wrapper, name, out, x.shape, x.dtype, *((torch.float32,) if name in in_float32 else ()))


def _index_gradients(
    rows: Rows,
    inputs: tuple[Tensor, Tensor, Tensor],
    table: Tensor,
    d_scores: Tensor,
    outputs: Outputs,
    **options: Any,
) -> TupleDict:
    """Those of index_q, weights and index_k, in their dtypes, or in the tensors given."""
    q, weights, k = (rows.flat(x) for x in inputs)
    _, d_q, d_k, d_w, _ = ops.lightning_indexer_backward(
        *(None, q, k, weights.float(), table), d_scores=rows.flat(d_scores), **options
    )
    results = [
        gradient.view(x.shape).to(x.dtype) if out is None else out.copy_(gradient.view(x.shape))
        for gradient, x, out in zip((d_q, d_w, d_k), inputs, outputs, strict=True)
    ]
    return TupleDict(zip(("d_index_q", "d_weights", "d_index_k"), results, strict=True))


@torch.no_grad()
def indexer_backward_wrapper(
    index_q: Tensor,
    weights: Tensor,
    index_k: Tensor,
    attn_score: Tensor,
    index_score: Tensor,
    topk_indices: Tensor,
    grad_loss: Tensor | float,
    sm_scale: float = 1.0,
    loss_coeff: float = 1.0,
    block_I: int = 128,  # noqa: N803
    topk_indices_global: bool = False,
    d_index_q: Tensor | None = None,
    d_weights: Tensor | None = None,
    d_index_k: Tensor | None = None,
    stream: Any = None,
    *,
    backend: str = "default",
    workspace: Tensor | None = None,
    deterministic: bool = False,
    deterministic_dk_planes: int = 96,
) -> TupleDict:
    """Gradients of grad_loss·loss_coeff·mean over rows of KL(attn_score ‖ index_score), the softmax of the scores.

    index_q [B, S_q, H, D], weights [B, S_q, H], index_k [B, S_k, D]; attn_score (target) and index_score (predict)
    float32 [B, S_q, topk] in the order of topk_indices, contiguous. attn_score is overwritten with the gradient of the
    scores. Returns {d_index_q, d_weights, d_index_k} in their inputs' dtypes, or in the tensors given. d_index_k may be
    float32; with backend "sm100_v2" d_weights may be float32 too.
    """
    name = "indexer_backward_wrapper"
    require(backend in ("default", "sm100_v2"), name, "backend", "default or sm100_v2", backend)
    inputs = {"index_q": index_q, "weights": weights, "index_k": index_k, "topk_indices": topk_indices}
    inputs |= {"attn_score": attn_score, "index_score": index_score}
    with on(name, stream, grad_loss, **inputs, d_index_q=d_index_q, d_weights=d_weights, d_index_k=d_index_k):
        rows, table = entries_of(name, index_q, index_k, topk_indices, None, topk_indices_global)
        b, s_q, heads, _ = index_q.shape
        require_shape(name, "weights", weights, B=b, S_q=s_q, H=heads)
        for argument, score in (("attn_score", attn_score), ("index_score", index_score)):
            require(score.dtype == torch.float32, name, argument, "float32", score.dtype)
            require_shape(name, argument, score, B=b, S_q=s_q, topk=topk_indices.shape[2])
            got = f"strides {list(score.stride())}"  # cuDNN compares the strides with the strides of an earlier call
            require(score.is_contiguous(), name, argument, "contiguous", got)
        outputs = d_index_q, d_weights, d_index_k
        in_float32 = ("d_weights", "d_index_k") if backend == "sm100_v2" else ("d_index_k",)
        _require_all(name, (index_q, weights, index_k), outputs, in_float32)
        scale = _scale(grad_loss, loss_coeff, rows)
        d_scores = _score_gradient(index_score, attn_score, scale, index_score >= _LEAST_PROBABILITY)
        result = _index_gradients(
            *(rows, (index_q, weights, index_k), table, d_scores * sm_scale, outputs), deterministic=deterministic
        )
        attn_score.copy_(d_scores)  # last: a call that is refused overwrites nothing
        return result


@torch.no_grad()
def dense_indexer_backward_wrapper(
    index_q: Tensor,
    weights: Tensor,
    index_k: Tensor,
    attn_score: Tensor,
    attn_l1norm: Tensor,
    index_score: Tensor,
    index_lse: Tensor,
    grad_loss: Tensor | float,
    sm_scale: float = 1.0,
    loss_coeff: float = 1.0,
    block_I: int = 128,  # noqa: N803
    ratio: int = 1,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    q_causal_offsets: Tensor | None = None,
    d_index_q: Tensor | None = None,
    d_weights: Tensor | None = None,
    d_index_k: Tensor | None = None,
    stream: Any = None,
    workspace: Tensor | None = None,
) -> TupleDict:
    """`indexer_backward_wrapper` over all keys that a query sees, from what the two dense recomputations return.

    The target is attn_score / attn_l1norm, the prediction exp(index_score − index_lse). index_score is overwritten with
    the gradient of the scores.
    """
    name = "dense_indexer_backward_wrapper"
    inputs = {"index_q": index_q, "weights": weights, "index_k": index_k, "attn_score": attn_score}
    inputs |= {"attn_l1norm": attn_l1norm, "index_score": index_score, "index_lse": index_lse}
    layout = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "q_causal_offsets": q_causal_offsets}
    outputs_given = {"d_index_q": d_index_q, "d_weights": d_weights, "d_index_k": d_index_k}
    with on(name, stream, grad_loss, **inputs, **layout, **outputs_given):
        rows = find_rows(name, index_q, index_k, ratio, cu_seqlens_q, cu_seqlens_k, max_seqlen_k, q_causal_offsets)
        require_sizes(name, "weights", weights, index_q.shape[:-1])
        dense, sums = [*rows.shape, rows.width], rows.shape
        for argument, tensor, sizes in (
            ("attn_score", attn_score, dense),
            ("attn_l1norm", attn_l1norm, sums),
            ("index_score", index_score, dense),
            ("index_lse", index_lse, sums),
        ):
            require(
                tensor.dtype == torch.float32 and list(tensor.shape) == sizes,
                *(name, argument, f"float32 {sizes}", f"{tensor.dtype} {list(tensor.shape)}"),
            )
        outputs = d_index_q, d_weights, d_index_k
        _require_all(name, (index_q, weights, index_k), outputs)
        scale = _scale(grad_loss, loss_coeff, rows)
        hidden = rows.hidden(slice(None)).view(dense)
        logs = (index_score - index_lse.unsqueeze(-1)).masked_fill_(hidden, -torch.inf)
        target = attn_score / (attn_l1norm.unsqueeze(-1) + _LEAST_TARGET_SUM)
        index_score.copy_(_score_gradient(logs.exp(), target, scale, logs >= -100.0))
        table = rows.all_keys(slice(None))
        return _index_gradients(
            *(rows, (index_q, weights, index_k), table, index_score * sm_scale, outputs),
            k_start=rows.start,
            k_end=rows.end,
        )
