"""Arrays in, arrays out, and the wording of errors."""

from typing import Any, Protocol, TypeAlias, cast

import numpy as np
import numpy.typing as npt


class SupportsDLPack(Protocol):
    def __dlpack__(self, *, stream: None = None) -> Any: ...


Tensor: TypeAlias = npt.ArrayLike | SupportsDLPack
Array: TypeAlias = npt.NDArray[Any]
Float64: TypeAlias = npt.NDArray[np.float64]
Int64: TypeAlias = npt.NDArray[np.int64]
Uint8: TypeAlias = npt.NDArray[np.uint8]


def as_array(x: Tensor) -> Array:
    """A numpy view of `x` in its own dtype."""
    if not isinstance(x, np.ndarray) and hasattr(x, "__dlpack__"):
        return np.from_dlpack(cast(Any, x))
    return np.asarray(x)


def as_float64(x: Tensor) -> Float64:
    return as_array(x).astype(np.float64)


def describe(x: Array) -> str:
    return f"{x.dtype} {list(x.shape)}"


def require(condition: bool, operator: str, argument: str, expected: str, got: object) -> None:
    """Raises the ValueError that every backend's argument check raises."""
    if not condition:
        raise ValueError(f"{operator}: {argument} must be {expected}; got {got}")


def require_shape(operator: str, argument: str, x: Array, expected: str, shape: tuple[int, ...]) -> None:
    sizes = ", ".join(str(n) for n in shape)
    require(x.shape == shape, operator, argument, f"{expected} = [{sizes}]", describe(x))


def as_indices(operator: str, argument: str, x: Tensor) -> Int64:
    """Indices, positions and lengths, widened so that nothing computed from them overflows."""
    array = as_array(x)
    require(array.dtype == np.int32, operator, argument, "int32", describe(array))
    return array.astype(np.int64)


def deliver(operator: str, argument: str, result: Float64, given: Array | None) -> Array:
    """`result` itself, or the caller's array filled with it."""
    if given is None:
        return result
    require_shape(operator, argument, given, "an array", result.shape)
    np.copyto(given, result, casting="unsafe")
    return given


def log_softmax(x: Float64) -> tuple[Float64, Float64, Float64]:
    """(max, log Σ exp(x − max), log softmax) over the last axis. Both sums are −inf where it holds nothing but −inf.

    The log-sum-exp is the sum of the first two, and must not be what probabilities are made of: beside a max of 1e17
    log 2, of two equal scores, is lost.
    """
    peak: Float64 = x.max(axis=-1, initial=-np.inf)
    shifted = x - np.where(np.isneginf(peak), 0.0, peak)[..., None]
    with np.errstate(divide="ignore", invalid="ignore"):
        log_sum: Float64 = np.log(np.exp(shifted).sum(axis=-1))
        return peak, log_sum, shifted - log_sum[..., None]
