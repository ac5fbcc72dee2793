"""How a module made of PyTorch refuses an argument."""

import operator
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ._arrays import printable

INTEGERS = torch.int32, torch.int64  # of entries, bounds, lengths and slots


def require(holds: bool, function: str, argument: str, expected: str | Callable[[], str], got: object) -> None:
    """ValueError, which names the function, the argument, what was expected and what came, unless `holds`. Of a tensor
    only dtype and shape are said: its numbers may be many, and on a GPU. `expected` is a function if it says sizes:
    torch.compile would make a program for these sizes alone, because a string has them.
    """
    if not holds:
        words = expected if isinstance(expected, str) else expected()
        raise ValueError(f"{function}: {argument} must be {words}; got {_described(got)}")


def _described(value: object) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else printable(value)


def require_shape(function: str, argument: str, tensor: Tensor, **sizes: int | None) -> None:
    """The tensor must have these dimensions, those of a size that is not None with that size."""
    got = list(tensor.shape)
    fits = len(got) == len(sizes) and all(
        size is None or size == n for n, size in zip(got, sizes.values(), strict=True)
    )

    def expected() -> str:
        return "[" + ", ".join(name if size is None else f"{name}={size}" for name, size in sizes.items()) + "]"

    require(fits, function, argument, expected, got)


def require_sizes(function: str, argument: str, tensor: Tensor, sizes: Sequence[int]) -> None:
    """The tensor must have just these sizes."""
    require(list(tensor.shape) == list(sizes), function, argument, lambda: str(list(sizes)), list(tensor.shape))


def require_one_device(function: str, **arguments: object) -> None:
    """All tensors among the arguments must lie on the device of the first one."""
    tensors = [(name, value.device) for name, value in arguments.items() if isinstance(value, Tensor)]
    for name, device in tensors[1:]:
        first, expected = tensors[0]
        require(device == expected, function, name, f"on {expected} as {first} is", str(device))


def integer(function: str, argument: str, value: object) -> int:
    """An integer of Python's or of another package, such as numpy's, as Python's."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"{function}: {argument} must be an integer; got {_described(value)}") from None
