"""A call of an operator, with numpy arrays, and comparisons of its results. The calls themselves are in operators/."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import hopwell.torch
import ml_dtypes
import numpy as np
import torch
from hopwell.torch.ops._indexer_dense_loss import indexer_dense_loss_and_gradients

Rng = np.random.Generator
DTYPES: dict[str, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}
FLOAT8 = "float8_e4m3fn"  # of the indexers alone


@dataclass
class Call:
    """An operator's arguments, and the bounds ‖x − ref‖/‖ref‖ of its results, in their order (0: exactly equal)."""

    operator: str
    arguments: dict[str, Any]
    bounds: tuple[float, ...]
    outputs: tuple[str, ...] = field(default=())  # arguments through which results can be written in place
    written: tuple[str, ...] = field(default=())  # arguments that a call must have, and writes

    def given(self, **changes: Any) -> dict[str, Any]:
        """The arguments with these changes, and with copies of the arrays that are written."""
        copies = {name: self.arguments[name].copy() for name in self.written}
        return {**self.arguments, **copies, **changes}


def normal(rng: Rng, shape: tuple[int, ...], dtype: str, scale: float = 1.0) -> Any:
    return (scale * rng.standard_normal(shape)).astype(DTYPES[dtype])


def bound_of(dtype: str) -> float:
    return {"float32": 1e-4, "float16": 1e-3, "bfloat16": 4e-3}[dtype]


def codes(rng: Rng, shape: tuple[int, ...]) -> Any:
    return rng.integers(0, 256, shape).astype(np.uint8)


def as_torch(x: Any) -> Any:
    """A numpy array as a tensor of the same memory; anything else as it is."""
    if not isinstance(x, np.ndarray):
        return x
    special = {"bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn}.get(x.dtype.name)
    if special is None:
        return torch.from_numpy(x)
    return torch.from_numpy(x.view(np.int16 if x.itemsize == 2 else np.uint8)).view(special)


def in_torch(operator: str) -> Callable[..., Any]:
    """PyTorch's op of an operator. `hopwell.torch.indexer_dense_loss` returns the loss alone."""
    if operator == "indexer_dense_loss":
        return indexer_dense_loss_and_gradients
    function: Callable[..., Any] = getattr(hopwell.torch, operator)
    return function


def as_numpy(x: Any) -> Any:
    """A tensor's values as float64, or as integers for integers; numpy arrays likewise."""
    if isinstance(x, torch.Tensor):
        x = x.double().numpy() if x.is_floating_point() else x.numpy()
    return x.astype(np.float64) if np.dtype(x.dtype).kind not in "iu" else x


def results(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def assert_results(call: Call, actual: Any, expected: Any) -> None:
    """Each result within its bound, NaN and ±inf at the same places."""
    assert len(results(actual)) == len(results(expected)) == len(call.bounds)
    for got, wanted, bound in zip(results(actual), results(expected), call.bounds, strict=True):
        x, ref = as_numpy(got), as_numpy(np.asarray(wanted))
        assert x.shape == ref.shape
        if bound == 0:
            np.testing.assert_array_equal(x, ref)
            continue
        np.testing.assert_array_equal(np.isfinite(x), np.isfinite(ref))
        finite = np.isfinite(ref)
        np.testing.assert_array_equal(x[~finite], ref[~finite])
        error, size = np.linalg.norm(x[finite] - ref[finite]), np.linalg.norm(ref[finite])
        assert error <= bound * size + 1e-30, f"{call.operator}: {error / max(size, 1e-300)} > {bound}"
