"""Parts of all modules: checks of arguments, a norm, and a base class that keeps the dtype of some tensors."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from hopwell._checks import require

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


def check_type(module: str, argument: str, value: object, expected: type) -> None:
    """Raises TypeError, which names module, argument, expected and given type, unless the value has that type."""
    if not isinstance(value, expected):
        name = f"torch.{expected.__name__}" if expected is Tensor else f"torch.nn.{expected.__name__}"
        raise TypeError(f"{module}: {argument} must be a {name}; got {type(value).__name__}")


def check_tokens(module: str, x: Tensor, d_model: int, first: nn.Module | None = None) -> None:
    """Raises an error, unless x is a batch of sequences in the dtype of `first`, the linear layer that takes it.

    Autocast converts x. A layer of another kind, such as a quantised one, checks its input itself.
    """
    check_type(module, "x", x, Tensor)
    if x.ndim != 3 or x.shape[-1] != d_model:
        raise ValueError(f"{module}: x must be [b, s, d_model={d_model}]; got {list(x.shape)}")
    if isinstance(first, nn.Linear) and (x.is_meta or not torch.is_autocast_enabled(x.device.type)):
        dtype = first.weight.dtype
        require(x.dtype == dtype, module, "x", f"{dtype} like its weights", x.dtype)


def backward_may_follow(training: bool = True) -> bool:
    """True where gradients are on, and in the forward of an `autograd.Function`, where PyTorch turns them off.

    Reentrant activation checkpointing is such a function: its backward runs the module again with gradients on, and
    passes gradients only to results that the first run returned as well. PyTorch turns forward mode off there too,
    which `no_grad` does not. Compiled code cannot ask for that: there `training` decides.
    """
    if torch.is_grad_enabled():
        return True
    if torch.compiler.is_compiling():
        return training
    return not (torch.is_inference_mode_enabled() or torch._C._is_fwd_grad_enabled())


def refuse_scaled_tensors(module: nn.Module, tensors: Mapping[str, Any], prefix: str, errors: list[str]) -> None:
    """Adds an error for each weight of a layer that still has a scale. PyTorch would take the codes for numbers."""
    name = type(module).__name__
    for key in tensors:
        if not key.startswith(prefix):
            continue
        if key.endswith((".scale", "_scale_inv")):
            errors.append(f"{name}: {key} must be multiplied into its weight first; got {list(tensors[key].shape)}")
        elif key.endswith(".weight") and isinstance(tensors[key], Tensor) and tensors[key].dtype in FLOAT8:
            errors.append(f"{name}: {key} must be multiplied by its scale first; got {tensors[key].dtype}")


def take_parts(module: nn.Module, source: nn.Module) -> None:
    """Makes the submodules and the plain attributes of `source` attributes of `module` too."""
    vars(module).update({name: value for name, value in vars(source).items() if name not in vars(module)})
    for name, part in source.named_children():
        module.add_module(name, part)


class RMSNorm(nn.RMSNorm):
    """PyTorch's, which computes in float32. x is first converted to the weight's dtype, as autocast does for products,
    and the result has x's dtype.
    """

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


class KeepsDtypes(nn.Module):
    """A module that keeps the dtype of some tensors. `bfloat16()` and similar calls cast every floating tensor, but
    only move the tensors that `kept` names.
    """

    kept: ClassVar[tuple[str, ...]]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        tensors = [t for t in (getattr(self, name) for name in self.kept) if t is not None]
        kept = {id(t) for t in (*tensors, *(t.grad for t in tensors if t.grad is not None))}

        def convert(tensor: Tensor) -> Tensor:
            if id(tensor) not in kept:
                return fn(tensor)
            given = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor  # float4 can't even be cast
            moved = fn(given)
            if moved is given:
                return tensor
            return (moved if moved.dtype == given.dtype else given.to(moved.device)).view(tensor.dtype)

        module: Self = super()._apply(convert, recurse)  # type: ignore[no-untyped-call]
        return module
