"""How a module made of PyTorch refuses an argument."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ._arrays import printable

INTEGERS = torch.int32, torch.int64  # of entries, bounds, lengths and slots


def require(holds: bool, function: str, argument: str, expected: str, got: object) -> None:
    """ValueError, which names the function, the argument, what was expected and what came, unless `holds`. Of a tensor
    only dtype and shape are said: its numbers may be many, and on a GPU.
    """
    if not holds:
        came = f"{got.dtype} {list(got.shape)}" if isinstance(got, Tensor) else printable(got)
        raise ValueError(f"{function}: {argument} must be {expected}; got {came}")


def require_shape(function: str, argument: str, tensor: Tensor, **sizes: int | None) -> None:
    """The tensor must have these dimensions, those of a size that is not None with that size."""
    expected = ", ".join(name if size is None else f"{name}={size}" for name, size in sizes.items())
    got = list(tensor.shape)
    fits = len(got) == len(sizes) and all(
        size is None or size == n for n, size in zip(got, sizes.values(), strict=True)
    )
    require(fits, function, argument, f"[{expected}]", got)


def require_sizes(function: str, argument: str, tensor: Tensor, sizes: Sequence[int]) -> None:
    """The tensor must have just these sizes."""
    require(list(tensor.shape) == list(sizes), function, argument, str(list(sizes)), list(tensor.shape))
