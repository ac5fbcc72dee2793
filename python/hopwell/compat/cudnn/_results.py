"""How every wrapper runs and returns."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .._checks import require_sizes


class TupleDict(dict[str, Any]):
    """Named results that unpack like a tuple, and are found by number too."""

    def __iter__(self) -> Any:
        return iter(self.values())

    def __getitem__(self, key: str | int) -> Any:
        return list(self.values())[key] if isinstance(key, int) else super().__getitem__(key)


def on(stream: Any) -> Any:
    """Everything within runs on this CUDA stream, a handle; None is the current one."""
    if stream is None:
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.ExternalStream(int(stream)))  # type: ignore[no-untyped-call]


def given_or_new(out: Tensor | None, sizes: list[int], like: Tensor, wrapper: str, argument: str) -> Tensor:
    """`out`, which must have these sizes, or where it is None a new float32 tensor beside `like`."""
    if out is None:
        return like.new_empty(sizes, dtype=torch.float32)
    require_sizes(wrapper, argument, out, sizes)
    return out


@contextlib.contextmanager
def contiguous(out: Tensor) -> Iterator[Tensor]:
    """A contiguous tensor to write, which is `out` or is copied to it afterwards."""
    written = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
    yield written
    if written is not out:
        out.copy_(written)


def into(out: Tensor | None, result: Tensor) -> Tensor:
    """The result, in `out` where that is given."""
    return result if out is None else out.copy_(result)
