"""A call's memory on a device: each block with its margins as one buffer there, and each array the same view of it.

The device may be the CPU, which is how `test_fuzz_device.py` tests this file.
"""

import ctypes
from typing import Any

import numpy as np
import torch

from .call import FuzzedCall
from .memory import PATTERN, Block
from .others import tensor_of

_MARGIN = 512  # bytes of pattern on either side of a block
_TORCH_DTYPES = {
    "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "int32": torch.int32,
    "int64": torch.int64, "int8": torch.int8,
    "uint8": torch.uint8, "float8_e4m3fn": torch.float8_e4m3fn,
}  # fmt: skip
# An operator allocates results and scratch memory in the framework of its first argument, so these are torch tensors.
_MODELS = ("q", "d_out", "a", "x", "codes", "attn", "q_index", "target", "d_scores")


class DeviceCall:
    """The arguments of a call as arrays on a device."""

    def __init__(self, call: FuzzedCall, device: torch.device) -> None:
        self._call, self._device = call, device
        self._buffers = [(block, to_device(block, device)) for block in call.memory.blocks]
        self.arguments = {
            name: self._array(name, value) if isinstance(value, np.ndarray) else value
            for name, value in call.arguments.items()
        }

    def _array(self, name: str, array: Any) -> Any:
        block, buffer = next((b, on_device) for b, on_device in self._buffers if _holds(b, array))
        offset = _start(block) + array.ctypes.data - block.bytes.ctypes.data
        strides = [stride // array.itemsize for stride in array.strides]
        if array.size == 0:
            offset, strides = _start(block), [0] * array.ndim
        strides = [max(stride, 0) if n <= 1 else stride for n, stride in zip(array.shape, strides, strict=True)]
        if min(strides, default=0) >= 0:
            dtype = _TORCH_DTYPES[array.dtype.name]
            place = offset // array.itemsize, array.shape, strides
            return torch.empty(0, dtype=dtype, device=self._device).set_(buffer.untyped_storage(), *place)
        if name in _MODELS and name not in self._call.outputs:
            return tensor_of(array).to(self._device)
        return Backwards(buffer, offset, array, strides)

    def fetch(self) -> None:
        """Copies the blocks back to where the call's arrays are on the host, and checks their margins."""
        for block, buffer in self._buffers:
            there = buffer.cpu().numpy()
            start, size = _start(block), len(block.bytes)
            block.bytes[:] = there[start : start + size]
            margins = there[:start], there[start + size :]
            assert all((margin == PATTERN).all() for margin in margins), "memory beside an array was written"

    def on_host(self, result: Any) -> Any:
        """A result as numpy's array. One that was given is the host's own, which `fetch` has filled."""
        for name in self._call.outputs:
            if result is self.arguments[name]:
                return self._call.arguments[name]
        if not isinstance(result, torch.Tensor):
            return result
        dtype = next(name for name, dtype in _TORCH_DTYPES.items() if dtype == result.dtype)
        if result.numel() == 0:
            return np.empty(tuple(result.shape), _numpy_dtype(dtype))
        integers = (
            result.cpu()
            .contiguous()
            .view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[result.itemsize])
        )
        return integers.numpy().view(_numpy_dtype(dtype))


class HostCall:
    """The same of a call whose arrays stay where they are, between pages that cannot be touched."""

    def __init__(self, call: FuzzedCall) -> None:
        self.arguments = call.arguments

    def fetch(self) -> None:
        pass

    def on_host(self, result: Any) -> Any:
        return result


def to_device(block: Block, device: torch.device) -> torch.Tensor:
    """The block with pattern on both sides. Its address modulo 256 bytes is the same on the device."""
    start, size = _start(block), len(block.bytes)
    host = np.full(start + size + _MARGIN, PATTERN, np.uint8)
    host[start : start + size] = block.bytes
    buffer = torch.empty(len(host), dtype=torch.uint8, device=device)
    assert buffer.data_ptr() % 16 == 0 and (buffer.data_ptr() % 256 == 0 or device.type == "cpu")
    buffer.copy_(torch.from_numpy(host))
    return buffer


def _start(block: Block) -> int:
    return _MARGIN + int(block.bytes.ctypes.data) % 256


def _holds(block: Block, array: Any) -> bool:
    low, high = np.lib.array_utils.byte_bounds(array) if array.size else (array.ctypes.data,) * 2
    first = block.bytes.ctypes.data
    return bool(first <= low and high <= first + len(block.bytes))


def _numpy_dtype(name: str) -> Any:
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, name, None) or name)


# ---- torch has no negative strides; DLPack has


class _Tensor(ctypes.Structure):  # DLTensor, dlpack.h
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):  # DLManagedTensor
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_CODES = {"i": 0, "u": 1, "f": 2}  # of DLDataType
_MORE_CODES = {"bfloat16": 4, "float8_e4m3fn": 10}
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


class Backwards:
    """An array with negative strides in a buffer of torch's, which every framework can have by `__dlpack__`."""

    def __init__(self, buffer: torch.Tensor, offset: int, array: Any, strides: list[int]) -> None:
        self.dtype, self.shape = array.dtype, array.shape
        self._buffer = buffer
        self._shape = (ctypes.c_int64 * array.ndim)(*array.shape)
        self._strides = (ctypes.c_int64 * array.ndim)(*strides)
        code = _MORE_CODES.get(array.dtype.name) or _CODES[array.dtype.kind]
        data = buffer.data_ptr() + offset
        tensor = _Tensor(data, *self.__dlpack_device__(), array.ndim, code, 8 * array.itemsize, 1)
        tensor.shape, tensor.strides = self._shape, self._strides
        self._exported: list[_Managed] = []  # no deleter: they live as long as this object
        self._tensor = tensor

    def __dlpack__(self, **_: Any) -> Any:
        self._exported.append(_Managed(self._tensor, None, None))
        return _new_capsule(ctypes.addressof(self._exported[-1]), b"dltensor", None)

    def __dlpack_device__(self) -> tuple[int, int]:
        device = self._buffer.device
        return (1, 0) if device.type == "cpu" else (2, device.index or 0)
