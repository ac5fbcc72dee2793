"""The expected results of a call, by `hopwell.reference`, with the CPU's bounds; `bounds.py` has the bounds of GPUs."""

from collections.abc import Callable
from typing import Any

import numpy as np
from operators import OPERATORS

from .bounds import compare, is_gpu, on_backend
from .call import FuzzedCall


def expect(call: FuzzedCall, backend: str = "cpu") -> Callable[[tuple[Any, ...]], None]:
    """Asks the reference, before the call is made; returns a function that judges the call's results."""
    arguments = {name: value for name, value in call.arguments.items() if name != "backend"}
    operator = OPERATORS[call.operator]
    if (check := operator.check) is not None:
        return lambda results: check(arguments, backend, results)
    assert operator.expected is not None, f"{operator.name} has neither `expected` nor `check`"
    with np.errstate(all="ignore"):
        keep = {n: value for n, value in arguments.items() if n not in call.outputs or operator.reads_outputs}
        expected = [on_backend(call.operator, one, backend) for one in operator.expected(keep)]
        if (
            is_gpu(backend)
            and arguments.get("share_keys")
            and not np.isfinite(arguments["kv"].astype(np.float64)).all()
        ):
            for one in expected:  # a NaN reaches the queries that are taken together with one that selects its key
                if one.name in ("out", "dq", "dkv"):
                    one.slack = np.inf

    def judge(results: tuple[Any, ...]) -> None:
        assert len(results) == len(expected)
        for got, wanted in zip(results, expected, strict=True):
            if wanted.value is None:
                assert got is None
            else:
                compare(got, wanted)

    return judge
