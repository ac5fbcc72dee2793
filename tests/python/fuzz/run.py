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
from operators import OPERATORS

from . import judge
from .call import FuzzedCall
from .wrong import WrongCall

CALLS_A_ROUND = 50
LEAST_CALLS = 15  # hypothesis makes the first ten small
HANGS = 900  # seconds that no round takes, not even where hypothesis looks for a small call that fails too


def check_right(call: FuzzedCall) -> None:
    """The results are the reference's, nothing else was written, and the call repeats bit for bit with another number
    of threads.
    """
    call.memory.remember()
    judged = judge.expect(call)
    hopwell.set_num_threads(2)
    first = results_of(call.operator, call.arguments)
    check_memory(call)
    judged(tuple(first.values()))
    bits = bits_of(first)
    call.memory.restore()
    hopwell.set_num_threads(1)
    assert bits_of(results_of(call.operator, call.arguments)) == bits, "a second call gave other bits"


def results_of(operator: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Makes the call. Results by name, where it matters which one is which; else by number."""
    made = results(getattr(hopwell, operator)(**arguments))
    described = OPERATORS[operator]
    names = described.results or tuple(map(str, range(len(made))))
    named = dict(zip(names[: len(made)], made, strict=True))
    if described.omits:
        named = {name: result for name, result in named.items() if result is not None}
    return named | {name: arguments[name] for name in described.also_written if arguments.get(name) is not None}


def bits_of(named: dict[str, Any]) -> dict[str, bytes]:
    return {name: np.ascontiguousarray(result).tobytes() for name, result in named.items()}


def check_memory(call: FuzzedCall) -> None:
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
            hopwell.set_num_threads(1)
            results_of(call.operator, call.arguments)
    except (ValueError, TypeError) as error:
        named = re.match(rf"{call.operator}: (\w+)", str(error))
        if named is None or named[1] not in wrong.blamed:
            raise AssertionError(f"{type(error).__name__}: {error}") from error
    else:
        raise AssertionError("this is no error")
    for block in call.memory.blocks:
        assert block.margin_holds() and block.bytes.tobytes() == block.before, "memory was written"


def rounds(strategy: st.SearchStrategy[Any], check: Callable[[Any], None], seconds: float, seed: int) -> None:
    """Rounds of calls, each from a seed of its own, one at least, until the seconds are over.

    A round that takes longer ends after `LEAST_CALLS`. With 0 seconds it is whole, so that a failed call fails again.
    """
    end = time.monotonic() + seconds
    while True:
        checked, failed = 0, False

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
            nonlocal checked, failed
            if seconds > 0 and not failed and checked >= LEAST_CALLS and time.monotonic() >= end:
                return
            checked += 1
            try:
                check(call)
            except BaseException:
                failed = True  # hypothesis makes this call again
                raise

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
