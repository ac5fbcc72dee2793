"""Allocates output arrays in the caller's framework, and reads shapes and dtypes before a call."""

import math
import operator
import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import ml_dtypes
import numpy as np

from . import _hopwell


class Array(Protocol):
    """torch.Tensor, numpy.ndarray, or anything else with `__dlpack__`."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...


ArrayT = TypeVar("ArrayT", bound=Array)
DType: TypeAlias = Any  # a name ("float32"), or the type of `array.dtype` in the array's framework

_NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "int32": np.dtype(np.int32),
    "uint8": np.dtype(np.uint8),
}


explaining: ContextVar[bool] = ContextVar("explaining", default=False)  # True in `explain`: runs and writes nothing


def _is_torch(array: object) -> bool:
    torch = sys.modules.get("torch")  # torch is already imported if the caller has a tensor
    return torch is not None and isinstance(array, torch.Tensor)


class Outputs(Generic[ArrayT]):
    """The output arrays of a call: arrays that the caller passed, and new ones.

    New arrays have the framework and the device of `like`, which is the input named `argument`. Frameworks other than
    torch and cupy get numpy arrays here; `native` converts them after the call has written them.
    """

    def __init__(self, operator: str, argument: str, like: ArrayT) -> None:
        self.operator = operator
        self._argument, self._like = argument, like
        self._make = _maker(operator, argument, like)
        self.dtype: DType = like.dtype  # type: ignore[attr-defined]
        self._given: tuple[Array, ...] = ()

    def new(self, shape: tuple[int, ...], dtype: DType) -> ArrayT:
        """Allocates an uninitialised array."""
        try:
            array: ArrayT = self._make(shape, dtype)
            return array
        except (MemoryError, RuntimeError, ValueError) as error:  # the last two: impossible sizes
            if all(n >= 0 for n in shape) and math.prod(shape) < _ADDRESSES:
                raise
            expected = "of sizes whose results fit into memory"
            message = f"{self.operator}: {self._argument} must be {expected}; got a result of {list(shape)}"
            raise ValueError(message) from error

    def given(self, argument: str, array: Array) -> Array:
        """Registers an array that the caller passed to be written in place.

        Raises if torch needs the present values of the array for a derivative.
        """
        _hopwell.check_given(self.operator, argument, array)
        self._given += (array,)
        return array

    def given_or_new(
        self, argument: str, array: Array | None, shape: tuple[int, ...], dtype: DType, option: str = ""
    ) -> Array:
        """Returns `array` if the caller passed one, else a new array.

        If an `option` of the call names the dtype, a given array must have it.
        """
        if array is None:
            return self.new(shape, dtype)
        self.given(argument, array)
        if option:
            check_dtype(self.operator, argument, array, dtype, option)
        return array

    def not_needed(self, argument: str, array: Array | None) -> None:
        """Checks that the caller passed no array for a result that is left out."""
        if array is not None:
            raise ValueError(f"{self.operator}: {argument} must be None where it is not needed; got an array")

    def native(self, *results: Any) -> tuple[Any, ...]:
        """Converts the results to the framework of `like`, after the call has written them.

        Tells torch which of the caller's arrays were written.
        """
        if self._given and not explaining.get():
            _hopwell.tell_written(self._given)
        like: Any = self._like
        if isinstance(like, np.ndarray) or _is_torch(like) or not hasattr(like, "__array_namespace__"):
            return results
        framework = like.__array_namespace__()
        return tuple(framework.asarray(r) if isinstance(r, np.ndarray) else r for r in results)


_ADDRESSES = 2**47  # size of a process's address space in bytes


def _maker(name: str, argument: str, array: Any) -> Callable[[tuple[int, ...], DType], Any]:
    if isinstance(array, np.ndarray):
        return lambda shape, dtype: np.empty(shape, _numpy_dtype(dtype))
    if _is_torch(array):
        torch = sys.modules["torch"]
        return lambda shape, dtype: array.new_empty(shape, dtype=_torch_dtype(torch, dtype))
    if not hasattr(array, "__dlpack__") or not hasattr(array, "dtype"):
        expected = "an array (torch, numpy, or anything with __dlpack__)"
        raise ValueError(f"{name}: {argument} must be {expected}; got {type(array).__name__}")
    if type(array).__module__.partition(".")[0] == "cupy":
        cupy = sys.modules["cupy"]
        return lambda shape, dtype: cupy.empty(shape, _numpy_dtype(dtype))
    return lambda shape, dtype: np.empty(shape, _numpy_dtype(dtype))


# The dtype may be a name, or the dtype of an input of another framework. A dtype that no operator supports becomes
# float32, because the argument check rejects such an input before the output is used.
def _numpy_dtype(dtype: DType) -> np.dtype[Any]:
    if isinstance(dtype, np.dtype):
        return dtype
    name = dtype if isinstance(dtype, str) else str(dtype).rpartition(".")[2]
    return _NUMPY_DTYPES.get(name, _NUMPY_DTYPES["float32"])


def _torch_dtype(torch: Any, dtype: DType) -> Any:
    if isinstance(dtype, torch.dtype):
        return dtype
    name = str(dtype)
    return getattr(torch, name if name in _NUMPY_DTYPES else "float32")


def workspace(like: Array, size: int) -> Array:
    """Allocates `size` bytes of scratch memory on the device of `like`. The compiled module calls this."""
    return Outputs("workspace", "array", like).new((size,), "uint8")


def shape_of(array: Array | None) -> tuple[int, ...]:
    """Returns the shape of an array. For anything else, (): the argument check reports it."""
    shape = getattr(array, "shape", ())
    return tuple(shape) if isinstance(shape, tuple) else ()


def dims(array: Array, count: int) -> tuple[int, ...]:
    """Returns the shape of an array with `count` dimensions. Anything else gets zeros: the check reports it."""
    shape = shape_of(array)
    return shape if len(shape) == count else (0,) * count


def dtype_of(array: Array) -> DType:
    """Returns the dtype of an array. Anything else gets a dtype too: the argument check reports it."""
    return getattr(array, "dtype", "float32")


def flag(name: str, argument: str, value: Any) -> bool:
    """Converts an argument to bool. A text is refused, because "no" would be true."""
    try:
        if not isinstance(value, str):
            return bool(value)
    except Exception as error:
        raise ValueError(f"{name}: {argument} must be True or False; got {type(value).__name__}") from error
    raise ValueError(f"{name}: {argument} must be True or False; got {value!r}")


def extent(size: Any, limit: int) -> int:
    """Clamps a size to 0 … `limit`, so that an output can be allocated before the argument check judges the size."""
    try:
        return min(max(operator.index(size), 0), limit)
    except TypeError:
        return 0


def check_size(name: str, argument: str, size: Any) -> int:
    """Checks a size, because outputs are allocated with it before the argument check sees it. It must fit an int32."""
    largest = 2**31 - 1
    try:
        number = operator.index(size)
    except TypeError:
        number = -1
    if not 0 <= number <= largest:
        bound = f"at most {largest}" if number > 0 else "at least 0"
        raise ValueError(f"{name}: {argument} must be an integer of {bound}; got {printable(size)}")
    return number


def dtype_name(name: str, argument: str, dtype: DType, allowed: tuple[str, ...]) -> str:
    """Returns the name of a dtype, which may be a name, a numpy type or dtype, or a torch dtype."""
    text = _dtype_text(dtype)
    if text not in allowed:
        choices = " or ".join(", ".join(allowed).rsplit(", ", 1))
        raise ValueError(f"{name}: {argument} must be {choices}; got {printable(text)}")
    return text


def _dtype_text(dtype: DType) -> str:
    return dtype if isinstance(dtype, str) else getattr(dtype, "__name__", None) or str(dtype).rpartition(".")[2]


def check_dtype(name: str, argument: str, array: Array, dtype: str, option: str) -> None:
    """Checks that the array to be written has the dtype that `option` names."""
    text = _dtype_text(getattr(array, "dtype", dtype))  # no dtype: not an array, which the argument check reports
    if text != dtype:
        raise ValueError(f"{name}: {argument} must be {dtype}, as {option} says; got {text}")


def printable(text: object) -> str:
    """Returns a rejected value as ASCII, because a message with a lone surrogate cannot be printed."""
    return ascii(text)[1:-1] if isinstance(text, str) else ascii(text)
