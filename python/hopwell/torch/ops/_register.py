"""How an operator becomes a `torch.library` op, and what the files beside this share.

Kernels are put into PyTorch's dispatcher themselves, without `torch.library.custom_op`, whose checks of every result
cost more than the rest of a small call. Autograd's part of a call is Python too, so it is left out where gradients are
off.
"""

import functools
from collections.abc import Callable
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")
Gradients = tuple[Tensor | None, ...]

_torch: Any = torch  # what is used of it here has no types
_library = _torch.library.Library("hopwell", "DEF")
_below_autograd = _torch._C._AutoDispatchBelowAutograd
_views_what_requires_grad = hasattr(Tensor, "__dlpack_c_exchange_api__")


def operator(name: str, fake: Callable[..., Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Registers a kernel and its fake as hopwell::<name>; the function that remains keeps the kernel's signature and
    docstring. Its backward says that there is none; `differentiable` and `stop_gradient` say otherwise.
    """

    def register(kernel: Callable[P, R]) -> Callable[P, R]:
        schema = torch.library.infer_schema(kernel, mutates_args=())
        _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        for device in ("CPU", "CUDA"):
            _library.impl(name, kernel, device)
        torch.library.register_fake(f"hopwell::{name}", fake, lib=_library)
        op = getattr(torch.ops.hopwell, name).default

        @functools.wraps(kernel)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            result: R
            if torch.is_grad_enabled() or torch.compiler.is_compiling():
                result = op(*args, **kwargs)
            else:
                with _below_autograd():
                    result = op(*args, **kwargs)
            return result

        return call

    return register


def differentiable(name: str, backward: Callable[..., Gradients], save: Callable[..., None] | None = None) -> None:
    """Gives hopwell::<name> its gradients; `save` keeps in the context what they need."""
    torch.library.register_autograd(f"hopwell::{name}", backward, setup_context=save, lib=_library)


def stop_gradient(name: str) -> None:
    """Declares that no gradient passes through hopwell::<name>."""

    def mark(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.mark_non_differentiable(*(output if isinstance(output, tuple) else (output,)))

    differentiable(name, lambda ctx, *_: (None,) * len(ctx.needs_input_grad), mark)


def no_gradient(name: str) -> None:
    """Declares that hopwell::<name> has no gradient: a backward that comes to it is an error."""

    def refuse(ctx: Any, *_: Tensor) -> NoReturn:
        raise RuntimeError(f"hopwell::{name} has no gradient")

    differentiable(name, refuse)


def run(function: Callable[..., R], *args: Any, **kwargs: Any) -> R:
    """Calls the operator, below autograd. PyTorch before 2.10 exports no tensor that requires gradients."""
    if _views_what_requires_grad:
        return function(*args, **kwargs)
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
