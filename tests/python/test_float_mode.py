"""The caller's floating-point mode: an operator's results do not depend on it, and it is the same afterwards."""

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import hopwell
import numpy as np
import pytest
import torch
from calls import Call, results
from operators import OPERATORS

MATH = ctypes.CDLL("libm.so.6")
# What fesetround() takes.
X86 = {"up": 0x800, "down": 0x400, "towards zero": 0xC00}
ARM = {"up": 0x400000, "down": 0x800000, "towards zero": 0xC00000}
ROUNDING = X86 if platform.machine() == "x86_64" else ARM
FLUSH = "flush to zero"
SUBNORMAL, ONE = np.full(1, 1e-39, np.float32), np.ones(1, np.float32)


@contextmanager
def mode(name: str) -> Iterator[None]:
    try:
        if name == FLUSH:
            if not torch.set_flush_denormal(True):
                pytest.skip("this processor has no such mode")
        else:
            assert MATH.fesetround(ROUNDING[name]) == 0
        yield
        kept = (SUBNORMAL * ONE)[0] == 0 if name == FLUSH else MATH.fegetround() == ROUNDING[name]
    finally:
        torch.set_flush_denormal(False)
        MATH.fesetround(0)
    assert kept


def with_subnormals(call: Call) -> dict[str, Any]:
    """The call's arguments, made so small that results or intermediate values are subnormal numbers."""
    factors = dict.fromkeys(("kv", "v_cache", "d_out", "x", "weights", "attn", "alpha", "global_scale"), 1e-39)
    arguments = dict(call.arguments)
    for name in factors.keys() & arguments.keys():
        value = arguments[name]
        arguments[name] = (value * 1e-39).astype(value.dtype) if isinstance(value, np.ndarray) else value * 1e-39
    if "lse" in arguments:
        arguments["lse"] = arguments["lse"] + np.float32(88)
    return arguments


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", [*ROUNDING, FLUSH])
@pytest.mark.parametrize("operator", OPERATORS)
def test_results_do_not_depend_on_the_callers_mode(operator: str, name: str, threads: int) -> None:
    call = OPERATORS[operator].call(np.random.default_rng(0), "float32")
    function = getattr(hopwell, operator)
    hopwell.set_num_threads(threads)
    try:
        for arguments in (call.arguments, with_subnormals(call)):
            expected = [np.asarray(x).tobytes() for x in results(function(**arguments))]
            with mode(name):
                actual = results(function(**arguments))
            assert [np.asarray(x).tobytes() for x in actual] == expected
    finally:
        hopwell.set_num_threads(0)


@pytest.mark.parametrize("name", [*ROUNDING, FLUSH])
def test_an_error_keeps_the_callers_mode(name: str) -> None:
    attn = np.ones((2, 3), np.float32)
    with mode(name), pytest.raises(ValueError, match="out must be float32"):
        hopwell.normalize_l1(attn, out=np.ones((2, 3), np.int32))


@pytest.mark.parametrize("global_scale", [1e-39, np.float32(1e-39)])
def test_subnormal_numbers_are_arguments_in_any_mode(global_scale: float) -> None:
    x = np.random.default_rng(0).standard_normal((2, 32)).astype(np.float32) * np.float32(1e-36)
    expected = hopwell.nvfp4_quantize(x, global_scale=global_scale)
    with mode(FLUSH):
        actual = hopwell.nvfp4_quantize(x, global_scale=global_scale)
        decoded = hopwell.nvfp4_dequantize(*actual[:2], global_scale)
    assert [np.asarray(a).tobytes() for a in actual] == [np.asarray(e).tobytes() for e in expected]
    assert decoded.tobytes() == hopwell.nvfp4_dequantize(*expected[:2], global_scale).tobytes()
    assert np.count_nonzero(decoded) > 0
