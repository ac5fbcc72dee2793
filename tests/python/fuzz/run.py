"""The checks that a call must pass, and rounds of calls until time is up."""

import faulthandler
import re
import time
from collections.abc import Callable
from typing import Any

import hopwell
import hypothesis
import numpy as np
from calls import results
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from . import judge
from .right import FuzzedCall
from .wrong import WrongCall

CALLS_A_ROUND = 50
HANGS = 900  # seconds that no round takes, not even where hypothesis looks for a small call that fails too


def check_right(call: FuzzedCall) -> None:
    """The results are the reference's, nothing else was written, and the call repeats bit for bit with another number
    of threads.
    """
    call.memory.remember()
    judged = judge.expect(call)
    first = _results(call, threads=2)
    _check_memory(call)
    judged(first)
    bits = [np.ascontiguousarray(result).tobytes() for result in first]
    call.memory.restore()
    again = _results(call, threads=1)
    assert [np.ascontiguousarray(result).tobytes() for result in again] == bits, "a second call gave other bits"


def _results(call: FuzzedCall, threads: int) -> tuple[Any, ...]:
    hopwell.set_num_threads(threads)
    made = results(getattr(hopwell, call.operator)(**call.arguments))
    if call.operator == "sparse_mla_backward":
        made = tuple(result for result in made if result is not None)
        if "attn" in call.arguments:
            made = (*made, call.arguments["attn"])
    return made


def _check_memory(call: FuzzedCall) -> None:
    """Nothing but the elements of outputs has changed."""
    for block in call.memory.blocks:
        assert block.margin_holds(), "memory beside an array was written"
        before = np.frombuffer(block.before, np.uint8)
        if np.array_equal(block.bytes, before):
            continue
        allowed = before.copy()
        for name in call.outputs:
            array = call.arguments[name]
            offset = array.ctypes.data - block.bytes.ctypes.data
            if 0 <= offset < len(allowed):
                np.ndarray(array.shape, array.dtype, allowed, offset, array.strides)[...] = array
        assert np.array_equal(block.bytes, allowed), "an input, or memory between an output's elements, was written"


def check_wrong(wrong: WrongCall | None) -> None:
    """A ValueError or TypeError in words that name the operator and the argument; nothing was written."""
    if wrong is None:
        return
    call = wrong.call
    call.memory.remember()
    try:
        if wrong.explained:
            hopwell.explain(call.operator, **call.arguments)
        else:
            _results(call, threads=1)
    except (ValueError, TypeError) as error:
        named = re.match(rf"{call.operator}: (\w+)", str(error))
        if named is None or named[1] not in wrong.blamed:
            raise AssertionError(f"{type(error).__name__}: {error}") from error
    else:
        raise AssertionError("this is no error")
    for block in call.memory.blocks:
        assert block.margin_holds() and block.bytes.tobytes() == block.before, "memory was written"


def rounds(strategy: st.SearchStrategy[Any], check: Callable[[Any], None], seconds: float, seed: int) -> None:
    """Rounds of calls, each from a seed of its own, one at least, until the seconds are over."""
    end = time.monotonic() + seconds
    while True:

        @hypothesis.seed(seed)
        @settings(
            max_examples=CALLS_A_ROUND,
            deadline=None,
            database=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        )
        @given(strategy)
        def one_round(call: Any) -> None:
            check(call)

        print(f"FUZZ_SEED={seed}", flush=True)  # what a call that ends the process was a call of
        faulthandler.dump_traceback_later(HANGS, exit=True)
        try:
            one_round()
        except BaseException as error:
            error.add_note(f"This is a call of the round FUZZ_SEED={seed}; with FUZZ_SECONDS=0 it is the only one.")
            raise
        finally:
            faulthandler.cancel_dump_traceback_later()
        seed += 1
        if time.monotonic() >= end:
            return
