"""The same calls with other kinds of arrays than numpy's, and through `hopwell.torch`: results have the same bits."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import hopwell
import hopwell.torch
import numpy as np
import torch
from calls import as_torch, in_torch, results
from hypothesis import strategies as st
from operators import OPERATORS

from .call import FuzzedCall, arguments_of
from .run import check_memory
from .wrong import Wrong, WrongCall

# Arguments that custom ops lack, because they write nothing in place.
ONLY_IN_PLACE = ("attn", "accumulate", "attn_with_sink")
WRONG_IN_TORCH = (
    Wrong.alone, Wrong.dtype, Wrong.rank, Wrong.size, Wrong.gaps, Wrong.integer, Wrong.real, Wrong.choice,
)  # fmt: skip


class OnlyDLPack:
    """An array that has only `__dlpack__`, a dtype and a shape."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self.dtype, self.shape = tensor, tensor.dtype, tuple(tensor.shape)

    def __dlpack__(self, **options: Any) -> Any:
        return self._tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


class OnlyInterface:
    """An array with `__array_struct__` of a temporary copy, which only that object keeps alive, as with numpy's
    scalars.
    """

    def __init__(self, array: Any) -> None:
        self._array, self.dtype, self.shape = array, array.dtype, array.shape

    @property
    def __array_struct__(self) -> Any:
        a = self._array
        low, high = np.lib.array_utils.byte_bounds(a) if a.size else (a.ctypes.data, a.ctypes.data)
        memory = ctypes.string_at(low, high - low)
        return np.ndarray(a.shape, a.dtype, memory, a.ctypes.data - low, a.strides).__array_struct__

    __dlpack__ = None


def tensor_of(array: Any) -> torch.Tensor:
    """Returns the same elements with the same strides. torch has no negative strides, so they become positive."""
    if all(stride >= 0 for stride in array.strides):
        return as_torch(array)
    axis = max((i for i, stride in enumerate(array.strides) if stride == array.itemsize), default=-1)
    return as_torch(np.moveaxis(np.moveaxis(array, axis, -1).copy(), -1, axis))  # a contiguous axis stays contiguous


KINDS: tuple[Callable[[Any], Any], ...] = (
    tensor_of, tensor_of, lambda array: array, OnlyInterface, lambda array: OnlyDLPack(tensor_of(array)),
)  # fmt: skip


@dataclass
class OtherCall:
    call: FuzzedCall
    kinds: dict[str, int]  # of the call's arrays

    def __repr__(self) -> str:
        return f"{self.call} with kinds {self.kinds}"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))


@st.composite
def other_call(draw: st.DrawFn, operator: str) -> OtherCall:
    """A valid call without outputs, and its arguments as other kinds of arrays."""
    call = draw(OPERATORS[operator].right())
    call = _without_outputs(call, "accumulate", "attn_with_sink")
    arrays = [name for name, value in call.arguments.items() if isinstance(value, np.ndarray)]
    last = {name: 2 if name in call.outputs else len(KINDS) - 1 for name in arrays}  # the others cannot be written
    return OtherCall(call, {name: draw(st.integers(0, last[name])) for name in arrays})


def _without_outputs(call: FuzzedCall, *left_out: str) -> FuzzedCall:
    """The call without the arguments that may be written, but with those that must."""
    kept = OPERATORS[call.operator].must_be_given
    left_out = (*(name for name in call.outputs if name not in kept), *left_out)
    return FuzzedCall(call.operator, arguments_of(call.arguments, *left_out), kept, call.memory)


def check_other(other: OtherCall) -> None:
    call = other.call
    call.memory.remember()
    wanted = _bits(results(getattr(hopwell, call.operator)(**call.arguments)))
    _check_and_restore(call)
    arguments = call.arguments | {name: KINDS[kind](call.arguments[name]) for name, kind in other.kinds.items()}
    assert _bits(results(getattr(hopwell, call.operator)(**arguments))) == wanted, "other arrays give other bits"
    _check_and_restore(call)
    tensors = {name: tensor_of(x) if isinstance(x, np.ndarray) else x for name, x in call.arguments.items()}
    assert _bits(_results_in_torch(call.operator, tensors)) == wanted, "hopwell.torch gives other bits"
    _check_and_restore(call)


def _check_and_restore(call: FuzzedCall) -> None:
    check_memory(call)
    if call.outputs:
        call.memory.restore()


def _results_in_torch(operator: str, tensors: dict[str, Any]) -> tuple[Any, ...]:
    """Returns the results that `hopwell` returns too. PyTorch's op also returns row losses, and zeros for no loss."""
    values = results(in_torch(operator)(**tensors))
    if operator not in ("lightning_indexer_backward", "indexer_dense_loss"):
        return values
    return (values[0] if tensors.get("d_scores") is None else None, *values[1:4])


def _bits(values: tuple[Any, ...]) -> list[tuple[tuple[int, ...], bytes] | None]:
    """Returns shapes and bits. All NaNs count as equal, because the order of sums decides which NaN results."""
    bits: list[tuple[tuple[int, ...], bytes] | None] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            flat = value.detach().reshape(-1).clone()
            if flat.element_size() > 1 and flat.is_floating_point():
                flat[flat.isnan()] = torch.nan
            array = flat.view(torch.uint8).numpy() if flat.numel() else np.zeros(0, np.uint8)
            bits.append((tuple(value.shape), array.tobytes()))
        elif value is None:
            bits.append(None)
        else:
            copy = np.array(value)
            if copy.itemsize > 1 and copy.dtype.kind not in "iu":
                copy[np.isnan(copy)] = np.nan
            bits.append((copy.shape, np.ascontiguousarray(copy).tobytes()))
    return bits


@st.composite
def wrong_torch_call(draw: st.DrawFn, operator: str) -> WrongCall | None:
    call = draw(OPERATORS[operator].right())
    left_out = () if operator == "normalize_l1" else ONLY_IN_PLACE  # its attn is the input
    call = _without_outputs(call, *left_out)
    kind = WRONG_IN_TORCH[draw(st.integers(0, len(WRONG_IN_TORCH) - 1))]
    blamed = kind(Wrong(draw, call))
    return None if blamed is None else WrongCall(call, f"{kind.__name__} {blamed[0]}", blamed, False)


@contextmanager
def _an_error(operator: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, RuntimeError) as error:  # the last: PyTorch's for a schema mismatch
        if operator not in str(error):
            raise AssertionError(f"{type(error).__name__}: {error}") from error
    else:
        raise AssertionError("this is no error")


def check_wrong_torch(wrong: WrongCall | None) -> None:
    if wrong is None or any(
        isinstance(x, bytes) for x in wrong.call.arguments.values()
    ):  # PyTorch treats bytes as strings
        return
    call = wrong.call
    try:
        tensors = {name: tensor_of(x) if isinstance(x, np.ndarray) else x for name, x in call.arguments.items()}
    except (TypeError, ValueError):  # torch has no such type
        return
    with _an_error(call.operator):
        in_torch(call.operator)(**tensors)
