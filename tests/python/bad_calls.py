"""Calls of every operator with one argument changed, for the tests of bad input."""

from typing import Any

import hopwell
import numpy as np
import pytest
from calls import Call, as_torch, in_torch
from operators import OPERATORS

SEED = 11


def make(operator: str, dtype: str = "float32") -> Call:
    return OPERATORS[operator].call(np.random.default_rng(SEED), dtype)


def run(call: Call, **changes: Any) -> Any:
    return getattr(hopwell, call.operator)(**call.given(**changes))


def run_in_torch(call: Call, **changes: Any) -> Any:
    arguments = {name: as_torch(value) for name, value in call.given().items()}
    return in_torch(call.operator)(**{**arguments, **changes})


def check_message(operator: str, changes: dict[str, Any], message: str) -> None:
    """The call with these changes raises an error that names the operator and begins with the message."""
    with pytest.raises(ValueError, match=operator) as raised:
        run(make(operator), **changes)
    assert str(raised.value).startswith(f"{operator}: {message}")
