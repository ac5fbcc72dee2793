"""How an operator becomes a `torch.library` custom op, and what the files beside this share."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")
Gradients = tuple[Tensor | None, ...]


def operator(name: str, fake: Callable[..., Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Registers a kernel and its fake as hopwell::<name>; the function that remains keeps the kernel's signature and
    docstring.
    """

    def register(kernel: Callable[P, R]) -> Callable[P, R]:
        op = torch.library.custom_op(f"hopwell::{name}", kernel, mutates_args=())
        op.register_fake(fake)

        @functools.wraps(kernel)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            result: R = op(*args, **kwargs)
            return result

        return call

    return register


def run(function: Callable[..., R], *args: Any, **kwargs: Any) -> R:
    """Calls the operator; detached, because a tensor that requires gradients cannot be exported through DLPack."""
    plain = [a.detach() if isinstance(a, Tensor) else a for a in args]
    named = {k: a.detach() if isinstance(a, Tensor) else a for k, a in kwargs.items()}
    return function(*plain, **named)


def as_bytes(codes: Tensor) -> Tensor:
    """float4_e2m1fn_x2 and float8_e4m3fn tensors as the bytes they are."""
    return codes if codes.dtype == torch.uint8 else codes.view(torch.uint8)


def dtype_named(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"expected the name of a dtype such as 'float16'; got {name!r}")
    return dtype


def scale_shape(rows: int, k: int, scale_layout: str) -> tuple[int, int]:
    """Shape of the scales of a [rows, k] matrix; the blocked layout pads to whole 128 × 4 blocks."""
    if scale_layout == "blocked":
        return -(-rows // 128) * 128, -(-k // 64) * 4
    return rows, k // 16


def stop_gradient(name: str) -> None:
    """Declares that no gradient passes through hopwell::<name>."""

    def mark(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.mark_non_differentiable(*(output if isinstance(output, tuple) else (output,)))

    torch.library.register_autograd(
        f"hopwell::{name}", lambda ctx, *_: (None,) * len(ctx.needs_input_grad), setup_context=mark
    )
