"""How every wrapper runs and returns."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..._checks import require, require_one_device, require_sizes

_DEFAULT_STREAMS = (0, 1)  # cudaStreamLegacy too
_PER_THREAD_STREAM = 2


class TupleDict(dict[str, Any]):
    """Named results that unpack like a tuple, and are found by number too."""

    def __iter__(self) -> Any:
        return iter(self.values())

    def __getitem__(self, key: str | int) -> Any:
        return list(self.values())[key] if isinstance(key, int) else super().__getitem__(key)


def _torch_stream(stream: Any, device: torch.device) -> torch.cuda.Stream:
    """Of a handle: the two names of the default stream are no external streams to PyTorch."""
    handle = int(getattr(stream, "cuda_stream", stream))
    require(handle != _PER_THREAD_STREAM, "hopwell.compat.cudnn", "stream", "the handle of one stream", handle)
    if handle in _DEFAULT_STREAMS:
        return torch.cuda.default_stream(device)
    return torch.cuda.ExternalStream(handle, device=device)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def on(wrapper: str, stream: Any, *anywhere: Tensor | float | None, **tensors: Tensor | None) -> Iterator[None]:
    """Everything within runs on this CUDA stream, a handle; None is the current one, and so it is for host tensors.

    The memory of all tensors isn't used again before. Those given by name must lie on one device.
    """
    require_one_device(wrapper, **tensors)
    of_devices = [x for x in (*anywhere, *tensors.values()) if isinstance(x, Tensor) and x.is_cuda]
    if stream is None or not of_devices:
        yield
        return
    other = _torch_stream(stream, of_devices[0].device)
    if other.cuda_stream == torch.cuda.current_stream(other.device).cuda_stream:
        yield
        return
    for tensor in of_devices:
        tensor.record_stream(other)
    with torch.cuda.stream(other):
        yield


def require_output(wrapper: str, argument: str, out: Tensor | None, sizes: Sequence[int], *dtypes: torch.dtype) -> None:
    """Where an output is given, it must have these sizes and one of these dtypes."""
    if out is not None:
        require_sizes(wrapper, argument, out, sizes)
        require(out.dtype in dtypes, wrapper, argument, " or ".join(sorted({*map(str, dtypes)})), out.dtype)


def given_or_new(out: Tensor | None, sizes: list[int], like: Tensor, wrapper: str, argument: str) -> Tensor:
    """`out`, which must be float32 of these sizes, or where it is None a new tensor beside `like`."""
    require_output(wrapper, argument, out, sizes, torch.float32)
    return like.new_empty(sizes, dtype=torch.float32) if out is None else out


@contextlib.contextmanager
def contiguous(out: Tensor) -> Iterator[Tensor]:
    """A contiguous tensor to write, which is `out` or is copied to it afterwards."""
    written = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
    yield written
    if written is not out:
        out.copy_(written)


def into(out: Tensor | None, result: Tensor) -> Tensor:
    """The result, in `out` where that is given, which `require_output` has seen."""
    return result if out is None else out.copy_(result)
