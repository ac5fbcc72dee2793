"""Functions that several test files share."""

from typing import Any

import numpy as np


def assert_close(actual: Any, expected: Any, tolerance: float = 1e-11) -> None:
    """Equal shapes, and each element within `tolerance`, relative or absolute; NaN and ±inf at the same places."""
    actual, expected = np.asarray(actual, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


def norm_error(actual: Any, expected: Any) -> float:
    """Returns the norm of the difference, divided by the norm of `expected`, in float64."""
    expected = expected.double()
    return float((actual.double() - expected).norm() / expected.norm().clamp_min(1e-30))
