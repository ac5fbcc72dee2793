"""Random inputs of the operators in PyTorch, and the allowed differences of gradients."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from support import norm_error
from torch import Tensor

DTYPES = [torch.float32, torch.bfloat16]
GRADIENT_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 4e-3}


def every_second(x: Tensor) -> Tensor:
    """Returns x with a stride of 2 in its last dimension. The elements between are not zeros."""
    return torch.stack([x, torch.ones_like(x)], -1)[..., 0]


def transposed(x: Tensor) -> Tensor:
    """Returns x with the first dimension contiguous. PyTorch's operators keep these strides in their results."""
    return x.transpose(0, -1).contiguous().transpose(0, -1)


Restride = Callable[[Tensor], Tensor]
RESTRIDES: list[Restride] = [every_second, transposed]


def restrided(restride: Restride, *values: Any) -> list[Any]:
    """Copies of the tensors with other strides, and the other values. A copy of a leaf is a leaf."""
    return [restride(x.detach()).requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in values]


def sparse_inputs(dtype: torch.dtype = torch.float32, d_qk: int = 20, topk: int = 13) -> dict[str, Any]:
    """Random rows of 9 queries over 17 keys, with invalid and repeated entries."""
    return {
        "q": torch.randn(9, 5, d_qk).to(dtype),
        "kv": torch.randn(17, d_qk).to(dtype),
        "indices": torch.randint(-3, 20, (9, topk), dtype=torch.int32),
        "sm_scale": 0.5,
        "d_v": 12,
    }


def indexer_inputs(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    indices = torch.randint(-2, 24, (11, 7), dtype=torch.int32)
    target = torch.rand(11, 7) * ((indices >= 0) & (indices < 21))
    target[3] = 0.0
    return {
        "q_index": torch.randn(11, 4, 32).to(dtype),
        "k_index": torch.randn(21, 32).to(dtype),
        "weights": torch.randn(11, 4),
        "indices": indices,
        "target": target / target.sum(-1, keepdim=True).clamp_min(1e-30),
    }


def index_leaves(inputs: dict[str, Tensor]) -> list[Tensor]:
    """The tensors for which the indexer's losses and scores have gradients."""
    return [inputs[name].requires_grad_() for name in ("q_index", "k_index", "weights")]


def indexer_key_ranges() -> dict[str, Tensor]:
    """For indexer_inputs: random ranges, one empty range, one range of all keys."""
    k_start, k_end = torch.randint(-2, 9, (11,)), torch.randint(7, 24, (11,))
    k_start[4], k_end[4], k_start[5], k_end[5] = 8, 8, 0, 21
    return {"k_start": k_start.int(), "k_end": k_end.int()}


def dense_loss_inputs(dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    """Arguments of `indexer_dense_loss`, by position."""
    q, kv, lse = torch.randn(6, 3, 24), torch.randn(15, 24), torch.full((6, 3), 3.0)
    index = torch.randn(6, 2, 8), torch.randn(15, 8)
    return (q.to(dtype), kv.to(dtype), lse, *(x.to(dtype) for x in index), torch.randn(6, 2), 0.3)


def paged_inputs(dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    q = torch.randn(2, 3, 4, 32).to(dtype)
    k_cache, v_cache = (torch.randn(6, 8, 2, 32).to(dtype) for _ in range(2))
    tables = torch.tensor([[4, 1, 3], [0, 5, 2]], dtype=torch.int32)
    return q, k_cache, v_cache, tables, torch.tensor([19, 7], dtype=torch.int32), 0.2


def assert_gradients(actual: Sequence[Tensor], expected: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
    """Checks that gradients have their leaves' dtypes, and differ from `expected` by no more than these dtypes
    allow.
    """
    for gradient, wanted, leaf in zip(actual, expected, leaves, strict=True):
        assert gradient.dtype == leaf.dtype
        assert norm_error(gradient, wanted) <= GRADIENT_TOLERANCE[leaf.dtype]
