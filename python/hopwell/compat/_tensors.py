"""Strides that the operators do not take, and gradients of tensors that have no influence on a result."""

from typing import Any, TypeVar

import torch
from torch import Tensor

TensorT = TypeVar("TensorT", Tensor, Tensor | None)

_ROW_ALIGNMENT = 16  # bytes; kernels on GPUs load vectors of this size


def in_rows(x: TensorT) -> TensorT:
    """Returns x, or a copy if the operators refuse its strides.

    They need a contiguous last dimension. On GPUs they also need rows of floats that start at multiples of 16 bytes.
    """
    if x is None or x.ndim == 0:
        return x
    if x.stride(-1) != 1:
        return x.contiguous()
    if x.device.type == "cpu" or x.ndim == 1 or not x.is_floating_point() or _rows_are_aligned(x):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _rows_are_aligned(x: Tensor) -> bool:
    """Returns True also if a copy would not be aligned either, because the rows have another length."""
    size = x.element_size()
    if x.shape[-1] * size % _ROW_ALIGNMENT:
        return True
    if not torch.compiler.is_compiling() and x.storage_offset() * size % _ROW_ALIGNMENT:  # it cannot be compiled
        return False
    return not any(
        n > 1 and stride * size % _ROW_ALIGNMENT for n, stride in zip(x.shape, x.stride()[:-1], strict=False)
    )


class _Unused(torch.autograd.Function):
    """The identity of its first argument. The others get gradients of zeros."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, *unused: Tensor) -> Tensor:
        ctx.unused = [(x.shape, x.dtype) for x in unused]
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, d_result: Tensor) -> tuple[Tensor, ...]:
        return d_result, *(d_result.new_zeros(shape, dtype=dtype) for shape, dtype in ctx.unused)


def with_zero_gradients(result: Tensor, *unused: Tensor) -> Tensor:
    """Returns `result`, whose backward gives zeros to tensors that it does not depend on.

    Other projects return zeros there. Without this the gradient would be None, and `torch.autograd.grad` an error.
    """
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in unused):
        return result
    connected: Tensor = _Unused.apply(result, *unused)  # type: ignore[no-untyped-call]
    return connected
